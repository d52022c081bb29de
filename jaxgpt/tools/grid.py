"""Train a grid of runs, each to its end or taken as it is, and tabulate what came out.

The record of a grid is its run directories: what is complete is read, what was interrupted resumes, what another process
trains is passed over, and a run that diverged keeps the reason in `diverged.txt` and is not tried again. So one grid may
be trained by several processes, on several machines, that see one folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config.serialize import to_dict
from jaxgpt.data.corpus import open_bucket, service_errors
from jaxgpt.errors import Diverged, Preempted, first_line
from jaxgpt.experiment import Experiment
from jaxgpt.files import Json, Say, write_whole
from jaxgpt.runs.bucket import HeldElsewhere, address_of
from jaxgpt.runs.code import Files, own_code, unpack
from jaxgpt.runs.directory import CLAIM, fetch_run, is_run, lock_run, read_metadata
from jaxgpt.runs.metrics import finite_values, read_metrics
from jaxgpt.runs.resume import check_same_configuration
from jaxgpt.tools.executor import Executor
from jaxgpt.training import fit

DIVERGED = "diverged.txt"
POLL = 5.0  # seconds between two looks at runs that other processes train
GridRun = tuple[str, Experiment, Path]  # name, experiment and directory of a run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Validation losses of one run in nats per token, and when they were measured. Empty if the run has none."""

    tokens: Sequence[int] = ()  # tokens trained on at each measurement
    # time of the steps, without compilation and validation, which take longer in the first run of a variant
    seconds: Sequence[float] = ()
    losses: Sequence[float] = ()  # losses in nats per token
    failure: str = ""  # why there are none: "diverged", or the error that ended the run
    device: str = ""  # what the run was started on

    @property
    def last(self) -> float | None:
        """Return the last loss, None if the run diverged, NaN if it failed."""
        return self.losses[-1] if self.losses else None if self.failure == "diverged" else math.nan


def train_grid(
    grid: Sequence[GridRun], say: Say, executor: Executor | None = None, *, waits: bool = True
) -> list[Curve]:
    """Train or resume the runs of a grid, and return their curves in its order.

    A run that fails does not end the others, unless it is the first to end.

    Args:
        grid: the runs.
        executor: trains several at once. None means one after another, here.
        waits: whether to wait for runs that other processes train.

    Raises:
        UserError: a directory has a run of another configuration, or the first run to end has failed by a mistake.
        HeldElsewhere: other processes train all that is left, and `waits` is False.
    """
    for _, experiment, directory in grid:
        if address_of(directory) is None and is_run(directory):
            check_same_configuration(read_metadata(directory), experiment)
    curves: dict[int, Curve] = {}
    passed_over: set[int] = set()
    at_once, began = 1 if executor is None else executor.size, time.monotonic()
    while left := {number: run for number, run in enumerate(grid) if number not in curves}:
        for number, found in train_here(left) if executor is None else train_there(left, executor):
            name = grid[number][0]
            if isinstance(found, HeldElsewhere):
                if number not in passed_over:
                    say(f"{name}: passed over, {found}")
                passed_over.add(number)
                continue
            if isinstance(found, BaseException):
                if not curves:
                    raise found
                found = Curve(failure=first_line(found))
            curve = curves[number] = found
            ended = f"{curve.losses[-1]:.4f} after {curve.seconds[-1]:.1f} s" if curve.losses else curve.failure
            progress = format_progress(curves.values(), len(grid), at_once, time.monotonic() - began)
            say(f"{name}: {ended} {progress}")
        held = len(grid) - len(curves)
        if held == len(left):  # nothing new: all that is left is held
            if not waits:
                said = f"other processes train {held} of {len(grid)} runs: the last one to end has the result"
                raise HeldElsewhere(said)
            time.sleep(POLL)
    return [curves[number] for number in range(len(grid))]


def finite_losses(losses: Iterable[float | None]) -> list[float]:
    """Return the losses of the runs that have one: see `Curve.last`."""
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def train_here(runs: dict[int, GridRun]) -> Iterator[tuple[int, Curve | Exception]]:
    """Train runs one after another in this process, and yield the number of each, and its curve or why it failed."""
    for number, (_, experiment, directory) in runs.items():
        try:
            found = train_or_resume(experiment, directory, fit)
        except Preempted as e:
            raise Preempted(f"{str(e).partition(' To continue')[0]} Run the same command to resume.") from None
        except Exception as e:
            found = e
        yield number, found


