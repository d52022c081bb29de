"""List all runs below a directory, without a device."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import operator
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jaxgpt.data.corpus import service_errors
from jaxgpt.errors import UserError, first_line, reason_of
from jaxgpt.files import Json, Result, Say, is_there
from jaxgpt.model import GPTConfig
from jaxgpt.parallel import limits
from jaxgpt.runs.bucket import TO_LIST, Bucket, address_of
from jaxgpt.runs.directory import RunMetadata, is_training, read_metadata
from jaxgpt.runs.metrics import finite_values, parse_metrics
from jaxgpt.tools.grid import cell, format_table

LARGEST_FIRST = ("size", "tokens", "speed", "date")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A run in the table. A field is None if it is not known, or was not measured."""

    name: str  # path of the run directory
    status: str  # complete, training, interrupted, diverged, imported or damaged
    step: int | None = None  # the last one in metrics.jsonl
    steps: int | None = None  # train.steps
    size: int | None = None  # parameters of the model, without adapters
    tokens: int | None = None  # tokens that it was trained on
    loss: float | None = None  # the lowest validation loss, in nats per token
    reward: float | None = None  # the last one logged, of a run that draws its own rows
    speed: float | None = None  # median of the log, in tokens per second
    date: str | None = None  # when metrics.jsonl or experiment.json was last written, ISO 8601, local time
    problem: str | None = None  # what is damaged, and left out of the other fields


def runs(
    directory: str = "runs",
    *,
    sort: Literal["date", "loss", "name", "size", "speed", "tokens"] = "name",
    say: Say = lambda text: None,
) -> Result:
    """List all runs below a directory.

    Args:
        directory: is searched at any depth, but links are not followed. It may be the address of a bucket
        sort: the column to sort by: best loss, largest number or newest date first
    """
    found = _read_bucket(directory) if address_of(directory) else read_rows(Path(directory))
    field = operator.attrgetter(sort)
    measured = sorted((row for row in found if field(row) is not None), key=field, reverse=sort in LARGEST_FIRST)
    rows = measured + [row for row in found if field(row) is None]
    if not rows:
        say(f"no runs below {directory}")
    return Result([dataclasses.asdict(row) for row in rows], format_rows(rows))


def read_rows(directory: Path) -> list[Row]:
    """Return a row for each run below a directory, by name. Raises `UserError` if there is no such directory."""
    if not is_there(directory, "Name a directory.") or not directory.is_dir():
        raise UserError(f"no directory {directory}: name one that holds runs, or train one with `jaxgpt train`")
    unreadable: list[OSError] = []
    rows = []
    for folder, folders, files in os.walk(directory, onerror=unreadable.append):  # which follows no links
        if "experiment.json" in (*files, *folders):
            folders[:] = [name for name in folders if name != "checkpoints"]
            try:
                rows.append(_read_run(Path(folder)))
            except (OSError, OverflowError, ValueError) as e:  # also `UserError`
                problem = first_line(e).removeprefix(f"{folder}/")
                rows.append(Row(name=folder, status="damaged", problem=problem))
    rows += [Row(name=str(e.filename), status="damaged", problem=f"cannot be read: {reason_of(e)}") for e in unreadable]
    return sorted(rows, key=lambda row: row.name)


def _read_bucket(address: str) -> list[Row]:
    """Return a row for each run at or below an address, by name, without its arrays."""
    rows = []
    with service_errors("read", address):
        bucket = Bucket(address, "listed")
        bucket.pull(TO_LIST)
        for row in read_rows(bucket.directory):
            below = row.name.removeprefix(str(bucket.directory))
            status = "training" if row.problem is None and bucket.is_training(below) else row.status
            rows.append(dataclasses.replace(row, name=address + below, status=status))
    return rows


def _read_run(directory: Path) -> Row:
    """Return the row of a run, with what is left of a damaged log. Raises `UserError` for a run that cannot be read."""
    metadata, log = read_metadata(directory), directory / "metrics.jsonl"
    lines, problem = parse_metrics(log)
    written = max(path.stat().st_mtime for path in (directory / "experiment.json", log) if path.exists())
    config, step = metadata.experiment.train, max((line["step"] for line in lines), default=0)
    names = ("val_loss", "reward", "tokens_per_second")
    losses, rewards, rates = ([value for _, value in finite_values(lines, name)] for name in names)
    trained = {"step": step, "steps": config.steps}
    trained["tokens"] = step * config.batch_size * metadata.experiment.model.block_size
    return Row(
        name=str(directory),
        status="damaged" if problem else _status(metadata, lines, step),
        **(trained if metadata.imported is None else {}),
        size=None if metadata.model.is_foreign else count_parameters(metadata.model),
        loss=min(losses, default=None),
        reward=rewards[-1] if rewards else None,
        speed=statistics.median(rates) if rates else None,
        date=datetime.datetime.fromtimestamp(written).astimezone().isoformat(timespec="seconds"),
        problem=problem.removeprefix(f"{directory}/") or None,
    )


def _status(metadata: RunMetadata, lines: list[Json], step: int) -> str:
    """Return the status of a run. It is complete if its last checkpoint exists."""
    steps, most = metadata.experiment.train.steps, metadata.experiment.optim.max_skipped
    if metadata.imported is not None:
        return "imported"
    if is_training(metadata.directory):
        return "training"
    skipped = [line["step"] for line in lines if "skipped" in line][-most:]
    is_stuck = len(skipped) == most and skipped == list(range(step - most + 1, step + 1))
    if is_stuck or {"step": steps, "val_loss": None} in lines[-2:]:
        return "diverged"
    return "complete" if (metadata.directory / "checkpoints" / str(steps)).is_dir() else "interrupted"


@functools.cache
def count_parameters(config: GPTConfig) -> int:
    """Return the number of parameters of a model, without adapters. Needs `config.vocab_size`.

    One layer is traced for all, which have equal shapes, and no device is needed.
    """
    model = dataclasses.replace(config, scan_layers=True, global_every=None).make_model()
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    return limits.count_parameters(shapes["params"])


def format_rows(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    table = []
    for row in rows:
        reached = f" {row.step}/{row.steps}" if row.status in ("training", "interrupted", "diverged") else ""
        measured = cell(row.loss, "{:.4f}"), cell(row.speed, "{:,.0f}")
        cells = [row.name, _shorten(row.size), _shorten(row.tokens), *measured, (row.date or "")[:10]]
        cells.append(row.problem or row.status + reached)
        table.append([text if text.isprintable() else repr(text) for text in cells])
    return format_table(["run", "size", "tokens", "loss", "tokens/s", "date", "status"], table)


def _shorten(number: int | None) -> str:
    """Return a count with four digits: 9,999 as it is, 124.4M."""
    if number is None or number < 10_000:
        return cell(number, "{:,}")
    factor, name = next((factor, name) for factor, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if factor <= number)
    return f"{number / factor:.4g}{name}"
