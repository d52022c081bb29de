import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.layers import MLP, Attention, Block, LayerNorm, RMSNorm
from jaxgpt.layers.kernels import plain
from jaxgpt.layers.kernels.plain import DEFAULT_SCORES, Scores, cap_scores, plain_attention
from jaxgpt.layers.linear import Dense
from jaxgpt.model import GPTConfig
from tests.conftest import SIZES
from tests.helpers import DIMS, FLOAT32_REORDERED, out_and_gradients


def qkv(dims="BTNH", kv_dims="BTKH"):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=DIMS[d]), jnp.float32) for d in (dims, kv_dims, kv_dims))


def attend(*qkv, scores=DEFAULT_SCORES, **how):
    """The plain kernel in one compiled program: op by op it is dozens."""
    return jax.jit(lambda *qkv: plain_attention(*qkv, scores, **how))(*qkv)


def defined_attention(q_BTNH, k_BSKH, v_BSKH, scores):
    """Causal softmax(q k scale) v as it is defined."""
    T, N, H = q_BTNH.shape[1:]
    scale = H**-0.5 if scores.scale is None else scores.scale
    k_BSNH, v_BSNH = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k_BSKH, v_BSKH))
    scores_BNTS = cap_scores(scale * jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH), scores.softcap)
    distance_TS = jnp.arange(T)[:, None] - jnp.arange(T)[None]  # from each query back to each key
    visible_TS = (distance_TS >= 0) & (distance_TS < (scores.window or T))
    weights_BNTS = jax.nn.softmax(jnp.where(visible_TS[None, None], scores_BNTS, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH)


@pytest.mark.parametrize(
    "scores",
    [
        pytest.param(Scores(), id="plain-how0"),
        pytest.param(Scores(scale=0.3, softcap=0.7, window=3), id="plain-how1"),
    ],
)
def test_it_computes_what_is_defined(scores):
    out_BTNH = attend(*qkv(), scores=scores)
    chex.assert_shape(out_BTNH, DIMS["BTNH"])
    np.testing.assert_allclose(out_BTNH, defined_attention(*qkv(), scores), **FLOAT32_REORDERED)


@pytest.mark.parametrize(
    ("how", "long"),
    [({"window": 3, "softcap": 0.7, "scale": 0.3}, 4), ({"causal": False}, plain.MIN_BLOCKED_T)],
    ids=["blocks", "whole"],
)
def test_its_weights_are_what_it_makes_of_the_identity(how, long, monkeypatch):
    """Also with two documents in a row. Values may have another size than queries: an identity's is S."""
    monkeypatch.setattr(plain, "MIN_BLOCKED_T", long)
    q_BTNH, k_BTKH, _ = (jnp.concatenate([x, x[:, :3]], axis=1) for x in qkv())  # 8 tokens: four blocks of two
    B, T, K, H = k_BTKH.shape
    eye_BTKT = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, K, T))
    segments_BT = jnp.broadcast_to(jnp.arange(T) // 5, (B, T))
    module = Attention(n_embd=q_BTNH.shape[2] * H, n_head=q_BTNH.shape[2], n_kv_head=K, **how)
    attended = module.apply({}, q_BTNH, k_BTKH, eye_BTKT, segments_BT=segments_BT, method="attend")
    weights_BTNS = module.apply({}, q_BTNH, k_BTKH, segments_BT=segments_BT, method="weights")
    np.testing.assert_allclose(weights_BTNS.sum(axis=-1), 1, **FLOAT32_REORDERED)
    np.testing.assert_allclose(weights_BTNS, attended, **FLOAT32_REORDERED)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"scores": Scores(window=3, softcap=0.7)}, id="how1"),
        pytest.param({"segments_BT": jnp.array([[0, 0, 0, 1, 1, 2, 2, 2]] * 2)}, id="how3"),
    ],
)
def test_blocks_of_queries_equal_the_whole_square(how, monkeypatch):
    T = 8
    shapes = [(2, T, 6, 5), (2, T, 3, 5), (2, T, 3, 5)]
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    whole = out_and_gradients(plain_attention, q, k, v, **how)
    monkeypatch.setattr(plain, "MIN_BLOCKED_T", T)
    text = jax.jit(functools.partial(plain_attention, **how)).lower(q, k, v).as_text()
    assert text.count("dot_general") == 2 * plain.NUM_BLOCKS
    chex.assert_trees_all_close(out_and_gradients(plain_attention, q, k, v, **how), whole, **FLOAT32_REORDERED)


