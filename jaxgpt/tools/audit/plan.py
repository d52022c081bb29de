"""Choose which steps of a run to take again, so that a forger cannot know them."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """The steps to take again, from each of several kept states."""

    stops: dict[int, int]  # {kept step to start from, 0 for the seed: the last step to take from there}
    drawn: list[int]  # logged steps drawn at random; all of them are taken again
    reachable: int  # number of logged steps from which they were drawn
    is_whole: bool  # every step is taken again

    @property
    def retaken(self) -> int:
        """Return the number of steps to take again."""
        return sum(stop - start for start, stop in self.stops.items())


def make_plan(
    logged: Sequence[int],
    kept: Sequence[int],
    *,
    budget: int,
    unusual: int | None,
    rng: np.random.Generator,
) -> AuditPlan:
    """Choose the steps to take again.

    Always those from the seed to the first logged step after step 1, in which the learning rate has no effect yet. Then,
    as far as the budget allows: the interval that ends in the last state, the unusual one, and logged steps drawn at
    random, one from each of equal parts of the log, which a long false stretch cannot all evade.

    Args:
        logged: steps with a line in the log, in order.
        kept: steps with a stored state, in order, without 0, the seed. The last is the run's last step.
        budget: most steps to take. With as many as the run has, every one is taken.
        unusual: kept step, or 0, at the start of an interval that is more likely to be false. None: none known.
        rng: draws the steps.
    """
    states = [0, *kept]
    ends = dict(itertools.pairwise(states))
    first = min([kept[0], *(step for step in logged if step > 1)])
    if max(budget, first) >= states[-1]:
        return AuditPlan(stops=ends, drawn=list(logged), reachable=len(logged), is_whole=True)
    stops = {0: first}
    left = budget - first

    def take(stop: int) -> bool:
        """Add the steps up to `stop` from the state before it, if they are within the budget."""
        nonlocal left
        start = states[bisect.bisect_left(states, stop) - 1]
        cost = max(0, stop - stops.get(start, start))
        if cost > left:
            return False
        stops[start] = max(stop, stops.get(start, start))
        left -= cost
        return True

    for start in (states[-2], unusual):
        if start is not None:
            take(ends[start])
    leads = {step: step - states[bisect.bisect_left(states, step) - 1] for step in logged}
    reachable = [step for step, lead in leads.items() if lead <= left]
    drawn = []
    if reachable:
        count = max(1, round(left / float(np.mean([leads[step] for step in reachable]))))
        parts = np.array_split(reachable, min(count, len(reachable)))
        for step in rng.permutation([int(rng.choice(part)) for part in parts]).tolist():
            if not take(step):
                break
            drawn.append(step)
    return AuditPlan(stops=dict(sorted(stops.items())), drawn=sorted(drawn), reachable=len(reachable), is_whole=False)


def largest_false_share(draws: int) -> float:
    """Return the share of false lines that this many random draws would show with 95% probability: 1 - 0.05^(1/n).

    If a share f is false, all draws are right with probability (1 - f)^n, or less with one draw from each equal part.
    """
    return 1.0 if not draws else 1.0 - (1.0 - CONFIDENCE) ** (1.0 / draws)


def cost_of_validation(tokens: int, tokens_per_step: int) -> int:
    """Return the number of training steps that take as long as a validation: a forward pass is a third of a step."""
    return math.ceil(tokens / 3 / tokens_per_step)
