"""Read what a table shows of each run: experiment.json, metrics.jsonl, summary.json and the lock."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError
from jaxgpt.files import is_there, open_file, read_json
from jaxgpt.runs.lock import is_training
from jaxgpt.runs.metadata import RunMetadata, read_metadata
from jaxgpt.runs.metrics import parse_line
from jaxgpt.tools.overview.parameters import count_parameters

LARGEST_SUMMARY = 2**26  # longest summary.json to read, in bytes
# In lines of metrics.jsonl: most of them are searched, not parsed, which would take 17 us each.
NUMBER = rb"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
RATE, VAL_LOSS = (re.compile(rb'"%s": %s' % (name, NUMBER)) for name in (b"tokens_per_second", b"val_loss"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A run in the table. None: not known, or not measured."""

    name: str  # path of the run directory
    status: str  # complete, training, interrupted, diverged, imported or damaged
    step: int | None = None  # the last one in metrics.jsonl
    steps: int | None = None  # train.steps
    size: int | None = None  # parameters of the model, without adapters
    tokens: int | None = None  # tokens that it was trained on
    loss: float | None = None  # the lowest validation loss, in nats per token
    speed: float | None = None  # median of the log, in tokens per second
    date: str | None = None  # when metrics.jsonl or experiment.json was last written, ISO 8601, local time
    verdict: str | None = None  # of `jaxgpt report`
    problem: str | None = None  # why a damaged run cannot be read


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogSummary:
    """Summary of a run's metrics.jsonl."""

    step: int  # the last one
    loss: float | None
    speed: float | None
    diverged: bool


def read_rows(directory: Path) -> list[Row]:
    """Return a row for each run below a directory, by name. Raises `UserError` if there is no such directory."""
    if not is_there(directory, "Name a directory.") or not directory.is_dir():
        raise UserError(f"no directory {directory}: name one that holds runs, or train one with `jaxgpt train`")
    return sorted(_walk(directory), key=lambda row: row.name)


def _walk(directory: Path) -> Iterator[Row]:
    """Yield the rows of all runs below a directory, links not followed."""
    unreadable: list[OSError] = []
    for folder, folders, files in os.walk(directory, onerror=unreadable.append):
        if "experiment.json" in files or "experiment.json" in folders:
            folders[:] = [name for name in folders if name != "checkpoints"]
            yield _read_row(Path(folder))
    for e in unreadable:
        yield Row(name=str(e.filename), status="damaged", problem=f"cannot be read: {e.strerror}")


def _read_row(directory: Path) -> Row:
    """Return the row of a run, also of one that cannot be read."""
    try:
        metadata = read_metadata(directory)
        log = read_log(directory / "metrics.jsonl", metadata)
        verdict = _verdict(directory / "summary.json", log.step)
        size = count_parameters(metadata.model)
    except UserError as e:
        return Row(
            name=str(directory), status="damaged", date=_date(directory), problem=str(e).removeprefix(f"{directory}/")
        )
    config, is_imported = metadata.experiment.train, metadata.imported is not None
    return Row(
        name=str(directory),
        status=_status(metadata, log),
        step=None if is_imported else log.step,
        steps=None if is_imported else config.steps,
        size=size,
        tokens=None if is_imported else log.step * config.batch_size * metadata.experiment.model.block_size,
        loss=log.loss,
        speed=log.speed,
        date=_date(directory),
        verdict=verdict,
    )


def _status(metadata: RunMetadata, log: LogSummary) -> str:
    """Return the status of a run. It is complete if its last checkpoint exists."""
    if metadata.imported is not None:
        return "imported"
    if is_training(metadata.directory):
        return "training"
    if log.diverged:
        return "diverged"
    last = metadata.directory / "checkpoints" / str(metadata.experiment.train.steps)
    return "complete" if last.is_dir() else "interrupted"


def read_log(path: Path, metadata: RunMetadata) -> LogSummary:
    """Summarise metrics.jsonl. Raises `UserError` if it is not a regular file.

    Only the last lines, and that of the best loss, are parsed and checked. A damaged line among the others can only
    shift the median of the speed by one rank.
    """
    if not is_there(path, "It holds the run's losses."):
        return LogSummary(step=0, loss=None, speed=None, diverged=False)
    with open_file(path) as f:
        raw = f.read()
    most, steps = metadata.experiment.optim.max_skipped, metadata.experiment.train.steps
    tail = _tail(raw)
    step = max((line["step"] for line in tail), default=0)
    gave_up = [line["step"] for line in tail if "skipped" in line][:most] == list(range(step, step - most, -1))
    has_nan = any(line["step"] == steps and line.get("val_loss", 0.0) is None for line in tail)
    rates = [float(found) for found in RATE.findall(raw)]
    return LogSummary(
        step=step,
        loss=_lowest(raw),
        speed=statistics.median(rates) if rates else None,
        diverged=gave_up or has_nan,
    )


def _tail(log: bytes) -> list[dict[str, Any]]:
    """Return the undamaged lines from the last on, back to the last step that was taken and logged."""
    tail = []
    for raw in reversed(log.splitlines(keepends=True)):
        if (line := parse_line(raw)) is not None:
            tail.append(line)
            if "loss" in line:
                break
    return tail


def _lowest(log: bytes) -> float | None:
    """Return the lowest validation loss of the undamaged lines."""
    for loss, at in sorted((float(match[1]), match.start()) for match in VAL_LOSS.finditer(log)):
        line = log[log.rfind(b"\n", 0, at) + 1 : log.find(b"\n", at) + 1]
        if math.isfinite(loss) and parse_line(line) is not None:
            return loss
    return None


def _verdict(path: Path, step: int) -> str | None:
    """Return the verdict of summary.json, with its step if the run has been trained since."""
    if not is_there(path, "It holds the verdict of `jaxgpt report`."):
        return None
    try:
        summary: Any = read_json(path, LARGEST_SUMMARY)
        verdict, logged = str(summary["verdict"]), summary["steps"]["logged"]
    except (UserError, KeyError, TypeError):
        return "summary.json is damaged"
    return verdict if logged == step else f"{verdict} (at step {logged})"


def _date(directory: Path) -> str | None:
    for name in ("metrics.jsonl", "experiment.json"):
        try:
            written = (directory / name).stat().st_mtime
        except OSError:
            continue
        return datetime.datetime.fromtimestamp(written).astimezone().isoformat(timespec="seconds")
    return None
