"""Scores of heads: heads whose attention is set by hand, and what is refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.interventions import induction_scores, previous_token_scores, repeat_random_tokens, run
from tests.interventions.test_edits import CONFIGS, TOKENS, make


def test_scores_are_means_of_patterns():
    """On two rows, against loops over the patterns that `run` reads."""
    model, params = make(CONFIGS["gqa"])
    tokens_BT = repeat_random_tokens(23, period=5, length=13, rows=2)
    assert (tokens_BT[:, 5:] == tokens_BT[:, :-5]).all() and (tokens_BT[0] != tokens_BT[1]).any()
    names = ["h_0/pattern", "h_1/pattern"]
    patterns_LBTNS = np.stack([x for x in run(model, params, tokens_BT, read=names).activations.values()])
    induction = np.mean([patterns_LBTNS[:, :, t, :, t - 4] for t in range(5, 13)], axis=(0, 2))
    previous = np.mean([patterns_LBTNS[:, :, t, :, t - 1] for t in range(1, 13)], axis=(0, 2))
    chex.assert_trees_all_close(induction_scores(model, params, tokens_BT, period=5), induction, atol=1e-6)
    chex.assert_trees_all_close(previous_token_scores(model, params, tokens_BT), previous, atol=1e-6)
    assert induction.shape == (2, 4) and np.abs(induction - previous).max() > 0.01


def attend_back(distance):
    """Return a model of one layer: head 0 attends to all tokens alike, head 1 to the one `distance` before."""
    model, params = make(GPTConfig(vocab_size=23, block_size=16, n_layer=1, n_head=2, n_embd=32))
    params = jax.tree.map(jnp.zeros_like, params)
    params["wpe"]["embedding"] = jnp.eye(16, 32)
    params["h_0"]["ln_1"]["scale"] = jnp.ones(32)
    params["h_0"]["attn"]["q"]["kernel"] = 10 * jnp.eye(32, k=16 - distance)
    params["h_0"]["attn"]["k"]["kernel"] = 10 * jnp.eye(32, k=16)
    return model, params


def test_a_head_that_attends_back_has_score_1():
    tokens_BT = repeat_random_tokens(23, period=5, length=13, rows=2)
    found = previous_token_scores(*attend_back(1), tokens_BT)
    chex.assert_trees_all_close(found, np.array([[np.mean(1 / np.arange(2, 14)), 1]]), atol=1e-5)
    found = induction_scores(*attend_back(4), tokens_BT, period=5)
    chex.assert_trees_all_close(found, np.array([[np.mean(1 / np.arange(6, 14)), 1]]), atol=1e-5)


def test_tokens_that_do_not_repeat_are_one_clear_line():
    model, params = make(CONFIGS["gpt2"])
    with pytest.raises(UserError, match="period=5: the tokens do not repeat after 5"):
        induction_scores(model, params, TOKENS, period=5)
    with pytest.raises(UserError, match="period=11: needs 2 to 10, so that the segment begins again"):
        induction_scores(model, params, TOKENS, period=11)
    with pytest.raises(UserError, match="tokens of 1 per row: needs at least 2"):
        previous_token_scores(model, params, TOKENS[:, :1])
