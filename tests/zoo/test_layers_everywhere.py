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


def find_reach(model, params, tokens: int) -> np.ndarray:
    """Return whether the hidden state of each token depends on each token, by exchanging one token at a time."""
    config = model.config
    first_T = jnp.arange(tokens) % config.vocab_size
    changed_TT = jnp.where(jnp.eye(tokens, dtype=bool), (first_T + 3)[None] % config.vocab_size, first_T[None])
    states = jax.jit(functools.partial(model.apply, method="hidden_states"))
    same, others = states({"params": params}, first_T[None]), states({"params": params}, changed_TT)
    return (np.abs(others - same).max(axis=-1) > 1e-6).T


@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_is_the_whole_pass_and_a_token_reads_itself_and_all_before_it(name):
    model, params = make_model(small(name))
    assert model.config.has_cache
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 12), 0, 11)
    whole_BTD = jax.jit(functools.partial(model.apply, method="hidden_states"))({"params": params}, tokens_BT)
    cache, parts, step = allocate_cache(model, params, 2, 16, None), [], jax.jit(read, static_argnums=0)
    for start, end in ((0, 10), (10, 11), (11, 12)):
        positions_BT = jnp.broadcast_to(jnp.arange(start, end), (2, end - start))
        x_BTD, cache = step(model, params, cache, tokens_BT[:, start:end], positions_BT)
        parts.append(x_BTD)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole_BTD, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(find_reach(model, params, 6), np.tri(6, dtype=bool))
