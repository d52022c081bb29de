"""Intervals, tests and sample sizes for means, by Student's t: the one place for rows, documents and seeds."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config.validate import short_repr

CONFIDENCE = 0.95


class MeanInterval(NamedTuple):
    """A mean, and the half-width of its confidence interval."""

    mean: np.ndarray  # the mean
    margin: np.ndarray  # half of the interval's width
    __repr__ = short_repr


def mean_interval(samples: ArrayLike, confidence: float = CONFIDENCE) -> MeanInterval:
    """Return the mean over the last axis, and the half-width of its interval. The axis has at least two samples."""
    x = np.asarray(samples, np.float64)
    n = x.shape[-1]
    return MeanInterval(x.mean(-1), t_quantile(n - 1, confidence) * x.std(-1, ddof=1) / np.sqrt(n))


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the half-width, in standard errors, of a two-sided interval with that many degrees of freedom."""
    from scipy.special import stdtrit  # scipy is a dependency of jax, and scipy.stats would take 2 s to import

    return float(stdtrit(degrees, (1 + confidence) / 2))


def paired_p_values(differences: ArrayLike) -> np.ndarray:
    """Return the two-sided p-values of paired t-tests. The last axis has the differences, at least two."""
    from scipy.special import stdtr

    x = np.asarray(differences, np.float64)
    n = x.shape[-1]
    mean, error = np.abs(x.mean(-1)), x.std(-1, ddof=1) / np.sqrt(n)
    with np.errstate(divide="ignore", invalid="ignore"):  # equal differences divide by 0
        return np.where(mean == 0, 1.0, 2 * stdtr(n - 1, -mean / error))


def holm_levels(p_values: ArrayLike, level: float = 1 - CONFIDENCE) -> np.ndarray:
    """Return the level at which Holm's procedure tests each hypothesis. It rejects those with p <= their level.

    Among m hypotheses, the one with the i-th smallest p-value is tested at level / (m - i + 1). All after the first that
    is not rejected share its level, and are not rejected either. The probability that any true hypothesis is rejected
    is at most `level`, whatever the dependence between the p-values (S. Holm, A simple sequentially rejective multiple
    test procedure, Scandinavian Journal of Statistics 6, 1979, 65-70).

    Args:
        p_values: the last axis is a family of hypotheses.
        level: family-wise error rate.
    """
    p = np.asarray(p_values, np.float64)
    order = p.argsort(-1)
    steps = level / np.arange(p.shape[-1], 0, -1)
    rejected = np.take_along_axis(p, order, -1) <= steps
    last = np.where(rejected, level, steps).min(-1, keepdims=True, initial=level)
    levels = np.empty_like(p)
    np.put_along_axis(levels, order, np.minimum(steps, last), -1)
    return levels


def count_pairs_needed(deviation: float, difference: float, *, level: float) -> int:
    """Return how many pairs a paired t-test needs to find a true difference in 80% of cases.

    This is the normal approximation with Guenther's correction for Student's t (The American Statistician 35, 1981,
    243-244). It differs from the noncentral t distribution by one pair at most, at levels from 0.005 on.

    Args:
        deviation: standard deviation of the differences between pairs.
        level: two-sided significance level.
    """
    from scipy.special import ndtri

    z = ndtri(1 - level / 2)
    return max(2, math.ceil(((z + ndtri(0.8)) * deviation / difference) ** 2 + z**2 / 2))