@pytest.mark.parametrize(("shape", "causal"), [((2, 6, 8, 8), True), ((1, 6, 1, 8), False)])
def test_a_mask_is_what_jaxs_own_attention_makes_of_it(shape, causal, monkeypatch):
    """Also in four blocks of queries."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 8, heads, 5)), jnp.float32) for heads in (6, 3, 3))
    mask = (rng.random(shape) < 0.5) | (np.arange(8) == 0)  # each has a key
    expected = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(mask), is_causal=causal)
    for smallest in (plain.MIN_BLOCKED_T, 8):
        monkeypatch.setattr(plain, "MIN_BLOCKED_T", smallest)
        np.testing.assert_allclose(attend(q, k, v, mask_BNTS=mask, causal=causal), expected, **FLOAT32_REORDERED)


def test_scores_and_softmax_are_float32():
    """With bfloat16 inputs only inputs and output are rounded: two digits, not none. Extreme scores are finite."""
    q, k, v = (8.0 * x for x in qkv())
    low = attend(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert low.dtype == jnp.bfloat16
    rounded = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v))
    np.testing.assert_allclose(low.astype(jnp.float32), attend(*rounded), rtol=0.02, atol=0.1)
    chex.assert_tree_all_finite(attend(1e10 * q, 1e10 * k, v))


def test_dropout_drops_weights_and_output_in_training_only():
    layer = Attention(n_embd=SIZES["D"], n_head=SIZES["N"], n_kv_head=SIZES["K"], dropout=0.5)
    x_BTD = jnp.asarray(np.random.default_rng(1).normal(size=DIMS["BTD"]), jnp.float32)
    variables = jax.jit(layer.init)(jax.random.key(2), x_BTD)
    plain = layer.apply(variables, x_BTD)
    np.testing.assert_array_equal(plain, layer.apply(variables, x_BTD, train=False))
    dropped = layer.apply(variables, x_BTD, train=True, rngs={"dropout": jax.random.key(0)})
    assert 0.3 < float(jnp.mean(dropped == 0.0)) < 0.7  # the output's half


def test_dropped_weights_keep_their_expectation():
    q, k, v = qkv()
    keys = jax.random.split(jax.random.key(0), 2000)
    drawn = jax.vmap(lambda key: plain_attention(q, k, v, Scores(dropout=0.3), key=key))
    mean = jax.jit(lambda keys: drawn(keys).mean(0))(keys)
    np.testing.assert_allclose(mean, attend(q, k, v), atol=0.1)  # 4 standard errors of 2000 draws


def test_each_block_of_queries_drops_weights_of_its_own():
    T = plain.MIN_BLOCKED_T
    zeros, v = jnp.zeros((1, T, 1, T)), jnp.eye(T)[None, :, None]  # every score alike; the output is the weights
    weights = attend(zeros, zeros, v, scores=Scores(dropout=0.5), key=jax.random.key(0))[0, :, 0]
    starts = range(T // plain.NUM_BLOCKS, T, T // plain.NUM_BLOCKS)
    first, *others = (np.asarray(weights[start, : starts[0]] > 0) for start in starts)
    for other in others:
        assert 0.3 < np.mean(first == other) < 0.7  # as two draws are, where one draw for both would have 1


def test_layers_stand_alone():
    """With nothing given but their sizes."""
    x_BTD = jnp.ones((2, 3, 32))
    config = GPTConfig(n_layer=1, n_head=4, n_embd=32)
    for layer in (Attention(n_embd=32, n_head=4), MLP(hidden=128), Block(config), LayerNorm(), RMSNorm(), Dense(32)):
        out_BTD, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), x_BTD)
        assert out_BTD.shape == x_BTD.shape and variables.keys() == {"params"}
