"""The layers of experiments/zoo in jaxgpt's own programs: cached as the whole pass, and causal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.sample.programs import allocate_cache, read
from tests.helpers import import_pages, make_model

NAMES = ("alibi", "moe", "mla", "differential_attention", "gated_deltanet", "ngram_embeddings", "qwen3_next", "smear")
NAMES += ("unet_skips", "value_embeddings")
PAGES = dict(zip(NAMES, import_pages("zoo", *NAMES), strict=True))


def small(name):
    model = PAGES[name].experiment.model
    return dataclasses.replace(model, vocab_size=11, block_size=16, n_layer=2, n_head=2, n_embd=16, head_dim=8)


@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_is_the_whole_pass_and_a_token_reads_itself_and_all_before_it(name):
    model, params = make_model(small(name))
    assert model.config.has_cache
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 12), 0, 11)
    states = jax.jit(functools.partial(model.apply, {"params": params}, method="hidden_states"))
    whole_BTD = states(tokens_BT)
    cache, parts, step = allocate_cache(model, params, 2, 16, None), [], jax.jit(read, static_argnums=0)
    for start, end in ((0, 10), (10, 11), (11, 12)):
        positions_BT = jnp.broadcast_to(jnp.arange(start, end), (2, end - start))
        x_BTD, cache = step(model, params, cache, tokens_BT[:, start:end], positions_BT)
        parts.append(x_BTD)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole_BTD, rtol=1e-4, atol=1e-4)
    # By exchanging one token at a time: whose hidden states change?
    first_T = jnp.arange(6)
    changed_TT = jnp.where(jnp.eye(6, dtype=bool), first_T + 3, first_T)
    reach_TT = np.abs(states(changed_TT) - states(first_T[None])).max(axis=-1).T > 1e-6
    np.testing.assert_array_equal(reach_TT, np.tri(6, dtype=bool))
