"""Keys and values of the tokens read so far: a value that the model takes and returns.

The slots are a ring. Every row of the batch writes to the same slot at the same time, so that decoding is one
in-place slice update and not a scatter; rows of different lengths are right-aligned, and each slot says for each
row which position it holds. What a query sees follows from positions alone, never from where a key happens to lie.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.layers.quantize import to_int8

EMPTY = -1  # position of a slot that holds nothing


class Place(flax.struct.PyTreeNode):
    """Where T new tokens of each row go."""

    positions_BT: jax.Array  # int32, each token's place in its text; EMPTY: padding, seen by nobody
    slots_T: jax.Array  # int32, consecutive modulo S
    # What `KVCache.placed` finds: bool, which slots each token reads; and how many tokens before it they hold
    visible_BTS: jax.Array | None = None
    behind_BTS: jax.Array | None = None

    def within(self, window: int) -> jax.Array:
        """visible_BTS of a layer that reads the last `window` tokens alone."""
        assert self.visible_BTS is not None and self.behind_BTS is not None
        return self.visible_BTS & (self.behind_BTS < window)


class LayerCache(flax.struct.PyTreeNode):
    """One layer's keys and values, rotated and normed as attention uses them."""

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    # int8 caches have one scale per token and head (`quantize.to_int8`); None: the values themselves
    k_scale_BKS: jax.Array | None = None
    v_scale_BKS: jax.Array | None = None

    @property
    def slots(self) -> int:
        return self.k_BKSH.shape[2]

    def extend(self, k_BTKH: jax.Array, v_BTKH: jax.Array, place: Place) -> LayerCache:
        """With T more tokens in their slots."""
        k_BKTH, v_BKTH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
        if self.k_scale_BKS is None or self.v_scale_BKS is None:
            return LayerCache(_put(self.k_BKSH, k_BKTH, place, axis=2), _put(self.v_BKSH, v_BKTH, place, axis=2))
        (k8_BKTH, k_scale_BKT), (v8_BKTH, v_scale_BKT) = to_int8(k_BKTH), to_int8(v_BKTH)
        return LayerCache(
            _put(self.k_BKSH, k8_BKTH, place, axis=2),
            _put(self.v_BKSH, v8_BKTH, place, axis=2),
            _put(self.k_scale_BKS, k_scale_BKT, place, axis=2),
            _put(self.v_scale_BKS, v_scale_BKT, place, axis=2),
        )


class KVCache(flax.struct.PyTreeNode):
    """Of the whole model: `GPT.extend(tokens_BT, cache, place)` returns the next one."""

    layers: tuple[LayerCache, ...]
    positions_BS: jax.Array  # int32, which token of the text each slot holds; EMPTY: none
    # Of a model with an encoder: keys and values of the source text, for each layer, and which of them are no padding
    memory: tuple[LayerCache, ...] = ()
    memory_segments_BS: jax.Array | None = None

    @property
    def slots(self) -> int:
        return self.positions_BS.shape[1]

    @staticmethod
    def empty(
        *, batch: int, slots: int, n_layer: int, kv_heads: int, head_size: int, dtype: DTypeLike = jnp.float32
    ) -> KVCache:
        """With room for `slots` tokens in each of `batch` rows. dtype: float32, bfloat16, or int8."""
        shape = (batch, kv_heads, slots, head_size)

        def layer() -> LayerCache:
            k_BKSH, v_BKSH = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
            if k_BKSH.dtype != jnp.int8:
                return LayerCache(k_BKSH=k_BKSH, v_BKSH=v_BKSH)
            return LayerCache(k_BKSH, v_BKSH, jnp.zeros(shape[:-1]), jnp.zeros(shape[:-1]))

        return KVCache(
            layers=tuple(layer() for _ in range(n_layer)), positions_BS=jnp.full((batch, slots), EMPTY, jnp.int32)
        )

    def placed(self, place: Place, window: int) -> tuple[KVCache, Place]:
        """Knowing whose the slots now are, and what each new token reads: itself and the window - 1 before it.

        The layers have yet to write their keys and values there.
        """
        positions_BS = _put(self.positions_BS, place.positions_BT, place, axis=1)
        behind_BTS = place.positions_BT[:, :, None] - positions_BS[:, None, :]
        visible_BTS = (behind_BTS >= 0) & (behind_BTS < window) & (positions_BS != EMPTY)[:, None, :]
        return self.replace(positions_BS=positions_BS), place.replace(visible_BTS=visible_BTS, behind_BTS=behind_BTS)


def _put(buffer: jax.Array, new: jax.Array, place: Place, *, axis: int) -> jax.Array:
    """buffer with `new` at the slots of `axis`."""
    if place.slots_T.shape[0] == 1:  # decoding: one slot, which XLA writes in place
        return jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), place.slots_T[0], axis)
    return buffer.at[(slice(None),) * axis + (place.slots_T,)].set(new.astype(buffer.dtype))
