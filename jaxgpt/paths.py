"""Where files go: the user's cache, and the runs."""

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as `open_whole` does; a text in UTF-8."""
    with open_whole(path) as f:
        f.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write, in a directory that is there: it appears at the end, whole or not at all, though the power fails.

    A link at `path` is replaced, and what it leads to stays as it is.
    """
    # Not by `mkstemp`, whose files are their owner's alone, whatever the umask says.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def delete(path: Path) -> None:
    """Delete a file, or a directory with all that is in it; of a link, never what it leads to."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def refuse_links_out(directory: Path) -> None:
    """Raise `UserError` for a link below a directory that leads out of it: files would be written or deleted there.

    The directory may come from someone else. It may itself be reached by a link.
    """
    home = os.path.realpath(directory)
    for folder, folders, files in os.walk(directory):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and os.path.commonpath([home, os.path.realpath(path)]) != home:
                raise UserError(
                    f"{path} is a link that leads out of {directory}, to {os.readlink(path)}: nothing is written through "
                    "it. Put there what it leads to, or delete it"
                )
