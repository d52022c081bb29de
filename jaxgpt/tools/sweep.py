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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import Experiment, differences, from_dict
from jaxgpt.config.serialize import to_source
from jaxgpt.errors import UserError, shell_line
from jaxgpt.files import is_there, open_whole, read_json, render_json, write_whole
from jaxgpt.fitting import fit
from jaxgpt.runs.training import CHANGEABLE
from jaxgpt.statistics import mean_interval
from jaxgpt.tools.grid import format_table, train_or_resume
from jaxgpt.tools.space import Axis, describe_point, draw_points, with_values

SWEEP, WINNER, PLOT = "sweep.json", "winner.py", "sweep.png"  # the first: the definition and, later, the result
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
        f"{r.trials} x " + (f"{len(r.seeds)} seeds x " if len(r.seeds) > 1 else "") + f"{r.steps:,}" for r in rounds
    ]
    runs = sum(r.trials * len(r.seeds) for r in rounds)
    total = sum(r.trials * len(r.seeds) * r.steps for r in rounds)
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
    planned: dict[tuple[int, int, int], Experiment] = {}  # by trial, steps and seed; all are made before the first run
    for n, point in enumerate(points, 1):
        try:
            full = with_values(sweep.experiment, point)
            planned |= {(n, r.steps, seed): shorten(full, r.steps, seed) for r in rounds for seed in r.seeds}
        except UserError as e:
            raise UserError(f"trial {n} of the sweep, {describe_point(point)}: {e}") from None
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
                place = directory / f"trial-{trial.trial:02}" / name
                losses = train_or_resume(planned[trial.trial, current.steps, seed], place, fit_one).losses
                trial.losses[-1].append(losses[-1] if losses else None)
                result = f"{losses[-1]:.4f}" if losses else "diverged"
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
        changed = {x: values for x, values in changed.items() if x.startswith("data.") or not x.startswith(CHANGEABLE)}
        changed |= {x: (theirs[x], ours[x]) for x in ours if x != "experiment" and theirs[x] != ours[x]}
    except (TypeError, KeyError):
        raise UserError(f"{path} is damaged: name another directory with --run-dir") from None
    if changed:
        listed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items() if name != "points")
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


def write_report(sweep: Sweep, found: Mapping[str, Any], directory: Path) -> None:
    """Write `sweep.json`, `sweep.png` and `winner.py` into the directory of the sweep. found: of `run_sweep`."""
    content = {"definition": sweep.to_json(), "result": found}
    write_whole(directory / SWEEP, render_json(content, indent=1, ensure_ascii=False) + "\n")
    plot_sweep(sweep.axes, found, directory / PLOT)
    winner = found["trials"][0]
    note = f"The winner of a sweep over {', '.join(map(str, sweep.axes))}: validation loss {_format_loss(winner['losses'][-1])}."
    name = f"{sweep.experiment.name[:40]}-winner"  # a run of its own, not that of the experiment
    best = dataclasses.replace(with_values(sweep.experiment, winner["point"]), name=name)
    write_whole(directory / WINNER, f'"""{note}"""\n\n{to_source(best)}')


