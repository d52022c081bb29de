"""Plot what the analyses return: values of each head, layer or position as a heatmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_heatmap(
    values_RC: ArrayLike,
    *,
    title: str,
    unit: str,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Figure:
    """Return a figure of a matrix: white is 0, blue is positive, red is negative.

    Args:
        values_RC: for example [L, N], one value per head.
        title: above the matrix.
        unit: of the values, beside the scale.
        rows: names of the rows. None means layer 0, layer 1 ...
        columns: names of the columns. None means 0, 1 ...
    """
    from matplotlib.figure import Figure  # 2 s to import; pyplot would set global state

    values_RC = np.asarray(values_RC, np.float32)
    R, C = values_RC.shape
    figure = Figure(figsize=(max(4.0, 0.35 * C + 2.5), max(2.0, 0.35 * R + 1.2)), layout="constrained")
    axes = figure.add_subplot(title=title)
    most = float(np.nanmax(np.abs(values_RC))) or 1.0
    image = axes.imshow(values_RC, cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
    axes.set_yticks(range(R), [f"layer {i}" for i in range(R)] if rows is None else list(rows))
    axes.set_xticks(range(C), list(map(str, range(C))) if columns is None else list(columns))
    figure.colorbar(image, label=unit)
    return figure
