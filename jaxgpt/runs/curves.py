"""`loss.png`: training and validation loss over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.files import open_whole


def plot_losses(lines: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the lines of a `metrics.jsonl` (see `metrics.read_metrics`) as a PNG. Nothing to draw, no file."""
    from matplotlib.figure import (
        Figure,
    )  # 2 s to import, so only when something is drawn; never pyplot, which is global

    train = [(x["step"], x["loss"]) for x in lines if x.get("loss") is not None]
    val = [(x["step"], x["val_loss"]) for x in lines if x.get("val_loss") is not None]
    if not train and not val:
        return
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="optimiser step", ylabel="loss (nats per token)")
    if train:
        axes.plot(*zip(*train, strict=True), color="#9ecae1", linewidth=1, label="training, one batch")
    if val:
        best_step, best = min(val, key=lambda point: point[1])
        axes.plot(
            *zip(*val, strict=True),
            color="#08519c",
            linewidth=2,
            marker="o",
            markersize=3,
            label="validation",
        )
        axes.annotate(
            f"{best:.3f}",
            (best_step, best),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            color="#08519c",
        )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with open_whole(path) as f:
        figure.savefig(f, format="png", dpi=130)
