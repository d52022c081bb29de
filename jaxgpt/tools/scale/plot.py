"""Plot a scaling law: losses over compute and over tokens, the fit, the prediction and the run that tested it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config.serialize import from_dict
from jaxgpt.files import open_whole
from jaxgpt.tools.scale.law import Law

RED = "#c0392b"


def plot_scaling(found: dict[str, Any], path: Path, title: str) -> None:
    """Plot the result of `run_scale` to a PNG file."""
    import matplotlib
    from matplotlib.figure import Figure  # 2 s to import; pyplot would set global state
    from matplotlib.ticker import LogLocator

    law = from_dict(Law, found["law"])
    run = found["prediction"]["run"]
    sizes = sorted({x["parameters"] for x in found["points"]})
    colours = matplotlib.colormaps["viridis"](np.linspace(0.85, 0.1, len(sizes)))
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    figure.suptitle(title)
    compute, tokens = figure.subplots(1, 2, sharey=True)
    of_test = [] if run["parameters"] in sizes else [(run["parameters"], RED)]
    for parameters, colour in [*zip(sizes, colours, strict=True), *of_test]:
        points = [x for x in found["points"] if x["parameters"] == parameters]
        rows = points or [run]
        per_token = rows[0]["flops"] / rows[0]["tokens"]
        reach = np.geomspace(min(x["tokens"] for x in found["points"]) / 1.2, run["tokens"] * 1.3, 100)
        losses = [law.loss(parameters, x) for x in reach]
        label, style = f"width {rows[0]['width']}, {parameters:,} parameters", "-" if points else "--"
        for axes, field, scale in ((compute, "flops", per_token), (tokens, "tokens", 1.0)):
            axes.plot(reach * scale, losses, style, color=colour, linewidth=1, label=label)
            measured = [(x[field], x["loss"]) for x in points]
            axes.plot(*zip(*measured, strict=True) if measured else ([], []), "o", color=colour)
    frontier = [(x["flops"], x["loss"]) for x in found["frontier"]]
    compute.plot(*zip(*frontier, strict=True), color="black", linewidth=4, alpha=0.2, label="compute-optimal")
    _mark_test(compute, "flops", found)
    _mark_test(tokens, "tokens", found)
    compute.set(xlabel="training FLOPs", ylabel="validation loss (nats per token)")
    tokens.set(xlabel="training tokens")
    for axes in (compute, tokens):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    tokens.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    tokens.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M")
    compute.legend(frameon=False, fontsize="small")
    with open_whole(path) as f:
        figure.savefig(f, format="png", dpi=130)


def _mark_test(axes: Any, field: str, found: dict[str, Any]) -> None:
    """Mark the predicted loss with its interval, and the measured one with a star."""
    x, prediction, result = found["prediction"]["run"][field], found["prediction"], found["result"]
    loss = prediction["loss"]
    bars = [[loss - prediction["low"]], [prediction["high"] - loss]]
    predicted = f"predicted: {loss:.4f} ({prediction['low']:.4f} to {prediction['high']:.4f})"
    axes.errorbar([x], [loss], yerr=bars, fmt="_", color="black", capsize=5, markersize=12, label=predicted, zorder=3)
    if result is not None:
        measured = f"measured: {result['loss']:.4f} ({result['relative_error']:+.2%})"
        axes.plot([x], [result["loss"]], "*", color=RED, markersize=11, label=measured)
