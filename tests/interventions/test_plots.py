import numpy as np

from jaxgpt.interventions import plot_heatmap


def test_a_heatmap_names_its_rows_and_columns(tmp_path):
    values = np.array([[0.5, -1.0, 0.0], [0.0, 2.0, np.nan]])
    figure = plot_heatmap(values, title="patching", unit="nats", columns=["a", "$b$", "_"])
    figure.savefig(tmp_path / "heads.png")
    axes, scale = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 1"]
    assert scale.get_ylabel() == "nats"
    assert axes.images[0].get_clim() == (-2.0, 2.0)
    assert (tmp_path / "heads.png").stat().st_size > 1000
