"""Write `metrics.jsonl`, one JSON object per line, readable at any time, and plot `loss.png`."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.errors import CheckpointSaveError, reason_of
from jaxgpt.files import Json, is_there, open_file, open_whole, render_json, write_whole

LARGEST_STEP, LARGEST = 2**63 - 1, sys.float_info.max  # larger numbers overflow in use


class MetricsFile:
    """Append lines to `metrics.jsonl`. NaN and infinity become null, since JSON lacks them."""

    def __init__(self, path: Path | None):
        """Open the file. path: None writes nothing."""
        self._path = path or Path(os.devnull)
        self._file = self._path.open("ab", buffering=0)  # SIGKILL loses nothing, and `tail -f` follows

    def write(self, **values: Any) -> None:
        """Append a line. Raises `CheckpointSaveError` if it cannot be written."""
        line = f"{render_json(values)}\n".encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            raise CheckpointSaveError(f"{self._path} cannot be written: {reason_of(e)}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[Json]:
    """Return the lines in order. Damaged lines are left out with a warning: see `parse_metrics`."""
    lines, problem = parse_metrics(path)
    if problem:
        warnings.warn(problem, UserWarning, stacklevel=2)
    return lines


def parse_metrics(path: Path) -> tuple[list[Json], str]:
    """Return the lines in order, and how many are damaged, in words: "" if none is.

    A line with a value that `MetricsFile` does not write is damaged as one that is not JSON. A last
    line without a newline counts for nothing: it is being written, or was when the run was killed.
    """
    if not is_there(path, "It holds the run's losses."):
        return [], ""
    lines, damaged = [], 0
    with open_file(path) as f:
        for raw in f:
            try:
                line = json.loads(raw)
                line.pop("crc32", None)  # earlier versions wrote a checksum
                _check_line(**line)
                lines.append(line)
            except (ValueError, RecursionError, TypeError, AttributeError):
                damaged += raw.endswith(b"\n")
    return lines, f"{path}: {damaged} of {len(lines) + damaged} lines are damaged and left out" if damaged else ""


def _check_line(step: Any, skipped: Any = "", val_losses: Any = {}, **numbers: Any) -> None:  # noqa: B006
    """Raise an error unless a line has a step, and only what `MetricsFile` writes.

    skipped: the reason of a skipped step. val_losses: losses by source.
    """
    values = [x for x in (step, *numbers.values(), *val_losses.values()) if x is not None]
    is_good = all(type(x) in (int, float) and abs(x) <= LARGEST for x in values)
    if not (is_good and type(step) is int and 0 <= step <= LARGEST_STEP and isinstance(skipped, str)):
        raise TypeError


def rewind_metrics(path: Path, step: int) -> None:
    """Remove the lines after `step`, which the resumed run writes again."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    write_whole(path, "".join(f"{render_json(line)}\n" for line in kept))


def finite_values(lines: Sequence[Json], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of each finite value of a field, such as "val_loss": each step's last."""
    return sorted({x["step"]: x[name] for x in lines if x.get(name) is not None and math.isfinite(x[name])}.items())


def plot_losses(lines: Sequence[Json], path: Path, title: str) -> None:
    """Plot the losses of a run, if there are any, to a PNG file. lines: of `metrics.jsonl`."""
    train, val = finite_values(lines, "loss"), finite_values(lines, "val_loss")
    if not train and not val:
        return
    from matplotlib.figure import Figure  # takes 2 s to import, and pyplot would set global state

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="optimiser step", ylabel="loss")
    if train:
        axes.plot(*zip(*train, strict=True), color="#9ecae1", label="training, one batch")
    if val:
        best = min(loss for _, loss in val)
        label = f"validation, best {best:.3f}"
        axes.plot(*zip(*val, strict=True), color="#08519c", marker="o", label=label)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    with open_whole(path) as f:
        figure.savefig(f, format="png", dpi=130)
