"""Check a loss curve: compare it with its experiment's reference band, and detect over-fitting and divergence."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from jaxgpt.tools.report.reference_band import ReferenceBand

RISE = 0.01  # relative rise above the best validation loss that counts as worse


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveCheck:
    """The result of `check_curve`."""

    band: str | None  # "inside", "above" or "below"; None: there is no band
    since: int | None  # the step since which the curve has been out of the band
    learning: str  # "yes", "over-fitting", "diverging" or "unknown"
    learning_since: int | None  # the step of the best validation loss, if over-fitting or diverging
    words: str  # the verdict in words


def check_curve(
    validation: Sequence[tuple[int, float]], training: Sequence[tuple[int, float]], band: ReferenceBand | None = None
) -> CurveCheck:
    """Judge a run by its losses, each (step, nats per token), and by a band.

    Over-fitting: the validation loss is above its best by more than 1%, and by more than any rise from which the second
    half of the curve has recovered, while the training loss has kept falling. Diverging: the training loss has risen
    too, or a loss is not finite. The training losses, each of one batch, are smoothed over a tenth of them.
    """
    learning, worse_since = _learning(validation, training)
    position, since = _position(validation, band)
    words = f"{learning} from the start" if worse_since is None else f"{learning} since step {worse_since:,}"
    words = {"yes": "learning", "unknown": "too few validations to judge"}.get(learning, words)
    if band is not None:
        own = f"this experiment's band of {band.seeds} seeds"
        comparison = {
            "inside": f"inside {own}",
            "above": f"above {own} since step {since}",
            "below": f"below {own} (better) since step {since}",
            None: "outside the steps of this experiment's band",
        }[position]
        # A run with one validation, at its end, is judged only by the band.
        words = comparison if learning == "unknown" and position else f"{words}; {comparison}"
    return CurveCheck(band=position, since=since, learning=learning, learning_since=worse_since, words=words)


def _position(validation: Sequence[tuple[int, float]], band: ReferenceBand | None) -> tuple[str | None, int | None]:
    """Return where the curve ends relative to the band, and since which step it has been there."""
    positions: list[tuple[int, str]] = []
    for step, loss in validation:
        if band is not None and (edges := band.at(step)) is not None:
            low, high = edges
            positions.append((step, "below" if loss < low else "inside" if loss <= high else "above"))
    if not positions:
        return None, None
    last = positions[-1][1]
    stretch = list(itertools.takewhile(lambda point: point[1] == last, reversed(positions)))
    return last, None if last == "inside" else stretch[-1][0]


def _learning(validation: Sequence[tuple[int, float]], training: Sequence[tuple[int, float]]) -> tuple[str, int | None]:
    """Return `learning` and `learning_since` of a `CurveCheck`."""
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
    """Return the largest relative rise from which the curve's second half has recovered: another may be as large."""
    losses = [loss for step, loss in validation if 2 * step >= validation[-1][0]]
    rises = [0.0]
    for i, loss in enumerate(losses[:-1]):
        best = min(losses[: i + 1])
        if best > 0 and min(losses[i + 1 :]) <= best * (1 + RISE):
            rises.append(loss / best - 1)
    return max(rises)


def _smoothed(training: Sequence[tuple[int, float]], step: int) -> float:
    """Return the median of a tenth of the training losses, around a step."""
    half = max(len(training) // 20, 1)
    at = int(np.argmin([abs(s - step) for s, _ in training]))
    return float(np.median([loss for _, loss in training[max(at - half, 0) : at + half + 1]]))
