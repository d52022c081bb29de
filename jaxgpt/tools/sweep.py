"""Find the best values of an experiment's fields by successive halving.

Jamieson and Talwalkar 2016, arXiv:1502.07943: all points are trained for a short time, the best third for three times
as long, and so on, each run with a complete schedule of its own. The best learning rate of short runs tends to be
higher than the best of long ones, so a third survives, and not fewer.

The last round, at full length, has seeds that selected nothing before, so its means are free of the winner's curse of
the earlier rounds. The winner's mean, the best of three, is too low by at most 0.85 standard errors.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config.serialize import suggest, to_dict
from jaxgpt.config.validate import Count, field_hints, short_repr
from jaxgpt.config.words import parse_value, plain_types, replace_fields
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import Json, Say, render_json
from jaxgpt.runs.bucket import address_of
from jaxgpt.runs.directory import RUNS, is_run
from jaxgpt.statistics import mean_interval
from jaxgpt.tools.executor import Workers, open_executor
from jaxgpt.tools.grid import finite_losses, format_table, train_grid, write_result

SWEEP = "sweep.json"  # the definition and the result
SHARE = 3  # one point in three survives a round, and is then trained three times as long
VARIABLE = ("model", "optim", "lora")
# These fields change the tokens of a run, or what a loss per token means.
FIXED = ("model.block_size", "model.vocab_size")
DIGITS = 4  # digits of a float in a range: 0.001234


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A swept field: choices, or a range of floats or of whole numbers."""

    field: str  # such as optim.learning_rate
    choices: tuple[Any, ...] = ()  # empty for a range
    low: float = 0.0
    high: float = 0.0

    def at(self, share: float) -> Any:
        """Return the value at a share, from 0 to less than 1, of the choices or of the range: above 0 of its logarithm."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        span = self.high - self.low
        value = self.low * (self.high / self.low) ** share if self.low > 0 else self.low + span * share
        value = round(value) if isinstance(self.low, int) else float(f"{value:.{DIGITS}g}")
        return min(max(value, self.low), self.high)


def parse_axes(texts: Sequence[str], experiment: Experiment) -> list[Axis]:
    """Parse what --over was given, once for each field. Raises `UserError`. experiment: its classes have the fields."""
    if not texts:
        raise UserError("a sweep needs a field: --over optim.learning-rate=1e-4..1e-1")
    hints = {}
    for section in VARIABLE:
        for name, hint in field_hints(type(getattr(experiment, section))).items():
            if f"{section}.{name}" not in FIXED and tuple not in plain_types(hint):
                hints[f"{section}.{name}"] = hint
    axes = []
    for text in texts:
        try:
            axes.append(_parse_axis(text, hints))
        except UserError as e:
            raise UserError(f"--over {text}: {e}") from None
    fields = [axis.field for axis in axes]
    if len(set(fields)) < len(fields):
        raise UserError(f"--over has a field twice: {', '.join(fields)}")
    return axes


def _parse_axis(text: str, hints: dict[str, Any]) -> Axis:
    """Parse `FIELD=LOW..HIGH` or `FIELD=A,B,C`, a field with - or _, where hints has the types of the fields."""
    name, _, values = text.partition("=")
    field = name.replace("-", "_")
    if not values:
        raise UserError("give FIELD=LOW..HIGH or FIELD=A,B,C, such as optim.learning-rate=1e-4..1e-1")
    if field not in hints:
        raise UserError(
            f"there is no such field to vary{suggest(field, hints)}. Fields of {', '.join(VARIABLE)} can vary, "
            f"except lists and {' and '.join(FIXED)}"
        )
    is_range = ".." in values and not {int, float}.isdisjoint(plain_types(hints[field]))
    words = values.split("..", 1) if is_range else values.split(",")
    found = tuple(parse_value(field, word.strip(), hints[field]) for word in words)
    if not is_range:
        if len(set(found)) < max(2, len(found)):
            raise UserError("give two or more different choices, or a range of numbers, LOW..HIGH")
        return Axis(field=field, choices=found)
    if None in found or not found[0] < found[1]:
        raise UserError("give LOW below HIGH")
    return Axis(field=field, low=found[0], high=found[1])


def draw_points(axes: Sequence[Axis], trials: int) -> list[Json]:
    """Return the points of a sweep, {field: value}, without repetitions.

    One field is spread evenly. Several form a scrambled Halton sequence (Owen 2017, arXiv:1706.02808), which covers each
    field as evenly as its own sweep would. There are fewer than `trials` where whole numbers or choices repeat.
    """
    if len(axes) == 1:
        shares = (np.arange(trials)[:, None] + 0.5) / trials
    else:
        from scipy.stats import qmc  # a dependency of jax, which takes 2 s to import

        shares = qmc.Halton(len(axes), scramble=True, seed=np.random.default_rng(0)).random(trials)
    points = [tuple(axis.at(share) for axis, share in zip(axes, row, strict=True)) for row in shares.tolist()]
    return [dict(zip([axis.field for axis in axes], point, strict=True)) for point in dict.fromkeys(points)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Runs of equal length. The last round is at full length, with new seeds."""

    trials: int
    steps: int
    seeds: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A point, and the losses of its runs in nats per token."""

    trial: int  # its number, from 1
    point: Json  # {field: value}
    losses: list[list[float | None]] = dataclasses.field(default_factory=list)  # by round and seed: see `Curve.last`

    @property
    def mean(self) -> float:
        """Return the mean of its last round, infinity if a run of it diverged or failed."""
        finite = finite_losses(self.losses[-1])
        return float(np.mean(finite)) if len(finite) == len(self.losses[-1]) else math.inf

    def __str__(self) -> str:
        return f"trial {self.trial}, {', '.join(f'{field}={value}' for field, value in self.point.items())}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Result of a sweep."""

    directory: Path
    rounds: list[Round]
    trials: list[Trial]  # the winner first
    __repr__ = short_repr

    def to_json(self) -> Json:
        """Return rounds and trials."""
        found = dataclasses.asdict(self)
        return {"rounds": found["rounds"], "trials": found["trials"]}

    def __str__(self) -> str:
        steps = [f"{r.steps:,} steps" for r in self.rounds]
        steps[-1] += ", new seeds (95%)"
        rows = []
        for trial in self.trials:
            losses = [_format_losses(losses) for losses in trial.losses]
            losses += [""] * (len(steps) - len(losses))
            rows.append([str(trial.trial), *map(str, trial.point.values()), *losses])
        lines = [format_table(["trial", *self.trials[0].point, *steps], rows), ""]
        # An unadjusted two-sided test of the first against the second is valid although both were chosen by these losses
        # (Hung and Fithian 2019, arXiv:1610.03944).
        first, second = (*self.trials, self.trials[0])[:2]
        if len(second.losses) == len(steps) and second.mean < math.inf and second is not first:
            gap = np.subtract(second.losses[-1], first.losses[-1]).tolist()
            lines.append(f"trial {second.trial} is worse than trial {first.trial} by {_format_losses(gap)}")
        for field, best in first.point.items():
            tried = [trial.point[field] for trial in self.trials]
            if {type(value) for value in tried} <= {int, float} and best in (min(tried), max(tried)):
                lines.append(f"{field}={best} is an end of the values tried: better ones may lie outside")
        return "\n".join([*lines, f"all losses: {self.directory / SWEEP}"])


