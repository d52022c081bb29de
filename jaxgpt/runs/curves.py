"""Draw `loss.png`: training and validation loss over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.files import open_whole


def plot_losses(lines: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the losses in lines of `metrics.jsonl` as a PNG. Nothing to draw, no file."""
    train, val = _points(lines, "loss"), _points(lines, "val_loss")
    if not train and not val:
        return
    from matplotlib.figure import Figure  # 2 s to import; never pyplot, which is global

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="optimiser step", ylabel="loss (nats per token)")
    if train:
        axes.plot(*zip(*train, strict=True), color="#9ecae1", linewidth=1, label="training, one batch")
    if val:
        best_step, best = min(val, key=lambda point: point[1])
        dark = "#08519c"
        axes.plot(*zip(*val, strict=True), color=dark, linewidth=2, marker="o", markersize=3, label="validation")
        text = {"xytext": (0, -14), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{best:.3f}", (best_step, best), color=dark, **text)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with open_whole(path) as f:
        figure.savefig(f, format="png", dpi=130)


def _points(lines: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(x["step"], x[name]) for x in lines if x.get(name) is not None and math.isfinite(x[name])]
