"""Plot the losses of a sweep against each swept field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.files import open_whole
from jaxgpt.tools.sweep.space import Axis
from jaxgpt.tools.sweep.sweep import mean_and_margin

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
    means = [_means(found, r) for r in range(len(rounds))]
    shown = sorted(mean for by_trial in means for _, mean, _ in by_trial)
    low, median = shown[0], shown[len(shown) // 2]
    high = min(shown[-1], low + 4 * (median - low)) if median > low else shown[-1]
    pad = 0.05 * (high - low) or 0.01
    style = "o-" if len(axes) == 1 and not axes[0].choices else "o"
    for axis, panel in zip(axes, panels, strict=True):
        for r, by_trial in enumerate(means):
            points = sorted(
                (_position(axis, trial["point"][axis.field]), mean, margin) for trial, mean, margin in by_trial
            )
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


def _means(found: Mapping[str, Any], r: int) -> list[tuple[Mapping[str, Any], float, float]]:
    """Return (trial, mean, margin) of the trials of a round that did not diverge."""
    reached = [trial for trial in found["trials"] if len(trial["losses"]) > r and None not in trial["losses"][r]]
    values = [mean_and_margin(trial["losses"][r]) for trial in reached]
    return [(trial, mean, margin or 0.0) for trial, (mean, margin) in zip(reached, values, strict=True)]


def _position(axis: Axis, value: Any) -> float:
    return axis.choices.index(value) if axis.choices else value
