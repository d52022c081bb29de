"""Find the best values of an experiment's fields by successive halving.

Jamieson and Talwalkar 2016, arXiv:1502.07943: all points are trained for a short time, the best third for three times
as long, and so on. Each run has a complete schedule of its own: one that is cut in the middle of its schedule has not
decayed its learning rate and cannot be compared with one that has. The best learning rate of short runs tends to be
higher than the best of long ones, so a third survives, and not fewer.

The last round, at full length, has seeds that selected nothing before. The means of the finalists are thus free of
the winner's curse of the earlier rounds. The winner's mean, the best of three, is too low by at most 0.85 standard
errors, where the three are equal.

The points form a space-filling sequence. Optuna would propose the next point from the results of earlier ones,
but all points of a round are needed at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config.serialize import differences, from_dict, suggest, to_dict
from jaxgpt.config.validate import Count, NonNegativeInt, field_hints, short, short_repr
from jaxgpt.config.words import parse_value, plain_types, replace_fields
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import is_there, read_json, render_json, write_whole
from jaxgpt.runs.code import find_class_in
from jaxgpt.runs.directory import RUNS
from jaxgpt.runs.resume import CHANGEABLE
from jaxgpt.statistics import mean_interval
from jaxgpt.tools.grid import format_table, train_grid
from jaxgpt.training import fit

SWEEP = "sweep.json"  # the definition and, later, the result
LARGEST_SWEEP = 2**24  # bytes of it
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

    def __str__(self) -> str:
        values = ",".join(map(str, self.choices)) if self.choices else f"{self.low:g}..{self.high:g}"
        return f"{self.field}={values}"


def parse_axes(texts: Sequence[str], experiment: Experiment | None = None) -> list[Axis]:
    """Parse what --over was given, once for each field. Raises `UserError`. experiment: its classes have the fields."""
    axes: dict[str, Axis] = {}
    for axis in (parse_axis(text, experiment) for text in texts):
        if axis.field in axes:
            raise UserError(f"--over has {axis.field} twice: give each field once")
        axes[axis.field] = axis
    if not axes:
        raise UserError("a sweep needs a field: --over optim.learning-rate=1e-4..1e-1")
    return list(axes.values())


def parse_axis(text: str, experiment: Experiment | None = None) -> Axis:
    """Parse `FIELD=LOW..HIGH` or `FIELD=A,B,C`, a field with - or _. Raises `UserError`. experiment: see `parse_axes`."""
    name, _, values = text.partition("=")
    field = name.replace("-", "_")
    sections = {section: kind for section, kind in field_hints(Experiment).items() if dataclasses.is_dataclass(kind)}
    sections |= {section: type(getattr(experiment, section)) for section in sections if experiment is not None}
    hints = {f"{section}.{x}": hint for section, kind in sections.items() for x, hint in field_hints(kind).items()}
    try:
        if not name or not values:
            raise UserError("give FIELD=LOW..HIGH or FIELD=A,B,C, such as optim.learning-rate=1e-4..1e-1")
        if field not in hints:
            raise UserError(f"there is no field {short(field)}{suggest(field, hints)}. See jaxgpt train --help-all")
        kinds = set(plain_types(hints[field]))
        if field.split(".")[0] not in VARIABLE or field in FIXED or tuple in kinds:
            raise UserError(
                f"{field} cannot vary: it changes the data, the tokens or the steps of a run, does not decide its loss, "
                f"or is a list. Fields of {', '.join(VARIABLE)} can vary, except {' and '.join(FIXED)}"
            )
        is_range = ".." in values and not kinds.isdisjoint((int, float))
        words = values.split("..", 1) if is_range else values.split(",")
        found = tuple(parse_value(field, word.strip(), hints[field]) for word in words)
        if is_range and (None in found or not found[0] < found[1]):
            raise UserError("give LOW below HIGH")
        if not is_range and len(set(found)) < max(2, len(found)):
            raise UserError("give two or more different choices, or a range of numbers, LOW..HIGH")
    except UserError as e:
        raise UserError(f"--over {text}: {e}") from None
    return Axis(field=field, low=found[0], high=found[1]) if is_range else Axis(field=field, choices=found)


def draw_points(axes: Sequence[Axis], trials: int, seed: int) -> list[dict[str, Any]]:
    """Return the points of a sweep, {field: value}, without repetitions.

    One field is spread evenly. Several form a scrambled Halton sequence (Owen 2017, arXiv:1706.02808), which covers each
    field as evenly as its own sweep would.

    Args:
        trials: number of points. Fewer are returned where whole numbers or choices repeat.
        seed: seed of the sequence.
    """
    if len(axes) == 1:
        shares = (np.arange(trials)[:, None] + 0.5) / trials
    else:
        from scipy.stats import qmc  # a dependency of jax, which takes 2 s to import

        shares = qmc.Halton(len(axes), scramble=True, seed=np.random.default_rng(seed)).random(trials)
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
    point: dict[str, Any]  # {field: value}
    losses: list[list[float | None]] = dataclasses.field(default_factory=list)  # by round and seed, None if it diverged

    @property
    def mean(self) -> float:
        """Return the mean of its last round, infinity if a run of it diverged."""
        finite = [loss for loss in self.losses[-1] if loss is not None]
        return float(np.mean(finite)) if len(finite) == len(self.losses[-1]) else math.inf

    def __str__(self) -> str:
        return f"trial {self.trial}, {', '.join(f'{field}={value}' for field, value in self.point.items())}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Result of a sweep."""

    axes: Sequence[Axis]
    directory: Path
    rounds: list[Round]
    trials: list[Trial]  # the winner first
    # Loss by which the second is worse, paired by seed. An unadjusted two-sided test of the first against the second is
    # valid although both were chosen by these losses (Hung and Fithian 2019, arXiv:1610.03944). None if there is no second.
    gap: tuple[float, float | None] | None
    __repr__ = short_repr

    def to_json(self) -> dict[str, Any]:
        """Return rounds, trials and gap."""
        rounds, trials = ([dataclasses.asdict(x) for x in found] for found in (self.rounds, self.trials))
        gap = self.gap and dict(zip(("mean", "margin"), self.gap, strict=True))
        return {"rounds": rounds, "trials": trials, "gap": gap}

    def __str__(self) -> str:
        steps = [f"{r.steps:,} steps" for r in self.rounds]
        steps[-1] += ", new seeds (95%)"
        rows = []
        for trial in self.trials:
            losses = [_format_losses(losses) for losses in trial.losses]
            losses += [""] * (len(steps) - len(losses))
            rows.append([str(trial.trial), *map(str, trial.point.values()), *losses])
        winner = self.trials[0]
        lines = [
            format_table(["trial", *(axis.field for axis in self.axes), *steps], rows),
            "",
            f"winner: {winner}: {_format_losses(winner.losses[-1])}",
        ]
        if self.gap:
            mean, margin = self.gap
            words = "one seed, no interval"
            if margin is not None:
                words = "no more than noise" if mean <= margin else "more than noise"
            by = f"{mean:.4f}" if margin is None else f"{mean:.4f} ± {margin:.4f} (95%)"
            lines.append(f"{self.trials[1]}, is worse by {by}: {words}")
        for axis in self.axes:
            tried, best = [trial.point[axis.field] for trial in self.trials], winner.point[axis.field]
            if not axis.choices and best in (min(tried), max(tried)):
                end = "lowest" if best == min(tried) else "highest"
                lines.append(f"{axis.field}={best} is the {end} value tried: better ones may lie outside")
        return "\n".join([*lines, f"all losses: {self.directory / SWEEP}"])