def format_sweep(sweep: Sweep, found: Mapping[str, Any], directory: Path) -> str:
    """Return the result of `run_sweep` as a table in Markdown, and what it means. directory: of the sweep."""
    steps = [f"{r['steps']:,} steps" for r in found["rounds"]]
    steps[-1] += ", new seeds (95%)"
    rows = []
    for trial in found["trials"]:
        losses = [_format_loss(losses) for losses in trial["losses"]]
        rows.append(
            [str(trial["trial"]), *map(str, trial["point"].values()), *losses, *[""] * (len(steps) - len(losses))]
        )
    winner, behind = found["trials"][0], found["gap"]
    lines = [
        format_table(["trial", *(axis.field for axis in sweep.axes), *steps], rows),
        "",
        f"winner: trial {winner['trial']}, {describe_point(winner['point'])}: {_format_loss(winner['losses'][-1])}",
    ]
    if behind:
        second = found["trials"][1]
        line = f"trial {second['trial']}, {describe_point(second['point'])}, is worse by {behind['mean']:.4f}"
        if behind["margin"] is None:
            lines.append(f"{line}: one seed, no interval")
        else:
            words = "no more than noise" if behind["mean"] <= behind["margin"] else "more than noise"
            lines.append(f"{line} ± {behind['margin']:.4f} (95%): {words}")
    for axis in sweep.axes:
        tried, best = [trial["point"][axis.field] for trial in found["trials"]], winner["point"][axis.field]
        if not axis.choices and best in (min(tried), max(tried)):
            end = "lowest" if best == min(tried) else "highest"
            lines.append(f"{axis.field}={best} is the {end} value tried: better ones may lie outside")
    lines.append(f"{directory / PLOT}; next: {shell_line('jaxgpt', 'train', directory / WINNER)}")
    return "\n".join(lines)


def _format_loss(losses: list[float | None]) -> str:
    """Return the mean of a round and its interval, or that it diverged."""
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        return "diverged" if len(losses) == 1 else f"{len(losses) - len(finite)} of {len(losses)} diverged"
    mean, margin = mean_and_margin(finite)
    return f"{mean:.4f}" + ("" if margin is None else f" ± {margin:.4f}")


COLOURS = ("#c6dbef", "#6baed6", "#2171b5", "#08306b")  # of the rounds, from the shortest; the last one is the finals'


def plot_sweep(axes: Sequence[Axis], found: Mapping[str, Any], path: Path) -> None:
    """Plot a panel per field, with a colour per round and error bars at full length, to a PNG file.

    Runs that diverged are left out, and losses far above the others lie outside.

    found: of `run_sweep`.
    """
    from matplotlib.figure import Figure  # 2 s to import; pyplot would set global state

    figure = Figure(figsize=(max(5.5, 4.2 * len(axes)), 4.2), layout="constrained")
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    rounds = found["rounds"]
    means: list[list[tuple[dict[str, Any], float, float]]] = []  # (point, mean, margin) of each trial, by round
    for r in range(len(rounds)):
        reached = [trial for trial in found["trials"] if len(trial["losses"]) > r and None not in trial["losses"][r]]
        values = [mean_and_margin(trial["losses"][r]) for trial in reached]
        means.append([(x["point"], mean, margin or 0.0) for x, (mean, margin) in zip(reached, values, strict=True)])
    shown = sorted(mean for by_trial in means for _, mean, _ in by_trial)
    low, median = shown[0], shown[len(shown) // 2]
    high = min(shown[-1], low + 4 * (median - low)) if median > low else shown[-1]
    pad = 0.05 * (high - low) or 0.01
    style = "o-" if len(axes) == 1 and not axes[0].choices else "o"
    for axis, panel in zip(axes, panels, strict=True):
        position = axis.choices.index if axis.choices else float
        for r, by_trial in enumerate(means):
            points = sorted((position(point[axis.field]), mean, margin) for point, mean, margin in by_trial)
            x, y, margins = zip(*points, strict=True)
            is_last = r == len(rounds) - 1
            colour = COLOURS[max(len(COLOURS) - len(rounds) + r, 0)]
            label = f"{rounds[r]['steps']:,} steps" + (f", {len(rounds[r]['seeds'])} new seeds" if is_last else "")
            panel.errorbar(x, y, yerr=margins if is_last else None, fmt=style, color=colour, capsize=3, label=label)
        panel.set(xlabel=axis.field, ylim=(low - pad, high + pad))
        if axis.choices:
            panel.set_xticks(range(len(axis.choices)), [str(choice) for choice in axis.choices])
            panel.set_xlim(-0.5, len(axis.choices) - 0.5)
        elif axis.is_log:
            panel.set_xscale("log")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation loss (nats per token)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    with open_whole(path) as f:
        figure.savefig(f, format="png", dpi=130)
