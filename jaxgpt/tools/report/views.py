"""The report page: a run's curves, samples, speed and configuration. Drawn by `report.js`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxgpt.tools.html_page import Arrays, page, rounded


def report_page(summary: dict[str, Any], lines: Sequence[dict[str, Any]], changed: Sequence[str]) -> str:
    """One self-contained HTML file. lines: of metrics.jsonl. changed: names of fields that are not at their default."""

    def points(name: str) -> list[list[Any]]:
        return [[line["step"], rounded(line[name], 6)] for line in lines if line.get(name) is not None]

    configuration = [
        [f"{part}.{name}", value, f"{part}.{name}" in changed]
        for part, values in summary["configuration"].items()
        if isinstance(values, dict)
        for name, value in values.items()
    ]
    data = {
        "title": f"Report of {summary['experiment']}",
        "summary": {name: value for name, value in summary.items() if name != "configuration"},
        "training": points("loss"),
        "validation": points("val_loss"),
        "rates": points("tokens_per_second"),
        "learning_rates": points("learning_rate"),
        "grad_norms": points("grad_norm"),
        "configuration": configuration,
    }
    return page("report/report", data["title"], data, Arrays())
