"""Where files go: the user's cache, and the runs."""

import os
import tempfile
from pathlib import Path

from jaxgpt.errors import UserError

RUNS = Path("runs")


def cache_directory() -> Path:
    """`$JAXGPT_CACHE`, or jaxgpt's folder in the user's cache directory."""
    if named := os.environ.get("JAXGPT_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt"


def is_run(directory: Path) -> bool:
    return (directory / "experiment.json").is_file()


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


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, though the power fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
