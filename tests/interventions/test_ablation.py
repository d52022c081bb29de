"""Ablation of each head and MLP: equal to edits one by one; intervals; what is refused."""

import chex
import numpy as np
import pytest
from scipy import stats

from jaxgpt.errors import UserError
from jaxgpt.interventions import ablate_all, replace, run, token_losses, zero
from jaxgpt.interventions.forward import _run_each
from tests.interventions.test_edits import CONFIGS, make

TOKENS = np.random.default_rng(1).integers(0, 23, (3, 9))
MASK = np.arange(8) >= np.array([[0], [3], [5]])


def row_losses(model, params, edits):
    return np.asarray(token_losses(run(model, params, TOKENS, edits).logits_BTV, TOKENS).mean(axis=1, where=MASK))


@pytest.mark.parametrize("by", ["zero", "mean"])
def test_each_part_is_as_if_ablated_by_hand(by):
    """The rise is the mean of paired differences of rows, with scipy's own interval."""
    model, params = make(CONFIGS["gqa"])
    found = ablate_all(model, params, TOKENS, by=by, mask_BT=MASK)
    plain = row_losses(model, params, [])
    read = run(model, params, TOKENS, read=["h_0/heads", "h_1/mlp"]).activations
    means = {name: np.asarray(x)[:, :-1][MASK].mean(axis=0) for name, x in read.items()}
    head = zero("heads", 0, index=2) if by == "zero" else replace("heads", 0, by=means["h_0/heads"][2], index=2)
    mlp = zero("mlp", 1) if by == "zero" else replace("mlp", 1, by=means["h_1/mlp"])
    chex.assert_trees_all_close(found.loss, plain.mean(), rtol=1e-5)
    assert found.heads.mean.shape == found.heads.margin.shape == (2, 4) and found.mlps.mean.shape == (2,)
    for edit, rise, margin in (
        (head, found.heads.mean[0, 2], found.heads.margin[0, 2]),
        (mlp, found.mlps.mean[1], found.mlps.margin[1]),
    ):
        differences = row_losses(model, params, [edit]) - plain
        expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        chex.assert_trees_all_close([rise - margin, rise + margin], list(expected), atol=1e-4)
        assert abs(rise) > 1e-3


def test_a_part_that_adds_the_same_to_every_token_is_lost_by_zero_alone():
    """Mean ablation of an MLP with a constant output changes nothing."""
    model, params = make(CONFIGS["gpt2"])
    params["h_1"]["mlp"]["c_proj"]["kernel"] *= 0
    by_mean, by_zero = (ablate_all(model, params, TOKENS, by=by).mlps.mean for by in ("mean", "zero"))
    assert abs(by_mean[1]) < 1e-5 < 1e-3 < abs(by_zero[1])


@pytest.mark.parametrize(
    "how, words",
    [
        ({"by": "median"}, "by='median': needs zero or mean"),
        ({"mask_BT": MASK[:, 1:]}, r"mask of shape \[3, 7\]: needs \[3, 8\], with a target in each row"),
        ({"mask_BT": MASK & (MASK.sum(1, keepdims=True) > 3)}, "with a target in each row"),
    ],
)
def test_a_wrong_argument_is_one_clear_line(how, words):
    with pytest.raises(UserError, match=words):
        ablate_all(*make(CONFIGS["gpt2"]), TOKENS, **how)


def test_one_row_has_no_interval():
    with pytest.raises(UserError, match="1 row: needs at least 2 for an interval"):
        ablate_all(*make(CONFIGS["gpt2"]), TOKENS[:1])


def test_other_texts_use_the_compiled_program():
    model, params = make(CONFIGS["gpt2"])
    ablate_all(model, params, TOKENS, by="zero")
    compiled = _run_each._cache_size()
    ablate_all(model, params, TOKENS[:, ::-1], by="zero")
    assert _run_each._cache_size() == compiled
