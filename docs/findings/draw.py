"""Draw the plots of the findings: `python docs/findings/draw.py` writes them beside this file.

The figures come from experiments/LOG.md and the docstrings in experiments/, which name command and processor.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#1f5fa8", "#c8590a", "#8a8a8a"
HERE = Path(__file__).parent


def draw(name: str, panels: int, fill: Callable[..., None]) -> None:
    """Write NAME.svg, whose panels `fill` draws: narrow, so that a phone shows its text at 9 px or more."""
    figure, axes = plt.subplots(panels, 1, figsize=(5.6, 0.2 + 2.8 * panels), layout="constrained", squeeze=False)
    fill(*axes[:, 0])
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def gelu(ax: Axes) -> None:
    """Plot the validation loss of five activations, with the standard deviation of five seeds."""
    means = {"GELU": 1.8797, "ReLU": 1.7927, "squared ReLU": 1.7802, "SwiGLU": 1.7777, "GELU(5x) / 5": 1.7715}
    spreads = [0.0103, 0.0044, 0.0052, 0.0119, 0.0092]
    rows = range(len(means))
    for row, mean, spread, colour in zip(rows, means.values(), spreads, (ORANGE, GREY, GREY, GREY, BLUE), strict=True):
        ax.errorbar(mean, row, xerr=spread, fmt="o", color=colour, capsize=4)
    ax.set(yticks=rows, yticklabels=means, xlabel="validation loss (nats per token)", ylim=(4.6, -0.6))


def learning_rates(ax: Axes) -> None:
    """Plot the best learning rate of each width, with 95% intervals."""
    widths = [64, 128, 256, 512]
    series = {
        "standard": (
            ORANGE,
            [2.7e-3, 2.2e-3, 1.2e-3, 6.7e-4],
            [2.1e-3, 1.8e-3, 1.1e-3, 6.2e-4],
            [3.7e-3, 2.8e-3, 1.4e-3, 7e-4],
        ),
        "muP, base width 256": (
            BLUE,
            [9.7e-4, 1.1e-3, 1.2e-3, 1.2e-3],
            [9.3e-4, 1e-3, 1.1e-3, 1.1e-3],
            [1.1e-3, 1.3e-3, 1.4e-3, 1.4e-3],
        ),
    }
    for name, (colour, best, low, high) in series.items():
        below, above = ([abs(b - x) for b, x in zip(best, ends, strict=True)] for ends in (low, high))
        ax.errorbar(widths, best, yerr=(below, above), color=colour, marker="o", capsize=4, label=name)
    ax.set(xscale="log", yscale="log", xlabel="width", ylabel="best learning rate", xticks=widths, xticklabels=widths)
    ax.set(yticks=[5e-4, 1e-3, 2e-3, 4e-3], yticklabels=["0.0005", "0.001", "0.002", "0.004"])
    ax.minorticks_off()
    ax.legend()


def heap(*axes: Axes) -> None:
    """Plot the median time of a step with five settings of the heap, for two shapes."""
    names = ["glibc's defaults", "one heap", "one, holes retired", "a heap per thread", "and no async dispatch"]
    for ax, title, times in zip(
        axes,
        ("speedrun (width 80)", "nanoGPT's CPU configuration"),
        ([17.0, 23.2, 18.4, 16.5, 15.2], [41.5, 38.4, 34.4, 30.5, 27.8]),
        strict=True,
    ):
        bars = ax.barh(names, times, color=[GREY, ORANGE, GREY, GREY, BLUE])
        ax.bar_label(bars, fmt="%.1f", padding=2)
        ax.set(title=title, xlim=(0, 1.2 * max(times)))
        ax.invert_yaxis()
    axes[1].set_xlabel("ms per step")


def induction(*axes: Axes) -> None:
    """Plot the rise of the loss without each group of heads, with 95% intervals over five seeds."""
    groups = ["induction", "previous token", "neither"]
    for ax, title, repeated, new in (
        (
            axes[0],
            "attention only",
            [(3.960, 0.030), (4.243, 0.194), (2.611, 0.657)],
            [(0.007, 0.016), (0.246, 0.134), (0.123, 0.075)],
        ),
        (
            axes[1],
            "with MLPs",
            [(3.974, 0.049), (4.118, 0.221), (1.765, 1.289)],
            [(-0.051, 0.025), (0.280, 0.270), (0.924, 0.804)],
        ),
    ):
        for shift, colour, label, pairs in (
            (-0.2, ORANGE, "repeated tokens", repeated),
            (0.2, BLUE, "new tokens", new),
        ):
            rises, margins = zip(*pairs, strict=True)
            ax.bar([n + shift for n in range(3)], rises, 0.38, yerr=margins, color=colour, capsize=4, label=label)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set(title=title, xticks=range(3), xticklabels=groups, ylim=(-0.3, 5.6))
        ax.set_ylabel("rise of the loss (nats)")
    axes[1].legend(loc="upper center", ncols=2)


def compiler(ax: Axes) -> None:
    """Plot by how much compiled programs were wrong, relative to their largest value."""
    names = ["sums of a product", "Jacobian lens", "32,769 mapped products"]
    ax.plot([1e14, 1e31], [0, 0], color=ORANGE, marker="o", linewidth=2)
    ax.plot([0.32, 0.008], [1, 2], "o", color=ORANGE)
    ax.axvline(2e-5, color=BLUE, linestyle="--")
    ax.text(6e-5, -0.45, "what the test accepts", color=BLUE, va="center")
    ax.set(xscale="log", xlim=(1e-7, 1e34), yticks=range(3), yticklabels=names, ylim=(2.6, -0.8))
    ax.set_xlabel("deviation from float64 / largest value")


def nights(*axes: Axes) -> None:
    """Plot the nights that keep an edit without effect, and the power by gain, of four rules."""
    rules = {"lower than the last": GREY, "the same, means of six": "black", "noise floor, means of six": ORANGE}
    rules["night.py"] = BLUE
    bars = axes[0].barh([*rules], [94.75, 95.34, 48.27, 1.00], color=[*rules.values()])
    axes[0].bar_label(bars, fmt="%.0f", padding=2)
    axes[0].set(xlabel="nights that keep an edit without effect (%)", xlim=(0, 110))
    axes[0].invert_yaxis()
    gains = [0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04]
    kept = [
        [14.7, 19.2, 25.1, 32.3, 48.7, 65.7, 90.4, 98.3],
        [21.9, 39.2, 60.4, 78.7, 96.5, 99.8, 100.0, 100.0],
        [6.1, 12.6, 22.6, 35.8, 61.2, 79.9, 95.9, 99.5],
        [0.4, 3.8, 16.5, 38.6, 77.5, 94.3, 99.6, 100.0],
    ]
    for colour, shares in zip(rules.values(), kept, strict=True):
        axes[1].plot(gains, shares, color=colour, marker="o")
    axes[1].set(xlabel="gain of an edit (nats per token)", ylabel="kept (%)", ylim=(0, 104))


if __name__ == "__main__":
    mpl.rcParams.update({"font.size": 12, "axes.titlesize": 12, "svg.hashsalt": "jaxgpt"})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    for name, panels, fill in (
        ("gelu", 1, gelu),
        ("mup", 1, learning_rates),
        ("allocator", 2, heap),
        ("induction", 2, induction),
        ("compiler", 1, compiler),
        ("autoresearch", 2, nights),
    ):
        draw(name, panels, fill)
