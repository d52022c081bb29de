"""Find the interval between two kept states in which the parameters moved most for their learning rate.

Whoever continues the run of other weights, or of more training, has one interval that no training can cross: the
largest move is where to look first (Jia et al. 2021, Proof-of-Learning, arXiv:2103.05633).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.optim import learning_rate
from jaxgpt.runs.training import Training


def find_largest_move(training: Training, kept: Sequence[int]) -> int:
    """Return the kept step, or 0 for the seed, at the start of that interval.

    Of n states about 2 sqrt(n) are read: every sqrt(n)th, then those of the interval among them that moved most.

    Args:
        training: the run.
        kept: steps with a stored state, in order, without 0.
    """
    rates = learning_rate(training.experiment.optim, training.experiment.train.steps)(jnp.arange(kept[-1]))
    summed = np.concatenate([[0.0], np.cumsum(np.broadcast_to(rates, kept[-1]), dtype=np.float64)])

    @functools.cache
    def params(step: int) -> list[np.ndarray]:
        like = training.trainer.abstract_state.params
        tree = training.checkpoints.restore_params(step, like) if step else training.restore_or_init(0).params
        return [np.asarray(x) for x in jax.tree.leaves(tree)]

    def largest(states: list[int]) -> tuple[int, int]:
        def move(pair: tuple[int, int]) -> float:
            start, stop = pair
            return norm_of_difference(params(start), params(stop)) / max(summed[stop] - summed[start], 1e-30)

        return max(itertools.pairwise(states), key=move)

    states = [0, *kept]
    start, stop = largest(sorted({*states[:: math.isqrt(len(states))], states[-1]}))
    return largest([step for step in states if start <= step <= stop])[0]


def norm_of_difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Return the norm of the difference of lists of arrays; those of `b` beyond the end of `a` are left out."""
    pairs = zip(a, b, strict=False)
    return math.sqrt(sum(float(np.sum(np.square(x.astype(np.float64) - y.astype(np.float64)))) for x, y in pairs))
