"""Draw the figures of docs/laptop-and-pod.md from ../results/laptop/: `python experiments/laptop/draw.py` writes them.

A figure whose block has no results yet is not written.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import run
from matplotlib.axes import Axes
from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
COLOURS = {88: "#c8590a", 176: "#1f5fa8", 352: "#2f7d4f", 768: "#222222"}


def new(height: float) -> tuple[Figure, Axes]:
    """Return a figure, narrow enough for a phone, and its axes."""
    figure = Figure(figsize=(5.6, height), layout="constrained")
    return figure, figure.subplots()


def optimizers() -> Figure | None:
    """Plot the steps to AdamW's loss by optimiser and width, beside track 3's, all relative to AdamW's steps."""
    draws = {width: list(run.bootstrap(width)) for width in run.WIDTHS if len(run.losses_at(width)[0]) > 1}
    if not draws:
        return None
    figure, ax = new(4.6)
    first = next(iter(draws.values()))[0]
    names = sorted(first, key=lambda name: first[name])
    for place, (width, (middle, *others)) in enumerate(draws.items()):
        low, high = np.percentile([[draw[name] for name in names] for draw in others], [2.5, 97.5], axis=0)
        x = np.array([middle[name] for name in names])
        rows = np.arange(len(names)) + 0.18 * (place - 1)
        label = {88: "0.4M parameters", 176: "1.5M", 352: "6.0M"}[width]
        errors = np.abs([x - low, high - x]) / run.STEPS[1]
        ax.errorbar(x / run.STEPS[1], rows, xerr=errors, fmt="o", ms=4, capsize=2, color=COLOURS[width], label=label)
    rows = [names.index(name) for name in run.TRACK_3]
    theirs = [steps / run.TRACK_3["adamw"] for steps in run.TRACK_3.values()]
    ax.plot(theirs, rows, "D", ms=6, mfc="none", color=COLOURS[768], label="124M (track 3)")
    ax.set(xscale="log", yticks=range(len(names)), yticklabels=names, xlabel="steps to AdamW's loss / AdamW's steps")
    ax.set(ylim=(len(names) - 0.5, -0.5))
    ax.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    ax.tick_params(axis="x", which="minor", labelsize=7)
    ax.grid(axis="x", alpha=0.3)
    ax.legend(fontsize=8)
    return figure


def ideas() -> Figure | None:
    """Plot each idea's difference from the baseline with its interval, in the colour of its published sign."""
    found = run.compare_ideas()
    if not found:
        return None
    figure, ax = new(4.2)
    rows = sorted(found, key=lambda row: row.difference)
    colours = {"+": "#2f7d4f", "-": "#c8590a", None: "#8a8a8a"}
    said = {"+": "better at scale", "-": "worse at scale", None: "the two projects differ"}
    for sign, colour in colours.items():
        mine = [(i, row) for i, row in enumerate(rows) if run.IDEAS[row.variant][1] == sign]
        x, places, margins = zip(*((row.difference, i, row.margin) for i, row in mine), strict=True)
        ax.errorbar(x, places, xerr=margins, fmt="o", ms=4, capsize=3, color=colour, label=said[sign])
    ax.axvline(0, color="#222222", lw=0.8)
    ax.set(yticks=range(len(rows)), yticklabels=[row.variant for row in rows], ylim=(len(rows) - 0.5, -0.5))
    ax.set(xlabel="loss - baseline's (nats per character)")
    ax.grid(axis="x", alpha=0.3)
    ax.legend(fontsize=8)
    return figure


def null() -> Figure | None:
    """Plot how many of the null edits each rule accepts."""
    found = run.count_false()
    if not found:
        return None
    figure, ax = new(2.2)
    ax.barh(list(found), list(found.values()), color="#1f5fa8")
    for row, count in enumerate(found.values()):
        ax.text(count, row, f" {count}", va="center")
    ax.set(xlabel=f"accepted of {run.NULL_EDITS} edits that change nothing")
    ax.invert_yaxis()
    return figure


def main() -> None:
    """Draw all that has results."""
    mpl.rcParams["svg.hashsalt"] = "laptop"  # so that equal data give equal files
    for name, figure in {"optimizers": optimizers(), "ideas": ideas(), "null": null()}.items():
        if figure is not None:
            figure.savefig(IMAGES / f"laptop-{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
