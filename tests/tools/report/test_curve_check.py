"""What a curve says: on curves that say it clearly, and on those that only just do not."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxgpt.errors import UserError
from jaxgpt.tools.report.curve_check import check_curve
from jaxgpt.tools.report.reference_band import ReferenceBand, fit_band

STEPS = list(range(100, 1100, 100))


def curve(losses):
    return list(zip(STEPS, losses, strict=True))


def falling(to=1.5):
    return [to + 2 * math.exp(-step / 200) for step in STEPS]


BAND = ReferenceBand(
    steps=STEPS, mean=falling(), low=[x - 0.05 for x in falling()], high=[x + 0.05 for x in falling()], seeds=5
)
TRAINING = [(step, 1.4 + 2 * math.exp(-step / 200)) for step in range(10, 1010, 10)]


@pytest.mark.parametrize(
    "losses, place, since, words",
    [
        (falling(), "inside", None, "learning; inside this experiment's band of 5 seeds"),
        (falling(1.52), "inside", None, "inside"),
        (falling(1.6), "above", 100, "above this experiment's band of 5 seeds since step 100"),
        (falling(1.4), "below", 100, "below this experiment's band of 5 seeds (better) since step 100"),
        (falling()[:6] + [x + 0.1 for x in falling()[6:]], "above", 700, "since step 700"),
        # Out and in again: it is where it ends.
        ([x + 0.2 for x in falling()[:6]] + falling()[6:], "inside", None, "inside"),
    ],
)
def test_beside_the_band(losses, place, since, words):
    found = check_curve(curve(losses), TRAINING, BAND)
    assert (found.band, found.since, found.learning) == (place, since, "yes") and words in found.words


def test_one_validation_is_enough_beside_a_band():
    assert check_curve([(1000, falling()[-1])], TRAINING, BAND).words == "inside this experiment's band of 5 seeds"
    assert check_curve([(1000, 2.0)], TRAINING).words == "too few validations to judge"


def test_without_a_band_nothing_is_said_of_it():
    found = check_curve(curve(falling()), TRAINING)
    assert found.words == "learning" and found.band is None
    beyond = check_curve([(5000, 1.0), (6000, 0.9)], [], BAND)
    assert beyond.band is None and "outside the steps" in beyond.words


def rising(since, by):
    """The validation loss turns at a step, and has risen by a share of its best at the end."""
    best = falling()[STEPS.index(since)]
    after = np.linspace(best, best * (1 + by), len(STEPS) - STEPS.index(since))
    return falling()[: STEPS.index(since)] + after.tolist()


def test_over_fitting_is_told_from_diverging_by_the_training_loss():
    validation = curve(rising(500, 0.05))
    found = check_curve(validation, TRAINING)
    assert (found.learning, found.learning_since, found.words) == ("over-fitting", 500, "over-fitting since step 500")
    risen = [(step, loss if step < 500 else loss + (step - 500) / 500) for step, loss in TRAINING]
    assert check_curve(validation, risen).words == "diverging since step 500"
    assert check_curve(curve(rising(500, 0.009)), risen).learning == "yes"  # within one per cent: noise


def test_a_curve_that_swings_is_given_its_swing():
    """A rise of 4% is nothing new to one that has come back from as much in its second half; once, long ago, says nothing."""
    up_and_down = [*falling()[:5], 1.65, 1.6, 1.664, 1.6, 1.66]
    assert check_curve(curve(up_and_down), TRAINING).learning == "yes"
    assert check_curve(curve([*up_and_down[:-1], 1.7]), TRAINING).learning == "over-fitting"
    spike = [2.0, 5.0, *rising(300, 0.05)[2:]]
    assert check_curve(curve(spike), TRAINING).learning == "over-fitting"
    assert (
        check_curve(curve([*up_and_down[:5], 1.6, 1.62, 1.64, 1.652, 1.664]), TRAINING).words
        == "over-fitting since step 600"
    )


def test_one_batch_that_was_easy_decides_nothing():
    noisy = [(step, loss + (2.0 if step == 1000 else 0.0)) for step, loss in TRAINING]
    assert check_curve(curve(rising(500, 0.05)), noisy).learning == "over-fitting"


def test_numbers_that_are_none():
    found = check_curve(curve([*falling()[:-1], math.inf]), TRAINING)
    assert found.words == "diverging since step 900"
    assert check_curve([(1, math.nan)], []).words == "diverging from the start"
    assert check_curve([(1, 2.0)], []).learning == "unknown"
    assert check_curve(curve([0.0] * 10), TRAINING).learning == "yes"  # a text of one letter


def test_a_band_is_a_prediction_interval():
    """Of so many further runs are inside as it says."""
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(1000):
        runs = rng.normal(2.0, 0.1, (6, 1))
        band = fit_band([[(100, float(loss))] for loss in runs[:5, 0]])
        inside.append(band.low[0] <= runs[5, 0] <= band.high[0])
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
    logs = np.log(runs[:5])
    margin = stats.t.ppf(0.975, 4) * np.std(logs, ddof=1) * math.sqrt(1.2)
    assert (band.low[0], band.high[0]) == pytest.approx(tuple(np.exp(np.mean(logs) + np.array([-margin, margin]))))
    assert band.mean[0] == pytest.approx(np.mean(runs[:5]))
    assert band.seeds == 5 and band.at(50) is None


def test_a_band_is_of_losses_that_can_be():
    """One seed of five learns late: the others are not expected below 0."""
    band = fit_band([[(500, loss)] for loss in (0.2, 0.25, 0.3, 0.25, 1.4)])
    assert 0 < band.low[0] < 0.2 and band.high[0] > 1.4


def test_what_is_no_band():
    with pytest.raises(UserError, match="at least two runs, got 1"):
        fit_band([curve(falling())])
    with pytest.raises(UserError, match="validations at the same steps"):
        fit_band([curve(falling()), curve(falling())[:-1]])
