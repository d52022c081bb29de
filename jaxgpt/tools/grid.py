"""Train a grid of runs, each to its end or taken as it is, and tabulate what came out.

The record of a grid is its run directories: what is complete is read, what was interrupted resumes, and a run that
diverged keeps the reason in `diverged.txt` and is not tried again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.errors import Diverged, Preempted
from jaxgpt.experiment import Experiment
from jaxgpt.files import write_whole
from jaxgpt.runs.directory import is_run, read_metadata
from jaxgpt.runs.metrics import finite_values, read_metrics
from jaxgpt.runs.resume import check_same_configuration

DIVERGED = "diverged.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Validation losses of one run in nats per token, and when they were measured. Empty if the run diverged."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # tokens trained on at each measurement
    # time of the steps, without compilation and validation, which take longer in the first run of a variant
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)  # losses in nats per token


def train_grid(
    grid: Iterable[tuple[str, Experiment, Path]], say: Callable[[str], None], fit_one: Callable[..., Any]
) -> list[Curve]:
    """Train or resume the runs of a grid, each (name, experiment, directory), and return their curves in that order.

    say: receives a line of text for each run. fit_one: trains a run as `jaxgpt.fit` does.
    """
    curves = []
    for name, experiment, directory in grid:
        try:
            curve = train_or_resume(experiment, directory, fit_one)
        except Preempted as e:
            raise Preempted(f"{str(e).partition(' To continue')[0]} Run the same command to resume.") from None
        say(f"{name}: {f'{curve.losses[-1]:.4f} after {curve.seconds[-1]:.1f} s' if curve.losses else 'diverged'}")
        curves.append(curve)
    return curves


def train_or_resume(experiment: Experiment, directory: Path, fit_one: Callable[..., Any]) -> Curve:
    """Train a run to its end if needed, and return its curve. Raises `UserError` if it has another configuration.

    fit_one: trains a run as `jaxgpt.fit` does.
    """
    diverged = directory / DIVERGED
    validated = []
    if is_run(directory):
        check_same_configuration(read_metadata(directory), experiment)
        validated = finite_values(read_metrics(directory / "metrics.jsonl"), "val_loss")
    if diverged.exists():
        return Curve()
    if not validated or validated[-1][0] < experiment.train.steps:
        try:
            fit_one(experiment, directory, progress=False, extend=False)
        except Diverged as e:
            write_whole(diverged, f"{e}\n")
            return Curve()
    return read_curve(directory, read_metadata(directory).experiment)


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
    return Curve(tokens=[step * per_step for step in at], seconds=seconds, losses=[loss for _, loss in validated])


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])
