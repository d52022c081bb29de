"""The cache as a value: what is visible, where things are written, what 8 bits cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.layers import plain_attention
from jaxgpt.layers.cache import EMPTY, CacheIndex, KVCache
from tests.conftest import SIZES
from tests.helpers import FLOAT32_REORDERED

K, H = SIZES["K"], SIZES["H"]


def empty(batch, slots, **kwargs):
    return KVCache.empty(batch=batch, slots=slots, n_layer=1, n_kv_head=K, head_dim=H, **kwargs)


def index(positions, slots):
    return CacheIndex(jnp.array(positions, jnp.int32), jnp.array(slots, jnp.int32))


def picture(visible_TS):
    return ["".join("x" if seen else "." for seen in row) for row in np.asarray(visible_TS)]


def test_what_is_visible():
    """Two rows, the second with one token of padding: nobody reads it, and it reads nothing."""
    cache = empty(2, 5)
    cache, at = cache.reserve(index([[0, 1, 2], [EMPTY, 0, 1]], [0, 1, 2]), window=3)
    assert picture(at.visible_BTS[0]) == ["x....", "xx...", "xxx.."]
    assert picture(at.visible_BTS[1]) == [".....", ".x...", ".xx.."]
    cache, at = cache.reserve(index([[3], [2]], [3]), window=3)
    assert picture(at.visible_BTS[0]) == [".xxx."]  # the window is three
    assert picture(at.visible_BTS[1]) == [".xxx."]


def test_the_slots_are_a_ring():
    cache = empty(1, 4)
    for position in range(6):
        cache, at = cache.reserve(index([[position]], [position % 4]), window=4)
    np.testing.assert_array_equal(cache.positions_BS, [[4, 5, 2, 3]])
    cache, at = cache.reserve(index([[6, 7]], [2, 3]), window=4)
    assert picture(at.visible_BTS[0]) == ["xxx.", "xxxx"]
    cache, _ = cache.reserve(index([[8, 9, 10]], [3, 0, 1]), window=4)  # around the end
    np.testing.assert_array_equal(cache.positions_BS, [[9, 10, 6, 8]])


def random_qkv(T):
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.normal(size=(2, T, heads, H)), jnp.float32) for heads in (SIZES["N"], K, K))


@functools.partial(jax.jit, static_argnames=("dtype", "pieces"))
def attend_in_pieces(q, k, v, dtype, pieces):
    cache, out, at = empty(2, 8, dtype=dtype), [], 0
    for T in pieces:
        columns = np.arange(at, at + T)
        cache, where = cache.reserve(index(np.tile(columns, (2, 1)), columns), window=8)
        layer = cache.layers[0].write(k[:, at : at + T], v[:, at : at + T], where)
        cache = cache.replace(layers=(layer,))
        out.append(layer.attend(q[:, at : at + T], where.visible_BTS))
        at += T
    return jnp.concatenate(out, axis=1)


def test_attention_over_a_cache_is_attention():
    """In one pass, token by token, and in between; grouped heads."""
    q, k, v = random_qkv(7)
    expected = jax.jit(plain_attention)(q, k, v)
    for pieces in ((7,), (1,) * 7, (3, 1, 3)):
        np.testing.assert_allclose(attend_in_pieces(q, k, v, "float32", pieces), expected, **FLOAT32_REORDERED)


def test_8_bits_change_attention_by_less_than_a_hundredth():
    q, k, v = random_qkv(7)
    out = attend_in_pieces(q, k, v, "int8", (3, 1, 3))
    error = np.abs(out - jax.jit(plain_attention)(q, k, v)).max()
    assert 0 < error < 0.03  # values near 1, keys and values each off by at most 1/254 of the largest