def _format_losses(losses: list[float | None]) -> str:
    """Return the mean of a round and its interval, or that it diverged."""
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        return "diverged" if len(losses) == 1 else f"{len(losses) - len(finite)} of {len(losses)} diverged"
    mean, margin = mean_and_margin(finite)
    return f"{mean:.4f}" if margin is None else f"{mean:.4f} ± {margin:.4f}"


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
    seed: NonNegativeInt = 0,
    run_dir: str | None = None,
    experiment: Experiment,
    say: Callable[[str], None] = lambda text: None,
    fit_one: Callable[..., Any] = fit,
) -> SweepResult:
    """Search for the best learning rate, or other values.

    Many short runs, fewer long ones, and a few full ones with several seeds. EXPERIMENT is as for `jaxgpt train`.

    Args:
        over: FIELD=LOW..HIGH, or FIELD=A,B,C, once for each field that varies
        trials: points to try in the first round
        seeds: full runs of each finalist
        seed: seed of the points
        run_dir: directory of the sweep, resumed if it exists, by default runs/sweeps/NAME
        experiment: its fields are options too
        say: receives a line of text for each run.
        fit_one: trains a run as `jaxgpt.fit` does.

    Raises:
        UserError: a point is not a valid experiment, the directory has another sweep, or all runs diverged.
    """
    axes = parse_axes(over, experiment)
    points = draw_points(axes, trials, seed)
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
    definition = {"experiment": to_dict(experiment), "over": ", ".join(map(str, axes)), "points": points}
    definition |= {"trials": trials, "seeds": seeds, "seed": seed}
    _check_or_write(definition, experiment, directory)
    cost = [f"{r.trials} x {f'{n} seeds x ' if (n := len(r.seeds)) > 1 else ''}{r.steps:,}" for r in rounds]
    runs = [r.trials * len(r.seeds) for r in rounds]
    total = sum(n * r.steps for n, r in zip(runs, rounds, strict=True))
    times = f"{total / experiment.train.steps:.1f} times those of one full run"
    say(f"{sum(runs)} runs of {' + '.join(cost)} = {total:,} steps, {times}")
    for r, current in enumerate(rounds):
        grid = []
        for run_seed, trial in itertools.product(current.seeds, alive):
            name, place = f"steps-{current.steps}-seed-{run_seed}", directory / f"trial-{trial.trial:02}"
            label = f"round {r + 1} of {len(rounds)}, trial {trial.trial}, {name}"
            grid.append((label, planned[trial.trial, current.steps, run_seed], place / name))
        losses = [curve.losses[-1] if curve.losses else None for curve in train_grid(grid, say, fit_one)]
        for i, trial in enumerate(alive):
            trial.losses.append(losses[i :: len(alive)])
        alive = sorted((trial for trial in alive if trial.mean < math.inf), key=lambda trial: trial.mean)
        if not alive:
            raise UserError(
                f"all trials of {current.steps:,} steps diverged: vary over smaller values. See {directory}"
            )
        alive = alive[: rounds[min(r + 1, len(rounds) - 1)].trials]
    ranked = sorted(all_trials, key=lambda trial: (-len(trial.losses), trial.mean))
    gap = mean_and_margin(np.subtract(alive[1].losses[-1], alive[0].losses[-1])) if len(alive) > 1 else None
    found = SweepResult(axes=axes, directory=directory, rounds=rounds, trials=ranked, gap=gap)
    content = {"definition": definition, "result": found.to_json()}
    write_whole(directory / SWEEP, render_json(content, indent=1, ensure_ascii=False) + "\n")
    return found


