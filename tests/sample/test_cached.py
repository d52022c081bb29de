"""Cached logits are uncached logits, at every position of every kind of model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.sample.programs import allocate_cache, cache_columns, read
from jaxgpt.sample.quantize import apply_model, for_decoding
from tests.helpers import TINY, make_model, stack_layers

# float32 sums in another order, through two layers, of logits near 1.
CACHED = dict(rtol=1e-4, atol=1e-4)

# Pairs of positions, norms and kinds of heads; what the model of another row has too is left out.
GRID = [
    dict(position="learned", norm_position="pre", norm="layernorm"),
    dict(
        position="rope", norm_position="sandwich", sliding_window=3, global_every=2, attention_softcap=1.0, head_dim=6
    ),
    dict(
        position="rope", norm_position="output", sliding_window=4, qk_norm=True, qk_norm_over="heads", query_scale=3.0
    ),
    dict(position="sinusoidal", norm_position="post", norm="rmsnorm", n_kv_head=2, qk_norm=True),
    dict(position="none", n_kv_head=1),
    dict(position="rope", parallel_residual=True, rope_fraction=0.5, rope_scaling="linear", rope_factor=2.0),
]

ROWS = [[3], [1, 2, 3, 4, 5], [10, 9, 8, 7, 6, 5, 4], [0, 2, 2, 9, 1]]
AFTER = np.array([[5, 6, 7], [1, 1, 8], [3, 4, 5], [9, 9, 2]])  # what each row goes on with


@functools.partial(jax.jit, static_argnums=0)
def read_logits(model, params, cache, tokens_BT, positions_BT):
    x_BTD, cache = read(model, params, cache, tokens_BT, positions_BT)
    return cache, apply_model(model, params, x_BTD, method="unembed")


def cached_logits(model, params):
    """Of each row's tokens and what follows, [tokens, V]: prompts in one padded pass, the rest one by one."""
    T = max(map(len, ROWS))
    prompts = jnp.array([row + [0] * (T - len(row)) for row in ROWS])
    cache = allocate_cache(model, params, len(ROWS), cache_columns(model), None)
    cache, logits_BTV = read_logits(model, params, cache, prompts, jnp.broadcast_to(jnp.arange(T), prompts.shape))
    found = [list(logits_TV[: len(row)]) for logits_TV, row in zip(np.asarray(logits_BTV), ROWS, strict=True)]
    for t in range(3):
        positions = jnp.array([[len(row) + t] for row in ROWS])
        cache, logits_B1V = read_logits(model, params, cache, jnp.array(AFTER[:, t : t + 1]), positions)
        for row, logits_1V in zip(found, np.asarray(logits_B1V), strict=True):
            row.append(logits_1V[0])
    return [np.stack(row) for row in found]


def uncached_logits(model, params):
    T = model.config.block_size
    rows = [prompt + after.tolist() for prompt, after in zip(ROWS, AFTER, strict=True)]
    padded_BT = jnp.array([row + [0] * (T - len(row)) for row in rows])
    return [
        logits[: len(row)]
        for logits, row in zip(jax.jit(apply_model, static_argnums=0)(model, params, padded_BT), rows, strict=True)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id="-".join(map(str, kind.values())), marks=pytest.mark.slow if n > 2 else ())
        for n, kind in enumerate(GRID)
    ],
)
def test_cached_equals_uncached(kind):
    model, params = make_model(dataclasses.replace(TINY, **{"block_size": 10, "n_head": 4, "n_embd": 16} | kind))
    for got, wanted in zip(cached_logits(model, params), uncached_logits(model, params), strict=True):
        np.testing.assert_allclose(got, wanted, **CACHED)


def test_packed_float32_weights_change_nothing():
    heads = {"n_kv_head": 1, "qk_norm": True, "qk_norm_over": "heads"}
    config = dataclasses.replace(TINY, block_size=10, tie_embeddings=False, activation="swiglu", mlp_dim=12, **heads)
    model, params = make_model(config)
    expected = uncached_logits(model, params)
    params = stack_layers(params, config.n_layer)
    model = model.clone(config=dataclasses.replace(config, scan_layers=True))
    packed = for_decoding(model, params, "float32")
    assert "q" not in packed[1]["h_0"]["attn"]  # one product for q, k and v
    for got, wanted in zip(cached_logits(*packed), expected, strict=True):
        np.testing.assert_allclose(got, wanted, **CACHED)
    for got, wanted in zip(uncached_logits(*packed), expected, strict=True):
        np.testing.assert_allclose(got, wanted, **CACHED)
    assert for_decoding(*packed)[1] is packed[1]
    left = jax.tree.map(jnp.copy, params)
    donated = for_decoding(model, left, "float32", donate=True)[1]
    assert not left  # what it had is freed
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), donated, packed[1]))
    with pytest.raises(UserError, match="these are float32 already"):
        for_decoding(*packed, "int8")


def test_a_model_that_recomputes_its_blocks_is_cached_as_any_other():
    """A cache that is written inside of a rematerialised block would stay in it."""
    model, params = make_model(dataclasses.replace(TINY, block_size=10, n_layer=1))
    recomputed = model.clone(config=dataclasses.replace(model.config, remat="full"))
    for got, wanted in zip(cached_logits(recomputed, params), cached_logits(model, params), strict=True):
        np.testing.assert_array_equal(got, wanted)
