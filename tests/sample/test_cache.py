"""The cache as a value: what is visible, where things are written, what 8 bits cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.layers import plain_attention
from jaxgpt.layers.kernels.cached import LayerCache
from jaxgpt.layers.kernels.plain import Scores
from tests.conftest import SIZES
from tests.helpers import FLOAT32_REORDERED

K, H = SIZES["K"], SIZES["H"]


def empty(batch, columns, dtype="float32", block=None):
    zeros = jnp.zeros((batch, columns, K, H))
    return LayerCache.empty(zeros, zeros).clear(dtype, context=columns, block=block or columns)


def visible(S, block, positions, window):
    """Which columns each query attends to, by the weights of one-hot values."""
    layer = LayerCache(jnp.zeros((1, 1, S, S)), jnp.eye(S)[None, None], context=S, block=block or S)
    q = jnp.zeros((1, len(positions), 1, S))
    out_1T1S = layer.attend(q, jnp.array([positions], jnp.int32), Scores(window=window))
    return ["".join("x" if weight > 0 else "." for weight in row) for row in np.asarray(out_1T1S[0, :, 0])]


def test_what_is_visible_follows_from_the_position():
    assert visible(6, 2, [3, 4], 3) == [".xxx..", "..xxx."]
    assert visible(6, None, [3, 4], 2) == ["..xx..", "...xx."]
    assert visible(6, 2, [7], 4) == ["xx..xx"]  # the columns are a ring


def random_qkv(T):
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.normal(size=(2, T, heads, H)), jnp.float32) for heads in (SIZES["N"], K, K))


@functools.partial(jax.jit, static_argnames=("dtype", "pieces", "block", "columns"))
def attend_in_pieces(q, k, v, dtype, pieces, block=None, columns=8):
    cache, out, at = empty(2, columns, dtype, block), [], 0
    for T in pieces:
        positions_BT = jnp.broadcast_to(jnp.arange(at, at + T), (2, T))
        cache = cache.write(k[:, at : at + T], v[:, at : at + T], positions_BT)
        out.append(cache.attend(q[:, at : at + T], positions_BT, Scores(window=8)))
        at += T
    return jnp.concatenate(out, axis=1)


def test_attention_over_a_cache_is_attention():
    """In one pass, token by token, and in between; grouped heads. The size of the cache changes no bit."""
    q, k, v = random_qkv(7)
    expected = jax.jit(plain_attention)(q, k, v)
    for pieces, block in (((7,), None), ((1,) * 7, 2)):
        out = attend_in_pieces(q, k, v, "float32", pieces, block)
        np.testing.assert_allclose(out, expected, **FLOAT32_REORDERED)
    small, large = (attend_in_pieces(q, k, v, "float32", (3, 1, 3), 4, columns) for columns in (8, 32))
    np.testing.assert_array_equal(small, large)
    np.testing.assert_allclose(small, expected, **FLOAT32_REORDERED)


def test_8_bits_change_attention_by_less_than_a_hundredth():
    q, k, v = random_qkv(7)
    out = attend_in_pieces(q, k, v, "int8", (3, 1, 3))
    error = np.abs(out - jax.jit(plain_attention)(q, k, v)).max()
    assert 0 < error < 0.03  # values near 1, keys and values each off by at most 1/254 of the largest