def shorten(experiment: Experiment, steps: int, seed: int) -> Experiment:
    """Return an experiment of fewer steps, with a complete schedule: warm-up steps that are given shrink alike."""
    warmup = experiment.optim.warmup_steps
    if warmup is not None:
        warmup = -(-warmup * steps // experiment.train.steps)
    point = {"optim.warmup_steps": warmup, "train.steps": steps, "train.seed": seed, "train.sample_tokens": 0}
    return replace_fields(experiment, point)


def _check_or_write(definition: dict[str, Any], experiment: Experiment, directory: Path) -> None:
    """Write the definition, unless there are runs already. Raises `UserError` if they are from something else."""
    path, names = directory / SWEEP, set()
    if is_there(directory, "Name another directory with --run-dir."):
        names = {p.name for p in directory.glob("*")} if directory.is_dir() else {""}
    if names <= {SWEEP}:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, render_json({"definition": definition}, indent=1, ensure_ascii=False) + "\n")
        return
    if SWEEP not in names:
        raise UserError(f"{directory} exists and is not a sweep (no {SWEEP}): name another with --run-dir")
    another = f"{directory} holds another sweep: "
    record = read_json(path, LARGEST_SWEEP)
    theirs = record.get("definition") if isinstance(record, dict) else None
    if not isinstance(theirs, dict):
        raise UserError(f"{path} is damaged: it has no definition. Name another directory with --run-dir")
    try:
        recorded = from_dict(Experiment, theirs.get("experiment"), find_class=find_class_in(experiment))
    except UserError as e:  # it is damaged, or has classes of its own that this experiment has not
        raise UserError(f"{another}{e}. Name another directory with --run-dir") from None
    changed = differences(recorded, experiment)
    # The text is compared where a run is resumed, but not where all are complete.
    changed = {x: values for x, values in changed.items() if x.startswith("data.") or not x.startswith(CHANGEABLE)}
    ours = {name: value for name, value in definition.items() if name != "experiment"}
    changed |= {name: (theirs.get(name), now) for name, now in ours.items() if theirs.get(name) != now}
    if changed:
        listed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items() if name != "points")
        raise UserError(f"{another}{listed or 'points'}. Name another directory with --run-dir")


def mean_and_margin(losses: ArrayLike) -> tuple[float, float | None]:
    """Return the mean of losses by seed and the half-width of its 95% interval, None with one seed."""
    by_seed = np.asarray(losses, np.float64)
    if len(by_seed) < 2:
        return float(by_seed[0]), None
    mean, margin = mean_interval(by_seed)
    return float(mean), float(margin)
