"""What a curve says, in words: whether it is where this experiment's curves are, and whether it still learns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.errors import UserError

RISE = 0.01  # share of the best validation loss by which the last one has to be above it, to be called worse
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Band:
    """Where the validation loss of an experiment lies, step by step, from runs with several seeds.

    low and high: between them a further run's loss is expected with 95% probability at each step, by Student's t of the
    losses' logarithms: a loss is not below 0, and where one seed is late, it is far above the others.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int

    def __post_init__(self) -> None:
        sizes = {len(x) for x in (self.steps, self.mean, self.low, self.high)}
        if len(sizes) != 1 or not self.steps or any(a >= b for a, b in zip(self.steps, self.steps[1:], strict=False)):
            raise UserError("a band needs steps in order, and a mean, a low and a high for each")

    def at(self, step: int) -> tuple[float, float] | None:
        """(low, high) at a step, between two that were measured by a line; None beyond them."""
        if not self.steps[0] <= step <= self.steps[-1]:
            return None
        return float(np.interp(step, self.steps, self.low)), float(np.interp(step, self.steps, self.high))


def band_of(curves: Sequence[Sequence[tuple[int, float]]]) -> Band:
    """The band of runs, each (step, validation loss); all were measured at the same steps."""
    steps = [step for step, _ in curves[0]]
    if any([step for step, _ in curve] != steps for curve in curves):
        raise UserError("the runs of a band need validations at the same steps")
    if len(curves) < 2:
        raise UserError(f"a band needs at least two runs, got {len(curves)}")
    from scipy.stats import t  # 2 s to import

    losses_NS = np.array([[loss for _, loss in curve] for curve in curves])
    n = len(curves)
    logs_NS = np.log(losses_NS)
    margin_S = t.ppf((1 + CONFIDENCE) / 2, n - 1) * logs_NS.std(axis=0, ddof=1) * math.sqrt(1 + 1 / n)
    centre_S = logs_NS.mean(axis=0)
    return Band(
        steps=steps,
        mean=losses_NS.mean(axis=0).tolist(),
        low=np.exp(centre_S - margin_S).tolist(),
        high=np.exp(centre_S + margin_S).tolist(),
        seeds=n,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """band: "inside", "above", "below" or None, for no band; since: the step from which on it is out of it."""

    band: str | None
    since: int | None
    learning: str  # "yes", "over-fitting", "diverging" or "unknown"
    learning_since: int | None  # the step of the best validation loss, if it is one of the two
    words: str


def judge(
    validation: Sequence[tuple[int, float]], training: Sequence[tuple[int, float]], band: Band | None = None
) -> Verdict:
    """What the two losses of a run say, each (step, nats per token).

    Over-fitting: validation is above its best by more than 1%, and by more than it has lately risen and come back, while
    training has gone on falling. Diverging: training has risen as well, or a loss is no number. Training is smoothed over
    a tenth of the lines, for it is that of one batch.
    """
    learning, worse_since = _learning(validation, training)
    place, since = _place(validation, band)
    words = {
        "yes": "it learns",
        "unknown": "there is too little of it to say whether it learns",
        "over-fitting": f"over-fitting since step {worse_since:,}" if worse_since is not None else "",
        "diverging": f"diverging since step {worse_since:,}" if worse_since is not None else "diverging from the start",
    }[learning]
    if band is not None:
        own = f"this experiment's band of {band.seeds} seeds"
        beside = {
            "inside": f"inside {own}",
            "above": f"above {own} since step {since}",
            "below": f"below {own}, which is better, since step {since}",
            None: "nowhere near the steps of this experiment's band",
        }[place]
        # A run that is validated once, at its end, is judged by the band alone.
        words = beside if learning == "unknown" and place else f"{words}; {beside}"
    return Verdict(band=place, since=since, learning=learning, learning_since=worse_since, words=words)


def _place(validation: Sequence[tuple[int, float]], band: Band | None) -> tuple[str | None, int | None]:
    """Where the curve ends, and since when it has been there."""
    if band is None:
        return None, None
    places: list[tuple[int, str]] = []
    for step, loss in validation:
        if (edges := band.at(step)) is not None:
            low, high = edges
            places.append((step, "below" if loss < low else "inside" if loss <= high else "above"))
    if not places:
        return None, None
    last = places[-1][1]
    since = places[-1][0]
    for step, place in reversed(places):
        if place != last:
            break
        since = step
    return last, None if last == "inside" else since


def _learning(validation: Sequence[tuple[int, float]], training: Sequence[tuple[int, float]]) -> tuple[str, int | None]:
    if any(not math.isfinite(loss) for _, loss in (*validation, *training)):
        finite = [(step, loss) for step, loss in validation if math.isfinite(loss)]
        return "diverging", min(finite, key=lambda point: point[1])[0] if finite else None
    if len(validation) < 2:
        return "unknown", None
    best_step, best = min(validation, key=lambda point: point[1])
    last_step, last = validation[-1]
    if last - best <= max(RISE, _swing(validation)) * best or not training:
        return "yes", None
    then, now = (_smoothed(training, step) for step in (best_step, last_step))
    return ("over-fitting" if now <= then else "diverging"), best_step


def _swing(validation: Sequence[tuple[int, float]]) -> float:
    """The largest rise, as a share, that the curve's second half has come back from: one as large may be the next."""
    losses = [loss for step, loss in validation if 2 * step >= validation[-1][0]]
    rises = [0.0]
    for i, loss in enumerate(losses[:-1]):
        best = min(losses[: i + 1])
        if best > 0 and min(losses[i + 1 :]) <= best * (1 + RISE):
            rises.append(loss / best - 1)
    return max(rises)


def _smoothed(training: Sequence[tuple[int, float]], step: int) -> float:
    """The median of a tenth of the lines around a step."""
    half = max(len(training) // 20, 1)
    at = int(np.argmin([abs(s - step) for s, _ in training]))
    return float(np.median([loss for _, loss in training[max(at - half, 0) : at + half + 1]]))


def as_band(values: Any) -> Band:
    """Of a file's JSON. Raises `UserError`."""
    fields = {field.name for field in dataclasses.fields(Band)}
    if not isinstance(values, dict) or not fields <= set(values):
        raise UserError(f"a band needs {', '.join(sorted(fields))}")
    return Band(**{name: values[name] for name in fields})
