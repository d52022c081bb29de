"""Find run directories."""

import re
from pathlib import Path

from jaxgpt.errors import UserError
from jaxgpt.files import is_there

RUNS = Path("runs")


def is_run(directory: Path) -> bool:
    """Return whether a directory holds a run. Raises `UserError` for an address such as gs://bucket/run."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(directory)):  # `Path` has made one slash of two
        raise UserError(
            f"{directory} is an address: a run needs a directory of this machine; copy the run there or from there"
        )
    return is_there(directory, "A run directory is needed.") and (directory / "experiment.json").exists()


def find_run(run: str | Path | None) -> Path:
    """Return a run directory, by default the newest under `runs/`. Raises `UserError` if it is not a run directory."""
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