def train_there(runs: dict[int, GridRun], executor: Executor) -> Iterator[tuple[int, Curve | BaseException]]:
    """Train runs by an executor, and yield the same of each as it ends."""
    submitted = {
        executor.submit(train_unpacked, to_dict(experiment), own_code(experiment), directory): number
        for number, (_, experiment, directory) in runs.items()
    }
    for done in as_completed(submitted):
        yield submitted[done], done.exception() or done.result()


def train_unpacked(values: Json, files: Files, directory: Path) -> Curve:
    """Train a run in a process that an executor has started: the task of a grid."""
    try:
        return train_or_resume(unpack(values, files), directory, fit)
    except Preempted as e:  # its machine is taken away, or all are to stop
        raise HeldElsewhere(f"it was interrupted: {e}") from None


def format_progress(curves: Collection[Curve], runs: int, at_once: int, seconds: float) -> str:
    """Return a bar, the numbers of runs and the time left. seconds: since the first one began."""
    done, failed = len(curves), sum(not curve.losses for curve in curves)
    minutes, rest = divmod(int(seconds / done * (runs - done)), 60)
    bar = ("#" * (20 * done // runs)).ljust(20, "-")
    running = min(runs - done, at_once)
    return f"[{bar}] {done} of {runs} done, {running} running, {failed} failed, {minutes}:{rest:02d} left"


def train_or_resume(experiment: Experiment, directory: Path, fit_one: Callable[..., Any]) -> Curve:
    """Train a run to its end if needed, and return its curve. Raises `UserError` if it has another configuration.

    Raises `HeldElsewhere` if another process trains it. fit_one: trains a run as `jaxgpt.fit` does.
    """
    with contextlib.ExitStack() as stack:
        if address_of(directory) is None:  # a run in a bucket is held by its lease
            stack.callback(lock_run(directory, fresh=False, name=CLAIM).release)
        validated, place = [], fetch_run(directory)
        if is_run(place):
            check_same_configuration(read_metadata(place), experiment)
            validated = finite_values(read_metrics(place / "metrics.jsonl"), "val_loss")
        if (place / DIVERGED).exists():
            return Curve(failure="diverged")
        if not validated or validated[-1][0] < experiment.train.steps:
            try:
                fit_one(experiment, directory, progress=False, extend=False)
            except Diverged as e:
                write_result(directory, DIVERGED, f"{e}\n")
                return Curve(failure="diverged")
        metadata = read_metadata(place)
        return dataclasses.replace(read_curve(place, metadata.experiment), device=metadata.device)


def write_result(directory: Path, name: str, content: str) -> None:
    """Write a file of a grid, in its directory or bucket."""
    address = address_of(directory)
    if address is None:
        write_whole(directory / name, content)
        return
    with service_errors("write", address):
        files, root = open_bucket(address)
        files.pipe_file(f"{root}/{name}", content.encode())


def read_curve(directory: Path, experiment: Experiment) -> Curve:
    """Return the curve of a run, with seconds computed from the logged tokens per second, which exclude compilation.

    experiment: the experiment as trained. Its context may be shorter than the requested one.
    """
    lines = read_metrics(directory / "metrics.jsonl")
    validated = finite_values(lines, "val_loss")
    rated = [(step, rate) for step, rate in finite_values(lines, "tokens_per_second") if rate > 0]
    steps, rates = np.array(rated, float).reshape(-1, 2).T
    per_step = experiment.train.batch_size * experiment.model.block_size
    elapsed = np.cumsum(np.diff(steps, prepend=0.0) * per_step / rates)
    at = [step for step, _ in validated]
    seconds = np.interp(at, [0.0, *steps], [0.0, *elapsed]).tolist()
    tokens, losses = [step * per_step for step in at], [loss for _, loss in validated]
    return Curve(tokens=tokens, seconds=seconds, losses=losses)


def cell(x: float | None, form: str) -> str:
    """Return a number in a table, nothing for None. form: such as {:.4f}."""
    return "" if x is None else form.format(x)


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])
