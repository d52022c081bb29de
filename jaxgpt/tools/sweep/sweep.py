"""Find the best values of an experiment's fields by successive halving.

Jamieson and Talwalkar 2016, arXiv:1502.07943: all points are trained for a short time, the best third for three times
as long, and so on. Each run has a complete schedule of its own: one that is cut in the middle of its schedule has not
decayed its learning rate and cannot be compared with one that has. The best learning rate of short runs tends to be
higher than that of long ones, so a third survives, and not fewer.

The last round, at full length, has seeds that selected nothing before, so that the means of the finalists are free of
the winner's curse of the earlier rounds. That of the winner, the best of three, is too low by at most 0.85 standard
errors, where the three are equal.

The points are those of a space-filling sequence. Optuna would propose the next point from the results of earlier ones,
but all points of a round are needed at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import Experiment, differences, from_dict
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_json, render_json, write_whole
from jaxgpt.fitting import fit
from jaxgpt.runs.metrics import finite_values, read_metrics
from jaxgpt.runs.resume import CHANGEABLE
from jaxgpt.statistics import mean_interval
from jaxgpt.tools.curves import DIVERGED, train_or_resume
from jaxgpt.tools.sweep.space import Axis, describe_point, draw_points, with_values

SWEEP = "sweep.json"  # the definition and, once there is one, the result
LARGEST_SWEEP = 2**24  # bytes of it
SHARE = 3  # one point in three survives a round, and is then trained three times as long


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The definition of a sweep."""

    experiment: Experiment  # to vary
    axes: tuple[Axis, ...]  # the fields that vary
    trials: int = 20  # points to draw
    seeds: int = 3  # runs of each finalist
    seed: int = 0  # of the points

    @property
    def points(self) -> list[dict[str, Any]]:
        """Return the values of each trial, a dictionary by field."""
        return draw_points(self.axes, self.trials, self.seed)

    def to_json(self) -> dict[str, Any]:
        """Return the definition as JSON, with the points."""
        return {
            "experiment": dataclasses.asdict(self.experiment),
            "over": ", ".join(map(str, self.axes)),
            "trials": self.trials,
            "seeds": self.seeds,
            "seed": self.seed,
            "points": self.points,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A point, and the losses of its runs in nats per token."""

    trial: int  # its number, from 1
    point: dict[str, Any]  # {field: value}
    losses: list[list[float | None]] = dataclasses.field(default_factory=list)  # by round and seed; None: diverged

    @property
    def mean(self) -> float:
        """Return the mean of its last round; infinity if a run of it diverged."""
        finite = [loss for loss in self.losses[-1] if loss is not None]
        return float(np.mean(finite)) if len(finite) == len(self.losses[-1]) else math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Runs of equal length. The last round is at full length, with new seeds."""

    trials: int
    steps: int
    seeds: tuple[int, ...]

    @property
    def total(self) -> int:
        """Return the steps of all runs."""
        return self.trials * self.steps * len(self.seeds)


def plan_rounds(sweep: Sweep) -> list[Round]:
    """Return the rounds. Raises `UserError` if the experiment has too few steps."""
    counts = [len(sweep.points)]
    while counts[-1] > SHARE:
        counts.append(-(-counts[-1] // SHARE))
    *short, last = counts
    train = sweep.experiment.train
    parts = SHARE ** len(short)
    if train.steps < parts:
        raise UserError(
            f"train.steps={train.steps}: {counts[0]} trials begin with runs of 1/{parts} of the steps, so needs "
            f"at least {parts}, or fewer trials"
        )
    rounds = [
        Round(trials=count, steps=train.steps // (parts // SHARE**r), seeds=(train.seed,))
        for r, count in enumerate(short)
    ]
    new = tuple(range(train.seed + 1, train.seed + 1 + sweep.seeds))
    return [*rounds, Round(trials=last, steps=train.steps, seeds=new)]


def format_cost(sweep: Sweep, rounds: Sequence[Round]) -> str:
    """Return the steps of all rounds in words."""
    parts = [
        f"{r.trials} x {r.steps:,}" if len(r.seeds) == 1 else f"{r.trials} x {len(r.seeds)} seeds x {r.steps:,}"
        for r in rounds
    ]
    total, runs = sum(r.total for r in rounds), sum(r.trials * len(r.seeds) for r in rounds)
    times = total / sweep.experiment.train.steps
    return f"{runs} runs of {' + '.join(parts)} = {total:,} steps, {times:.1f} times those of one full run"


def run_sweep(
    sweep: Sweep,
    directory: Path,
    *,
    say: Callable[[str], None] = lambda text: None,
    fit_one: Callable[..., Any] = fit,
) -> dict[str, Any]:
    """Train or resume all rounds of a sweep in subdirectories, and rank the trials.

    Args:
        sweep: what to vary, and how.
        directory: directory of the sweep. The same sweep is resumed there.
        say: receives a line of text for each run.
        fit_one: trains a run as `jaxgpt.fit` does.

    Returns:
        "rounds", each with its "steps" and "seeds"; "trials", the fields of each `Trial`, the winner first; "gap", see
        `gap`.

    Raises:
        UserError: a point is not a valid experiment, the directory has another sweep, or all runs diverged.
    """
    rounds, points = plan_rounds(sweep), sweep.points
    planned = _experiments(sweep, points, rounds)
    _check_or_write_definition(sweep, directory)
    say(format_cost(sweep, rounds))
    trials = [Trial(trial=n, point=point) for n, point in enumerate(points, 1)]
    alive = trials
    for r, current in enumerate(rounds):
        for trial in alive:
            trial.losses.append([])
        for seed in current.seeds:
            for trial in alive:
                name = f"steps-{current.steps}-seed-{seed}"
                loss = _train(planned[trial.trial, r, seed], directory / f"trial-{trial.trial:02}" / name, fit_one)
                trial.losses[-1].append(loss)
                result = "diverged" if loss is None else f"{loss:.4f}"
                say(f"round {r + 1} of {len(rounds)}, trial {trial.trial}, {name}: {result}")
        alive = sorted((trial for trial in alive if trial.mean < math.inf), key=lambda trial: trial.mean)
        if not alive:
            raise UserError(
                f"all trials of {current.steps:,} steps diverged: vary over smaller values. See {directory}"
            )
        alive = alive[: rounds[min(r + 1, len(rounds) - 1)].trials]
    ranked = sorted(trials, key=lambda trial: (-len(trial.losses), trial.mean))
    return {
        "rounds": [dataclasses.asdict(r) for r in rounds],
        "trials": [dataclasses.asdict(trial) for trial in ranked],
        "gap": gap(*(trial.losses[-1] for trial in alive[:2])),
    }


def _experiments(
    sweep: Sweep, points: Sequence[dict[str, Any]], rounds: Sequence[Round]
) -> dict[tuple[int, int, int], Experiment]:
    """Return the experiment of each trial, round and seed, so that an invalid one is found before the first run."""
    found = {}
    for trial, point in enumerate(points, 1):
        try:
            full = with_values(sweep.experiment, point)
            for r, current in enumerate(rounds):
                for seed in current.seeds:
                    found[trial, r, seed] = shorten(full, current.steps, seed)
        except UserError as e:
            raise UserError(f"trial {trial} of the sweep, {describe_point(point)}: {e}") from None
    return found


def shorten(experiment: Experiment, steps: int, seed: int) -> Experiment:
    """Return an experiment of fewer steps, with a complete schedule: warm-up steps that are given shrink alike."""
    warmup = experiment.optim.warmup_steps
    if warmup is not None:
        warmup = -(-warmup * steps // experiment.train.steps)
    return dataclasses.replace(
        experiment,
        optim=dataclasses.replace(experiment.optim, warmup_steps=warmup),
        train=dataclasses.replace(experiment.train, steps=steps, seed=seed, sample_tokens=0),
    )


def _train(experiment: Experiment, directory: Path, fit_one: Callable[..., Any]) -> float | None:
    """Train or resume a run, and return its last validation loss. None: it diverged."""
    train_or_resume(experiment, directory, fit_one)
    if (directory / DIVERGED).exists():
        return None
    return finite_values(read_metrics(directory / "metrics.jsonl"), "val_loss")[-1][1]


def _check_or_write_definition(sweep: Sweep, directory: Path) -> None:
    """Write the definition, unless there are runs already. Raises `UserError` if they are of something else."""
    path, ours = directory / SWEEP, sweep.to_json()
    if is_there(directory, "Name another directory with --run-dir.") and not directory.is_dir():
        raise UserError(f"{directory} is not a directory: name another with --run-dir")
    names = {p.name for p in directory.glob("*") if not p.name.startswith(f"{SWEEP}.")}
    if names <= {SWEEP}:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, render_json({"definition": ours}, indent=1, ensure_ascii=False) + "\n")
        return
    if SWEEP not in names:
        raise UserError(f"{directory} exists and is not a sweep (no {SWEEP}): name another with --run-dir")
    try:
        theirs = read_json(path, LARGEST_SWEEP)["definition"]
        changed = differences(from_dict(Experiment, theirs["experiment"]), sweep.experiment)
        # The text is compared where a run is resumed, but not where all are complete.
        kept = {name for name in changed if name.startswith(CHANGEABLE) and not name.startswith("data.")}
        other = {name: (theirs[name], ours[name]) for name in ours if name != "experiment"}
    except (TypeError, KeyError):
        raise UserError(f"{path} is damaged: name another directory with --run-dir") from None
    found = {name: values for name, values in (changed | other).items() if name not in kept and values[0] != values[1]}
    if found:
        listed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in found.items() if name != "points")
        raise UserError(f"{directory} holds another sweep: {listed or 'points'}. Name another directory with --run-dir")


def gap(first: Sequence[float | None], *second: Sequence[float | None]) -> dict[str, float | None] | None:
    """Return the "mean" and the "margin" of the loss by which the second finalist is worse than the first.

    The margin is the half-width of the 95% interval of the differences paired by seed, None with one seed. An
    unadjusted two-sided test of the first against the second is valid although both were chosen by these losses (Hung
    and Fithian 2019, arXiv:1610.03944). None: there is no second.
    """
    if not second:
        return None
    mean, margin = mean_and_margin((np.array(second[0], float) - np.array(first, float)).tolist())
    return {"mean": mean, "margin": margin}


def mean_and_margin(losses: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of losses by seed and the half-width of its 95% interval, None with one seed."""
    if len(losses) < 2:
        return losses[0], None
    mean, margin = mean_interval(losses)
    return float(mean), float(margin)
