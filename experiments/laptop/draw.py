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
COLOURS = ("#c8590a", "#8a4fa8", "#1f5fa8", "#2f7d4f")


def new(height: float) -> tuple[Figure, Axes]:
    """Return a figure, narrow enough for a phone, and its axes."""
    figure = Figure(figsize=(5.6, height), layout="constrained")
    return figure, figure.subplots()


def optimizers() -> Figure | None:
    """Plot the steps to AdamW's loss by optimiser and width, beside track 3's, all relative to AdamW's steps."""
    ours, nearer = {name: name for name in run.OVER}, {name: name.split(",")[0] for name in run.NEARER_TRACK_3}
    blocks = [(88, ours, "0.4M parameters", "o"), (88, nearer, "0.4M, set as in track 3", "s")]
    blocks += [(176, ours, "1.5M", "^"), (352, ours, "6.0M", "v")]
    blocks = [block for block in blocks if len(run.losses_at(block[0], [*run.OVER, *block[1]])[0]) > 1]
    if not blocks:
        return None
    figure, ax = new(5.2)
    first = next(run.bootstrap(blocks[0][0]))
    names = [*sorted(first, key=first.__getitem__), "muon without momentum"]
    for place, (width, shown, label, mark) in enumerate(blocks):
        shown = {name: row for name, row in shown.items() if shown is ours or name in run.NEARER}
        middle, *others = run.bootstrap(width, [*run.OVER, *set(shown).difference(run.OVER)])
        low, high = np.percentile([[draw[name] for name in shown] for draw in others], [2.5, 97.5], axis=0)
        x = np.array([middle[name] for name in shown])
        rows = [names.index(row) + 0.2 * (place - (len(blocks) - 1) / 2) for row in shown.values()]
        errors = np.abs([x - low, high - x]) / run.STEPS[1]
        ax.errorbar(x / run.STEPS[1], rows, xerr=errors, fmt=mark, ms=4, capsize=2, color=COLOURS[place], label=label)
    rows = [names.index(row) for row in nearer.values()]
    theirs = [steps / run.TRACK_3["adamw"] for steps in run.NEARER_TRACK_3.values()]
    ax.plot(theirs, rows, "D", ms=6, mfc="none", color="#222222", label="124M (track 3)")
    ax.set(xscale="log", yticks=range(len(names)), yticklabels=names, xlabel="steps to AdamW's loss / AdamW's steps")
    ax.set(ylim=(len(names) - 0.5, -0.5))
    ax.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    ax.tick_params(axis="x", which="minor", labelsize=7)
    ax.grid(axis="x", alpha=0.3)
    ax.legend(fontsize=8)
    return figure


def lengths() -> Figure | None:
    """Plot the losses of the six that track 3 has over the steps of complete runs, less Muon's."""
    found = run.read("optimizers").get(str(run.WIDTHS[0]), {})
    steps = (50, *run.STEPS, run.LONGER)
    runs = {name: [found.get(name, {}).get(str(n), {}).values() for n in steps] for name in run.NEARER_TRACK_3}
    if any(len(by_seed) < run.LONGER_SEEDS for by_length in runs.values() for by_seed in by_length):
        return None
    figure, ax = new(4.0)
    means = {name: np.array([np.mean([loss for loss, _ in by_seed]) for by_seed in runs[name]]) for name in runs}
    colours = ("#2f7d4f", "#222222", "#1f5fa8", "#8a4fa8", "#c8590a", "#8a8a8a")
    for (name, losses), colour in zip(means.items(), colours, strict=True):
        label = f"{name.split(',')[0]} ({run.NEARER_TRACK_3[name]:,} in track 3)"
        ax.plot(steps, losses - means["muon"], "o-", ms=4, color=colour, label=label)
    ax.set(
        xscale="log", xticks=steps, xticklabels=steps, xlabel="steps of complete runs", ylabel="loss - Muon's (nats)"
    )
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
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
    figure, ax = new(2.4)
    ax.barh(list(found), [counts[0] for counts in found.values()], color="#1f5fa8", height=0.5)
    for row, counts in enumerate(found.values()):
        label = f"least and most with {len(counts)} baselines" if row == 0 else None
        ax.plot([counts.min(), counts.max()], [row + 0.36] * 2, "|-", color="#222222", label=label)
        ax.text(counts[0], row, f" {counts[0]}", va="center")
    ax.set(xlabel=f"accepted of {run.NULL_EDITS} edits that change nothing")
    ax.invert_yaxis()
    ax.legend(fontsize=8, loc="lower right")
    return figure


def main() -> None:
    """Draw all that has results."""
    mpl.rcParams["svg.hashsalt"] = "laptop"  # so that equal data give equal files
    for name, figure in {"optimizers": optimizers(), "lengths": lengths(), "ideas": ideas(), "null": null()}.items():
        if figure is not None:
            figure.savefig(IMAGES / f"laptop-{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
