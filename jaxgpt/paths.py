"""Where files go: the user's cache, and the runs."""

import os
import secrets
import tempfile
from pathlib import Path

from jaxgpt.errors import UserError
from jaxgpt.files import is_there

RUNS = Path("runs")


def cache_directory() -> Path:
    """`$JAXGPT_CACHE`, or jaxgpt's folder in the user's cache directory."""
    if named := os.environ.get("JAXGPT_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt"
    except RuntimeError:  # no HOME, and a user whom the system does not know
        raise UserError("there is no home directory for the cache: set JAXGPT_CACHE to a directory") from None


def make_cache(directory: Path) -> None:
    """A directory of the cache, that can be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as e:
        raise UserError(
            f"cannot write into the cache {directory}: {getattr(e, 'strerror', None) or e}. JAXGPT_CACHE names another place."
        ) from None


def is_run(directory: Path) -> bool:
    return is_there(directory, "A run directory is needed.") and (directory / "experiment.json").exists()


def find_run(run: str | Path | None) -> Path:
    """The run directory named, or with None the newest under `runs/`. Raises `UserError` if it is not one."""
    if run is not None:
        directory = Path(run)
        if is_run(directory):
            return directory
        why = "it has no experiment.json" if directory.is_dir() else "there is no such directory"
        known = ", ".join(str(r) for r in _runs()) or "none yet: train one with `jaxgpt train`"
        raise UserError(f"{directory} is not a run directory: {why}. Runs here: {known}")
    runs = _runs()
    if not runs:
        raise UserError(f"no run under {RUNS}/ here: train one with `jaxgpt train`, or name a run directory")
    return max(runs, key=lambda r: (r / "experiment.json").stat().st_mtime)


def _runs() -> list[Path]:
    return sorted(d for d in RUNS.glob("*") if is_run(d)) if RUNS.is_dir() else []


def new_file(path: str, *, force: bool) -> Path:
    """Where a page is to be written: nothing is written over, but by `force`. Raises `UserError`."""
    out = Path(path)
    there = is_there(out, "Name another with --out.")
    if there and out.is_dir():
        raise UserError(f"{out} is a directory: name a file with --out")
    if there and not force:
        raise UserError(f"{out} exists: name another with --out, or write over it with --force")
    if not out.parent.is_dir():
        raise UserError(f"there is no directory {out.parent} for {out.name}: make it, or name another with --out")
    return out


def write_whole(path: Path, text: str) -> None:
    """Write a file, into a directory that is there, so that it is there whole or not at all, though the power fails."""
    # Not by `mkstemp`, whose files are their owner's alone, whatever the umask says.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, "x", encoding="utf-8", newline="") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