def _format_losses(losses: list[float | None]) -> str:
    """Return the mean over the seeds and its 95% interval, or that it diverged."""
    finite = finite_losses(losses)
    if len(finite) < len(losses):
        return f"{len(losses) - len(finite)} of {len(losses)} {'diverged' if None in losses else 'failed'}"
    if len(finite) == 1:
        return f"{finite[0]:.4f}"
    mean, margin = mean_interval(np.asarray(finite))
    return f"{mean:.4f} ± {margin:.4f}"


def plan_rounds(experiment: Experiment, trials: int, seeds: int) -> list[Round]:
    """Return the rounds. Raises `UserError` if the experiment has too few steps."""
    train, counts = experiment.train, [trials]
    while counts[-1] > SHARE:
        counts.append(-(-counts[-1] // SHARE))
    last = len(counts) - 1
    if train.steps < SHARE**last:
        begin = f"{trials} trials begin with runs of 1/{SHARE**last} of the steps"
        raise UserError(f"train.steps={train.steps}: {begin}, so give at least {SHARE**last}, or fewer trials")
    new = tuple(range(train.seed + 1, train.seed + 1 + seeds))
    return [
        Round(trials=count, steps=train.steps // SHARE ** (last - r), seeds=new if r == last else (train.seed,))
        for r, count in enumerate(counts)
    ]


def sweep(
    *,
    over: tuple[str, ...] = (),
    trials: Count = 20,
    seeds: Count = 3,
    run_dir: str | None = None,
    experiment: Experiment,
    say: Say = lambda text: None,
    workers: Workers = Workers(),  # noqa: B008, it is frozen
) -> SweepResult:
    """Search for the best learning rate, or other values.

    Many short runs, fewer long ones, and a few full ones with several seeds. EXPERIMENT is as for `jaxgpt train`.

    Args:
        over: FIELD=LOW..HIGH, or FIELD=A,B,C, once for each field that varies
        trials: points to try in the first round
        seeds: full runs of each finalist
        run_dir: its directory, resumed if it exists, by default runs/sweeps/NAME
        experiment: its fields are options too
        workers: where the runs of a round are trained

    Raises:
        UserError: a point is not a valid experiment, the directory has runs of another sweep, or all runs diverged.
    """
    axes = parse_axes(over, experiment)
    points = draw_points(axes, trials)
    all_trials = alive = [Trial(trial=n, point=point) for n, point in enumerate(points, 1)]
    rounds = plan_rounds(experiment, len(points), seeds)
    planned: dict[tuple[int, int, int], Experiment] = {}  # by trial, steps and seed. All are made before the first run
    for trial in all_trials:
        try:
            full = replace_fields(experiment, trial.point)
            planned |= {(trial.trial, r.steps, x): shorten(full, r.steps, x) for r in rounds for x in r.seeds}
        except UserError as e:
            raise UserError(f"{trial}: {e}") from None
    directory = Path(run_dir) if run_dir else RUNS / "sweeps" / experiment.name
    if address_of(directory) is None and is_run(directory):
        raise UserError(f"{directory} is a run and not a sweep: name another directory with --run-dir")
    total = sum(r.trials * len(r.seeds) * r.steps for r in rounds)
    say(f"{total:,} steps, {total / experiment.train.steps:.1f} times the steps of one full run")
    with open_executor(workers, directory) as executor:
        for r, current in enumerate(rounds):
            grid = []
            for run_seed, trial in itertools.product(current.seeds, alive):
                name, place = f"steps-{current.steps}-seed-{run_seed}", directory / f"trial-{trial.trial:02}"
                label = f"round {r + 1} of {len(rounds)}, trial {trial.trial}, {name}"
                grid.append((label, planned[trial.trial, current.steps, run_seed], place / name))
            losses = [curve.last for curve in train_grid(grid, say, executor)]
            for i, trial in enumerate(alive):
                trial.losses.append(losses[i :: len(alive)])
            alive = sorted((trial for trial in alive if trial.mean < math.inf), key=lambda trial: trial.mean)
            if not alive:
                raise UserError(
                    f"all trials of {current.steps:,} steps diverged: vary over smaller values. See {directory}"
                )
            alive = alive[: rounds[min(r + 1, len(rounds) - 1)].trials]
    ranked = sorted(all_trials, key=lambda trial: (-len(trial.losses), trial.mean))
    found = SweepResult(directory=directory, rounds=rounds, trials=ranked)
    definition = {"experiment": to_dict(experiment), "over": over, "trials": trials, "seeds": seeds}
    content = {"definition": definition, "result": found.to_json()}
    write_result(directory, SWEEP, render_json(content, indent=1, ensure_ascii=False) + "\n")
    return found


def shorten(experiment: Experiment, steps: int, seed: int) -> Experiment:
    """Return an experiment of fewer steps, with a complete schedule: warm-up steps that are given shrink alike."""
    warmup = experiment.optim.warmup_steps
    if warmup is not None:
        warmup = -(-warmup * steps // experiment.train.steps)
    point = {"optim.warmup_steps": warmup, "train.steps": steps, "train.seed": seed, "train.sample_tokens": 0}
    return replace_fields(experiment, point)
