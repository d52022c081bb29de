"""The KV cache: a value that the model takes and returns.

The slots are a ring. Every row of the batch writes to the same slot at the same time, so that decoding is one
in-place slice update and not a scatter; rows of different lengths are right-aligned, and the cache records which
position each slot of each row holds. What a query attends to depends on positions only, never on slots.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.layers.kernels.plain import cap_scores
from jaxgpt.layers.quantize import to_int8

EMPTY = -1  # position of an empty slot


class CacheIndex(flax.struct.PyTreeNode):
    """Positions and slots of T new tokens in each row, and what they attend to."""

    positions_BT: jax.Array  # int32, position in the sequence; EMPTY for padding, which no token attends to
    slots_T: jax.Array  # int32, consecutive modulo S
    # Set by `KVCache.reserve`:
    visible_BTS: jax.Array | None = None  # bool: which slots each token attends to
    behind_BTS: jax.Array | None = None  # int32: how many positions each slot is behind the token

    def window_mask(self, window: int | None) -> jax.Array:
        """Return visible_BTS, limited to the last `window` tokens. None means no limit."""
        assert self.visible_BTS is not None and self.behind_BTS is not None
        return self.visible_BTS if window is None else self.visible_BTS & (self.behind_BTS < window)


class LayerCache(flax.struct.PyTreeNode):
    """One layer's keys and values, normed and rotated."""

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    # int8 caches have one scale per token and head (`quantize.to_int8`); None: the values themselves
    k_scale_BKS: jax.Array | None = None
    v_scale_BKS: jax.Array | None = None

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.k_BKSH.shape[2]

    def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, index: CacheIndex) -> LayerCache:
        """Return the cache with T new tokens in their slots."""
        k_BKTH, v_BKTH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
        new = LayerCache(k_BKTH, v_BKTH)
        if self.k_scale_BKS is not None:
            (k8_BKTH, k_scale_BKT), (v8_BKTH, v_scale_BKT) = to_int8(k_BKTH), to_int8(v_BKTH)
            new = LayerCache(k8_BKTH, v8_BKTH, k_scale_BKT, v_scale_BKT)
        return jax.tree.map(functools.partial(_put, index=index, axis=2), self, new)

    def attend(
        self, q_BTNH: jax.Array, visible_BTS: jax.Array, *, scale: float | None = None, softcap: float | None = None
    ) -> jax.Array:
        """Compute `plain_attention` over the slots: out_BTNH. A query with no visible slot gets finite values."""
        B, T, N, H = q_BTNH.shape
        K = self.k_BKSH.shape[1]
        G = N // K
        # Heads have their own axis: folded into the batch, as in `plain_attention`, a step of GPT-2 at 8 rows takes
        # 86 ms instead of 52.
        q_ = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
        k_, v_ = self.k_BKSH, self.v_BKSH
        if k_.dtype == jnp.int8:
            k_, v_ = k_.astype(q_.dtype), v_.astype(q_.dtype)
        scale = H**-0.5 if scale is None else scale
        scores = jnp.einsum("bktH,bksH->bkts", q_.astype(k_.dtype), k_, preferred_element_type=jnp.float32) * scale
        if self.k_scale_BKS is not None:  # one scale per key, applied to the scores, not to the keys
            scores = scores * self.k_scale_BKS[:, :, None]
        scores = cap_scores(scores, softcap)
        visible = jnp.tile(visible_BTS[:, None], (1, 1, G, 1))
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1)
        if self.v_scale_BKS is not None:
            weights = weights * self.v_scale_BKS[:, :, None]
        out = jnp.einsum("bkts,bksH->bktH", weights.astype(v_.dtype), v_)
        return out.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of all layers: `GPT.decode(tokens_BT, cache, index)` returns an updated one."""

    layers: tuple[LayerCache, ...]
    positions_BS: jax.Array  # int32, position of the token in each slot, or EMPTY

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.positions_BS.shape[1]

    @staticmethod
    def empty(
        *, batch: int, slots: int, n_layer: int, n_kv_head: int, head_dim: int, dtype: DTypeLike = jnp.float32
    ) -> KVCache:
        """Return a cache with room for `slots` tokens in each of `batch` rows. dtype: float32, bfloat16, or int8."""
        shape = (batch, n_kv_head, slots, head_dim)

        def layer() -> LayerCache:
            scales = (jnp.zeros(shape[:-1]), jnp.zeros(shape[:-1])) if jnp.dtype(dtype) == jnp.int8 else ()
            return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), *scales)

        return KVCache(
            layers=tuple(layer() for _ in range(n_layer)), positions_BS=jnp.full((batch, slots), EMPTY, jnp.int32)
        )

    def reserve(self, index: CacheIndex, window: int) -> tuple[KVCache, CacheIndex]:
        """Reserve slots for new tokens. Each attends to itself and the window - 1 tokens before it.

        The layers write their keys and values to these slots afterwards.
        """
        positions_BS = _put(self.positions_BS, index.positions_BT, index=index, axis=1)
        behind_BTS = index.positions_BT[:, :, None] - positions_BS[:, None, :]
        visible_BTS = (behind_BTS >= 0) & (behind_BTS < window) & (positions_BS != EMPTY)[:, None, :]
        return self.replace(positions_BS=positions_BS), index.replace(visible_BTS=visible_BTS, behind_BTS=behind_BTS)


def _put(buffer: jax.Array, new: jax.Array, *, index: CacheIndex, axis: int) -> jax.Array:
    """Return buffer with `new` in the slots of `index` along `axis`."""
    if index.slots_T.shape[0] == 1:  # decoding: one slot, which XLA writes in place
        return jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), index.slots_T[0], axis)
    return buffer.at[(slice(None),) * axis + (index.slots_T,)].set(new.astype(buffer.dtype))
