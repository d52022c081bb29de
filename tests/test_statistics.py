"""Intervals against scipy's, and against how often they hold the truth."""

import numpy as np
import pytest
from scipy import stats

from jaxgpt.statistics import mean_interval


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_the_interval_is_that_of_the_paired_t_test(n):
    ours, theirs = np.random.default_rng(n).normal(size=(2, n))
    mean, margin = mean_interval(ours - theirs)
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (mean - margin, mean + margin) == pytest.approx((expected.low, expected.high))


def test_the_interval_holds_the_truth_as_often_as_it_says():
    x = np.random.default_rng(0).normal(0.3, 2.0, (4000, 5))
    mean, margin = mean_interval(x)
    assert np.mean(np.abs(mean - 0.3) <= margin) == pytest.approx(0.95, abs=0.01)
