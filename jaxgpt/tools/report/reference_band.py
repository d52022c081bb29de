"""Reference bands: the range of an experiment's validation losses over seeds. Some bands are shipped in `bands/`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from jaxgpt.config import Experiment, differences, from_dict
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json, render_json
from jaxgpt.runs.directory import RunMetadata
from jaxgpt.runs.resume import CHANGEABLE, describe_data_changes
from jaxgpt.statistics import t_quantile

BANDS = resources.files("jaxgpt.tools.report").joinpath("bands")
# Prefixes of the fields that do not affect the loss curve, or that the fingerprint of the data covers.
FREE = (*CHANGEABLE, "train.seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceBand:
    """A prediction interval for the validation loss of one more run, step by step.

    At each step the loss of one more run is between `low` and `high` with 95% probability, by Student's t on the
    logarithms of the losses: losses are positive, and a seed that learns late is far above the others.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int

    def at(self, step: int) -> tuple[float, float] | None:
        """Return (low, high) at a step, interpolated between measured steps; None outside their range."""
        if not self.steps[0] <= step <= self.steps[-1]:
            return None
        return float(np.interp(step, self.steps, self.low)), float(np.interp(step, self.steps, self.high))


def fit_band(curves: Sequence[Sequence[tuple[int, float]]]) -> ReferenceBand:
    """Return the band of runs, each [(step, validation loss), ...].

    Raises `UserError` for fewer than two runs, and for runs with validations at different steps.
    """
    steps = [step for step, _ in curves[0]]
    if any([step for step, _ in curve] != steps for curve in curves):
        raise UserError("the runs of a band need validations at the same steps")
    if len(curves) < 2:
        raise UserError(f"a band needs at least two runs, got {len(curves)}")
    losses_NS = np.array([[loss for _, loss in curve] for curve in curves])
    n, logs_NS = len(curves), np.log(losses_NS)
    margin_S = t_quantile(n - 1) * logs_NS.std(axis=0, ddof=1) * math.sqrt(1 + 1 / n)
    center_S = logs_NS.mean(axis=0)
    return ReferenceBand(
        steps=steps,
        mean=losses_NS.mean(axis=0).tolist(),
        low=np.exp(center_S - margin_S).tolist(),
        high=np.exp(center_S + margin_S).tolist(),
        seeds=n,
    )


def find_band(metadata: RunMetadata) -> tuple[ReferenceBand | None, str]:
    """Return the shipped band of this experiment on this data; or None, and the reason."""
    file = BANDS.joinpath(f"{metadata.experiment.name}.json")
    if not file.is_file():
        return None, f"No reference band is shipped for {metadata.experiment.name}."
    values = parse_json(file.read_bytes(), str(file))
    differing = differing_fields(metadata.experiment, from_dict(Experiment, values["experiment"], ""))
    if differing:
        return None, f"The shipped reference band has another configuration: {', '.join(differing[:6])}."
    if describe_data_changes(metadata.data, values["data"]):
        return None, "The shipped reference band is for another text."
    return ReferenceBand(**values["band"]), ""


def render_band(metadata: RunMetadata, band: ReferenceBand, made: dict[str, Any]) -> str:
    """Return the text of `bands/NAME.json`. `made` records how and when the band was made."""
    parts = {"experiment": dataclasses.asdict(metadata.experiment), "data": metadata.data, "made": made}
    return render_json(parts | {"band": dataclasses.asdict(band)}, indent=1) + "\n"


def differing_fields(ours: Experiment, theirs: Experiment) -> list[str]:
    """Return the names of the fields that differ and that affect the loss curve."""
    return [name for name in differences(ours, theirs) if not name.startswith(FREE)]
