"""Intervals, tests and sample sizes against scipy's."""

import numpy as np
import pytest
from scipy import stats

from jaxgpt.statistics import count_pairs_needed, holm_levels, mean_interval, paired_p_values


@pytest.mark.parametrize("n", [2, 30])
def test_interval_and_p_value_are_those_of_the_paired_t_test(n):
    ours, theirs = np.random.default_rng(n).normal(size=(2, 3, n))
    expected = stats.ttest_rel(ours, theirs, axis=1)
    low, high = expected.confidence_interval(0.95)
    mean, margin = mean_interval(ours - theirs)
    assert mean - margin == pytest.approx(low) and mean + margin == pytest.approx(high)
    assert paired_p_values(ours - theirs) == pytest.approx(expected.pvalue)
    # Equal differences are certain unless they are zero.
    assert paired_p_values([[0.5, 0.5], [0.0, 0.0]]).tolist() == [0.0, 1.0]


def holm_by_definition(p_values, level):
    """Reject the hypotheses in the order of their p-values until the first that is not rejected."""
    rejected = [False] * len(p_values)
    for i in sorted(range(len(p_values)), key=lambda i: p_values[i]):
        if p_values[i] > level / (len(p_values) - sum(rejected)):
            break
        rejected[i] = True
    return rejected


def test_holm_rejects_in_steps():
    """Holm's levels of four; those after the first that is not rejected share its level."""
    assert holm_levels([0.011, 0.02, 0.005, 0.04], 0.04) == pytest.approx([0.04 / 3, 0.02, 0.01, 0.04])
    assert holm_levels([0.011, 0.03, 0.005, 0.04], 0.04) == pytest.approx([0.04 / 3, 0.02, 0.01, 0.02])
    p_values = np.random.default_rng(0).uniform(0, 0.06, (1000, 4))
    expected = [holm_by_definition(p, 0.05) for p in p_values]
    assert (p_values <= holm_levels(p_values, 0.05)).tolist() == expected
    assert {sum(x) for x in expected} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("level", "ratio"), [(0.05, 0.3), (0.05, 1.0), (0.005, 5.0)])
def test_pairs_needed_are_those_of_the_noncentral_t_distribution(level, ratio):
    n = np.arange(2, 1000)
    power = stats.nct.sf(stats.t.ppf(1 - level / 2, n - 1), n - 1, np.sqrt(n) / ratio)
    assert count_pairs_needed(0.1 * ratio, 0.1, level=level) == pytest.approx(n[np.argmax(power >= 0.8)], abs=1)
