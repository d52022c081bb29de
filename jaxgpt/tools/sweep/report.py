"""The result of a sweep: a table, a plot, JSON, and the winner as an experiment file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgpt.config.serialize import to_source
from jaxgpt.errors import shell_line
from jaxgpt.files import render_json, write_whole
from jaxgpt.tools.sweep.plot import plot_sweep
from jaxgpt.tools.sweep.space import describe_point, with_values
from jaxgpt.tools.sweep.sweep import SWEEP, Sweep, mean_and_margin

WINNER, PLOT = "winner.py", "sweep.png"


def write_report(sweep: Sweep, found: Mapping[str, Any], directory: Path) -> None:
    """Write `sweep.json`, `sweep.png` and `winner.py` into the directory of the sweep. found: of `run_sweep`."""
    content = {"definition": sweep.to_json(), "result": found}
    write_whole(directory / SWEEP, render_json(content, indent=1, ensure_ascii=False) + "\n")
    plot_sweep(sweep.axes, found, directory / PLOT)
    write_whole(directory / WINNER, render_winner(sweep, found))


def render_winner(sweep: Sweep, found: Mapping[str, Any]) -> str:
    """Return an experiment file of the winner."""
    winner = found["trials"][0]
    over = ", ".join(map(str, sweep.axes))
    note = f'"""The winner of a sweep over {over}: validation loss {_format_loss(winner["losses"][-1])}."""'
    name = f"{sweep.experiment.name[:40]}-winner"  # a run of its own, not that of the experiment
    best = dataclasses.replace(with_values(sweep.experiment, winner["point"]), name=name)
    return f"{note}\n\n{to_source(best)}"


def format_sweep(sweep: Sweep, found: Mapping[str, Any], directory: Path) -> str:
    """Return the result of `run_sweep` as a table in Markdown, and what it means. directory: of the sweep."""
    steps = [f"{r['steps']:,} steps" for r in found["rounds"]]
    steps[-1] += ", new seeds (95%)"
    fields = [axis.field for axis in sweep.axes]
    lines = ["| trial | " + " | ".join([*fields, *steps]) + " |", "|---" * (1 + len(fields) + len(steps)) + "|"]
    for trial in found["trials"]:
        losses = [_format_loss(losses) for losses in trial["losses"]]
        cells = [str(trial["trial"]), *map(str, trial["point"].values()), *losses, *[""] * (len(steps) - len(losses))]
        lines.append(f"| {' | '.join(cells)} |")
    winner = found["trials"][0]
    lines += [
        "",
        f"winner: trial {winner['trial']}, {describe_point(winner['point'])}: {_format_loss(winner['losses'][-1])}",
        *([_format_gap(found["trials"][1], found["gap"])] if found["gap"] else []),
        *_format_edges(sweep, found),
        f"{directory / PLOT}; next: {shell_line('jaxgpt', 'train', directory / WINNER)}",
    ]
    return "\n".join(lines)


def _format_loss(losses: list[float | None]) -> str:
    """Return the mean of a round and its interval, or that it diverged."""
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        return "diverged" if len(losses) == 1 else f"{len(losses) - len(finite)} of {len(losses)} diverged"
    mean, margin = mean_and_margin(finite)
    return f"{mean:.4f}" + ("" if margin is None else f" ± {margin:.4f}")


def _format_gap(second: Mapping[str, Any], gap: Mapping[str, Any]) -> str:
    worse = f"trial {second['trial']}, {describe_point(second['point'])}, is worse by {gap['mean']:.4f}"
    if gap["margin"] is None:
        return f"{worse}: one seed, no interval"
    is_noise = gap["mean"] <= gap["margin"]
    return f"{worse} ± {gap['margin']:.4f} (95%): {'no more than noise' if is_noise else 'more than noise'}"


def _format_edges(sweep: Sweep, found: Mapping[str, Any]) -> list[str]:
    """Return a line for each field whose best value is the lowest or the highest that was tried."""
    point, lines = found["trials"][0]["point"], []
    for axis in sweep.axes:
        tried = [trial["point"][axis.field] for trial in found["trials"]]
        if not axis.choices and point[axis.field] in (min(tried), max(tried)):
            end = "lowest" if point[axis.field] == min(tried) else "highest"
            lines.append(f"{axis.field}={point[axis.field]} is the {end} value tried: better ones may lie outside")
    return lines
