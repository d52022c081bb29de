"""Attend to a cache whose column is the position: what the zoo's kinds of attention share.

A column after a query's position may hold anything, padding or an older sequence: it is not read before its own token
is written there. So there is nothing to reset, and padding needs no mask.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgpt.layers.kernels.cached import is_decoding


def remember(module: nn.Module, positions_BT: jax.Array, *new: jax.Array) -> tuple[jax.Array, ...] | None:
    """Write T tokens into the cache of a module that decodes, and return it: arrays [B, S, ...] for new [B, T, ...].

    It returns None if the module does not decode, and in the first call, which makes a cache with T columns.
    """
    if not is_decoding(module):
        return None
    kept = module.get_variable("cache", "columns")
    if kept is None:
        module.put_variable("cache", "columns", tuple(map(jnp.zeros_like, new)))
        return None
    kept = tuple(write(old, x, positions_BT) for old, x in zip(kept, new, strict=True))
    module.put_variable("cache", "columns", kept)
    return kept


def write(cache_BS: jax.Array, new_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Return the cache with new tokens in their columns. Both arrays may have more axes. A column past S is dropped."""
    rows_B1 = jnp.arange(cache_BS.shape[0])[:, None]
    return cache_BS.at[rows_B1, positions_BT].set(new_BT.astype(cache_BS.dtype), mode="drop")


def causal_softmax(scores_BNTS: jax.Array, positions_BT: jax.Array, window: int | None = None) -> jax.Array:
    """Return attention weights over the columns up to each query's position, at most `window` of them, in float32."""
    behind_BTS = positions_BT[:, :, None] - jnp.arange(scores_BNTS.shape[-1])[None, None]
    visible_BTS = (behind_BTS >= 0) & (behind_BTS < (scores_BNTS.shape[-1] if window is None else window))
    return jax.nn.softmax(jnp.where(visible_BTS[:, None], scores_BNTS, jnp.finfo(jnp.float32).min), axis=-1)


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    positions_BT: jax.Array,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Return the weighted values of a cache, out_BTNH. Each key/value head serves N // K query heads."""
    G = q_BTNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (jnp.repeat(x, G, axis=2).astype(q_BTNH.dtype) for x in (k_BSKH, v_BSKH))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, preferred_element_type=jnp.float32) * scale
    weights_BNTS = causal_softmax(scores_BNTS, positions_BT, window)
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS.astype(v_BSNH.dtype), v_BSNH)
