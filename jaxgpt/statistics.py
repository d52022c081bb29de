"""Intervals of means, by Student's t: the one place for rows, documents and seeds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95


class MeanInterval(NamedTuple):
    """A mean, and the half-width of its confidence interval."""

    mean: np.ndarray
    margin: np.ndarray


def mean_interval(samples: ArrayLike, confidence: float = CONFIDENCE) -> MeanInterval:
    """Return the mean over the last axis, and the half-width of its interval. The axis has at least two samples."""
    x = np.asarray(samples, np.float64)
    n = x.shape[-1]
    return MeanInterval(x.mean(-1), t_quantile(n - 1, confidence) * x.std(-1, ddof=1) / np.sqrt(n))


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the half-width, in standard errors, of a two-sided interval with that many degrees of freedom."""
    from scipy.stats import t  # a dependency of jax; takes 2 s to import

    return float(t.ppf((1 + confidence) / 2, degrees))
