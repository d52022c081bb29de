"""Attention to keys and values that are kept of earlier tokens.

Each row of the batch is a ring of S columns: the token at position p lies in column p % S, whatever the other rows hold.
Only a query's position decides what it attends to, so that columns without a token of this sequence need neither zeros
nor a mask of their own.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config.validate import short_repr
from jaxgpt.layers.kernels.plain import Scores, cap_scores
from jaxgpt.layers.linear import to_int8

LOWEST = jnp.finfo(jnp.float32).min


def is_decoding(module: nn.Module) -> bool:
    """Return whether a module is to keep what later tokens need in linen's collection "cache"."""
    return module.is_mutable_collection("cache") and not module.is_initializing()


class LayerCache(flax.struct.PyTreeNode):
    """The keys and values of one layer, normed and rotated, which later tokens attend to."""

    k_BKSH: jax.Array  # keys
    v_BKSH: jax.Array  # values
    # int8 caches have one scale per token and head (`to_int8`). None means the values themselves
    k_scale_BKS: jax.Array | None = None
    v_scale_BKS: jax.Array | None = None
    context: int = flax.struct.field(pytree_node=False, kw_only=True)  # tokens that a query attends to, at most S
    block: int = flax.struct.field(pytree_node=False, kw_only=True)  # columns that are read at a time. It divides S
    # the first columns, which a plain softmax reads, in one kernel on a GPU. None means blocks and a running softmax
    live: int | None = flax.struct.field(pytree_node=False, kw_only=True, default=None)
    __repr__ = short_repr

    @staticmethod
    def empty(k_BSKH: jax.Array, v_BSKH: jax.Array) -> LayerCache:
        """Return a cache without tokens, with a column for each of S keys and values."""
        k_BKSH, v_BKSH = (jnp.zeros_like(x.swapaxes(1, 2)) for x in (k_BSKH, v_BSKH))
        return LayerCache(k_BKSH, v_BKSH, context=k_BSKH.shape[1], block=k_BSKH.shape[1])

    def clear(self, dtype: DTypeLike, *, context: int, block: int) -> LayerCache:
        """Return a cache of this shape without tokens. dtype: float32, bfloat16 or int8."""
        k_BKSH, v_BKSH = (jnp.zeros(x.shape, dtype) for x in (self.k_BKSH, self.v_BKSH))
        scales = (jnp.zeros(x.shape[:3]) for x in (k_BKSH, v_BKSH)) if jnp.dtype(dtype) == jnp.int8 else ()
        return LayerCache(k_BKSH, v_BKSH, *scales, context=context, block=block)

    @property
    def columns(self) -> int:
        """Number of columns, S."""
        return self.k_BKSH.shape[2]

    def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array) -> LayerCache:
        """Return the cache with T new tokens in their columns."""
        new = self.replace(k_BKSH=k_BTKH, v_BKSH=v_BTKH)
        if self.k_scale_BKS is not None:
            (k8_BTKH, k_scale_BTK), (v8_BTKH, v_scale_BTK) = to_int8(k_BTKH), to_int8(v_BTKH)
            new = self.replace(k_BKSH=k8_BTKH, v_BKSH=v8_BTKH, k_scale_BKS=k_scale_BTK, v_scale_BKS=v_scale_BTK)
        columns_BT = positions_BT % self.columns
        return jax.tree.map(lambda old, x: put_tokens(old, x, columns_BT), self, new)

    def attend(self, q_BTNH: jax.Array, positions_BT: jax.Array, scores: Scores) -> jax.Array:
        """Compute `plain_attention` over the tokens up to each query's position: out_BTNH.

        Columns are read in blocks with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). The
        time thus grows with the tokens in the cache, not with its size, and the bits depend on neither. Positions are int32,
        consecutive in each row.
        """
        B, T, N, H = q_BTNH.shape
        K, S = self.k_BKSH.shape[1:3]
        G = N // K
        # Heads have their own axis: folded into the batch, as in `plain_attention`, a step of GPT-2 at 8 rows takes
        # 86 ms instead of 52.
        q_BKQH = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
        scale = H**-0.5 if scores.scale is None else scores.scale
        window = self.context if scores.window is None else min(scores.window, self.context)
        in_float32 = {"preferred_element_type": jnp.float32}

        def see(part: LayerCache, first: int | jax.Array) -> tuple[jax.Array, jax.Array]:
            # int8 keys and values have one scale per token: it is applied to the scores and to the weights.
            k_BKSH = part.k_BKSH if part.k_scale_BKS is None else part.k_BKSH.astype(q_BKQH.dtype)
            scores_BKQS = jnp.einsum("bkqH,bksH->bkqs", q_BKQH.astype(k_BKSH.dtype), k_BKSH, **in_float32)
            if part.k_scale_BKS is not None:
                scores_BKQS = scores_BKQS * part.k_scale_BKS[:, :, None]
            scores_BKQS = cap_scores(scores_BKQS * scale, scores.softcap)
            columns_11S = (first + jnp.arange(part.columns))[None, None]
            behind_BTS = (positions_BT[:, :, None] - columns_11S) % S
            visible_BTS = (behind_BTS < window) & (behind_BTS <= positions_BT[:, :, None])
            return scores_BKQS, jnp.tile(visible_BTS[:, None], (1, 1, G, 1))

        def weigh(part: LayerCache, weights: jax.Array) -> jax.Array:
            v_BKSH = part.v_BKSH
            if part.v_scale_BKS is not None:
                v_BKSH, weights = v_BKSH.astype(jnp.float32), weights * part.v_scale_BKS[:, :, None]
            return jnp.einsum("bkqs,bksH->bkqH", weights.astype(v_BKSH.dtype), v_BKSH, **in_float32)

        def read(number: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            first = number * self.block
            part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, self.block, axis=2), self)
            scores_BKQS, visible = see(part, first)
            largest, total, out = sums
            new_largest = jnp.maximum(largest, jnp.where(visible, scores_BKQS, LOWEST).max(axis=-1))
            weights = jnp.where(visible, jnp.exp(scores_BKQS - new_largest[..., None]), 0.0)
            shrink = jnp.exp(largest - new_largest)
            total, values = total * shrink + weights.sum(axis=-1), weigh(part, weights)
            return new_largest, total, out * shrink[..., None] + values

        shape = q_BKQH.shape[:-1]
        sums = jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((*shape, self.v_BKSH.shape[-1]))
        if self.live is not None:
            part = jax.tree.map(lambda x: x[:, :, : self.live], self)
            scores_BKQS, visible = see(part, 0)
            weights = jax.nn.softmax(jnp.where(visible, scores_BKQS, LOWEST), axis=-1)
            total, out = jnp.ones(shape), weigh(part, weights)
        elif self.block == S:
            _, total, out = read(jnp.int32(0), sums)
        else:
            used = jnp.minimum(positions_BT.max() + 1, S)
            _, total, out = jax.lax.fori_loop(0, -(-used // self.block), read, sums)
        out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]  # a query that sees nothing gets zeros
        out_BTNH = out.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)
        return out_BTNH.astype(q_BTNH.dtype)


def put_tokens(buffer: jax.Array, new: jax.Array, columns_BT: jax.Array) -> jax.Array:
    """Return buffer [B, K, S, ...] with `new` [B, T, K, ...] in the given columns."""
    new = new.astype(buffer.dtype)
    if columns_BT.shape == (1, 1):  # one slice, which XLA writes in place
        return jax.lax.dynamic_update_slice_in_dim(buffer, new.swapaxes(1, 2), columns_BT[0, 0], axis=2)
    rows_B1 = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows_B1, :, columns_BT].set(new, unique_indices=True)
