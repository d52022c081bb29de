"""State of batched decoding: right-aligned columns of tokens and the KV cache.

All sequences of a batch end in the same column, so that decoding writes one column of tokens and one slot of the cache
whatever their lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.layers.cache import EMPTY, CacheIndex, KVCache
from jaxgpt.model import GPT
from jaxgpt.sample.decoding import Decoding, next_bucket
from jaxgpt.sample.prompts import pad_sources, prompt_keys, truncate_prompts

CHUNK = 64  # columns per step of prefill: fewer waste less on padding, more use the hardware better


class DecodeState(flax.struct.PyTreeNode):
    """B sequences in X columns. Column x of row b is position x - start_B[b] of its sequence."""

    tokens_BX: jax.Array
    logprobs_BX: jax.Array | None
    cursor: jax.Array  # int32: number of columns with tokens, and so the column of the next tokens of all rows
    cache_cursor: jax.Array  # int32: columns before it are in the cache, or never needed
    start_B: jax.Array  # int32: column of position 0; columns before it are padding
    length_B: jax.Array  # int32: tokens generated before the stop token
    stopped_B: jax.Array  # bool
    keys_B: jax.Array
    seen_BV: jax.Array | None  # bool: tokens of prompt and completion, for the repetition penalty
    cache: KVCache

    def seen_ids(self, V: int) -> jax.Array | None:
        """Return the first V columns of `seen_BV`."""
        return None if self.seen_BV is None else self.seen_BV[:, :V]

    def append(self, token_B: jax.Array) -> DecodeState:
        """Write the next token of each row."""
        return self.replace(tokens_BX=write_column(self.tokens_BX, token_B, self.cursor), cursor=self.cursor + 1)


def write_column(values_BX: jax.Array, value_B: jax.Array, column: jax.Array) -> jax.Array:
    """Return `values_BX` with one column overwritten."""
    return jax.lax.dynamic_update_slice_in_dim(values_BX, value_B[:, None].astype(values_BX.dtype), column, axis=1)


def init_state(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    key: jax.Array,
    extra_slots: int = 0,
    sources: Sequence[Sequence[int]] | None = None,
) -> DecodeState:
    """Return the state before prefill: prompts in their columns, sources encoded, caches empty.

    `extra_slots` are slots of the cache beyond block_size. Raises and warns as `generate`.
    """
    c = model.config
    ids, padded_sources = truncate_prompts(model, prompts), pad_sources(model, sources, len(prompts))
    longest, chunk = max(map(len, ids)), chunk_size(model)
    columns = min(next_bucket(decoding.bucket, longest), c.block_size)
    columns = -(-columns // chunk) * chunk
    tokens_BX = np.zeros((len(ids), columns + next_bucket(CHUNK, decoding.max_new_tokens + extra_slots)), np.int32)
    start_B = np.array([columns - len(prompt) for prompt in ids], np.int32)
    for row_X, start, prompt in zip(tokens_BX, start_B, ids, strict=True):
        row_X[start:columns] = prompt
    state = _empty_state(
        tokens_BX,
        start_B,
        prompt_keys(key, ids, sources),
        np.int32(columns),
        np.int32(columns - -(-longest // chunk) * chunk),
        jax.tree.leaves(params)[0],
        config=c,
        cache_dtype=str(jnp.dtype(decoding.cache_dtype or model.dtype)),
        logprobs=decoding.logprobs,
        seen=decoding.sampling.repetition_penalty is not None,
        slots=min(c.block_size + extra_slots, tokens_BX.shape[1]),
    )
    if padded_sources is None:
        return state
    return state.replace(cache=_read_sources(model, params, state.cache, *padded_sources))


@functools.partial(jax.jit, static_argnums=0)
def _read_sources(model: GPT, params: dict, cache: KVCache, source_BS: jax.Array, segments_BS: jax.Array) -> Any:
    return model.apply({"params": params}, cache, source_BS, segments_BS, method="init_cross_cache")


@functools.partial(jax.jit, static_argnames=("config", "cache_dtype", "logprobs", "seen", "slots"), keep_unused=True)
def _empty_state(
    tokens_BX, start_B, keys_B, cursor, cache_cursor, like, *, config, cache_dtype, logprobs, seen, slots
) -> DecodeState:
    """Return the state of new prompts. like: any parameter, so that the state is committed to a device if it is."""
    c, (B, X) = config.explicit(), tokens_BX.shape
    seen_BV = None
    if seen:
        columns_1X = jnp.arange(X)[None]
        is_token_BX = (columns_1X >= start_B[:, None]) & (columns_1X < cursor)
        token_or_none_BX = jnp.where(is_token_BX, tokens_BX, c.vocab_size)  # out of range: dropped
        seen_BV = jnp.zeros((B, c.vocab_size), bool)
        seen_BV = seen_BV.at[jnp.arange(B)[:, None], token_or_none_BX].set(True, mode="drop")
    return DecodeState(
        tokens_BX=tokens_BX,
        logprobs_BX=jnp.zeros((B, X)) if logprobs else None,
        cursor=cursor,
        cache_cursor=cache_cursor,
        start_B=start_B,
        length_B=jnp.zeros(B, jnp.int32),
        stopped_B=jnp.zeros(B, bool),
        keys_B=keys_B,
        seen_BV=seen_BV,
        cache=KVCache.empty(
            batch=B,
            slots=slots,
            n_layer=c.n_layer,
            n_kv_head=c.n_kv_head,
            head_dim=c.head_dim,
            dtype=cache_dtype,
        ),
    )


def prefill_chunk(model: GPT, params: dict, state: DecodeState, T: int) -> tuple[DecodeState, jax.Array]:
    """Read the next T columns, which must hold tokens, into the cache. Return the state and hidden states x_BTD."""
    tokens_BT = jax.lax.dynamic_slice_in_dim(state.tokens_BX, state.cache_cursor, T, axis=1)
    columns_T = state.cache_cursor + jnp.arange(T)
    positions_BT = columns_T[None] - state.start_B[:, None]
    is_valid_BT = positions_BT >= 0
    if not has_unbounded_positions(model):
        is_valid_BT &= positions_BT < model.config.block_size
    index = CacheIndex(jnp.where(is_valid_BT, positions_BT, EMPTY), columns_T % state.cache.slots)
    x_BTD, cache = model.apply({"params": params}, tokens_BT, state.cache, index, method="decode")
    return state.replace(cache=cache, cache_cursor=state.cache_cursor + T), x_BTD


def prefill(model: GPT, params: dict, state: DecodeState) -> tuple[DecodeState, jax.Array]:
    """Read all unread columns in chunks. Return the state and the last column's hidden states x_BD.

    The number of unread columns must be a multiple of the chunk size.
    """

    def read_chunk(carry):
        state, x_BTD = prefill_chunk(model, params, carry[0], chunk_size(model))
        return state, x_BTD[:, -1]

    x_BD = jnp.zeros((state.tokens_BX.shape[0], model.config.n_embd), model.dtype)
    return jax.lax.while_loop(lambda carry: carry[0].cache_cursor < carry[0].cursor, read_chunk, (state, x_BD))


def is_full_B(model: GPT, state: DecodeState, ahead: int = 0) -> jax.Array:
    """Return which rows have their last token, or the one `ahead` of it, past the end of the position table, if any."""
    if has_unbounded_positions(model):
        return jnp.zeros_like(state.stopped_B)
    return (state.cursor - 1 + ahead - state.start_B >= model.config.block_size) & ~state.stopped_B


def recompute_window(model: GPT, state: DecodeState, ahead: int = 0) -> DecodeState:
    """Restart full rows from their last half window. The others read those columns again, without effect."""
    if has_unbounded_positions(model):
        return state
    full_B = is_full_B(model, state, ahead)
    half, chunk = max(model.config.block_size // 2, 1), chunk_size(model)
    cache = state.cache.replace(positions_BS=jnp.where(full_B[:, None], EMPTY, state.cache.positions_BS))
    return state.replace(
        cache=cache,
        cache_cursor=jnp.where(full_B.any(), state.cursor - -(-half // chunk) * chunk, state.cache_cursor),
        start_B=jnp.where(full_B, state.cursor - half, state.start_B),
    )


def has_unbounded_positions(model: GPT) -> bool:
    """Return whether the window can slide without end. If not, full rows need `recompute_window`."""
    return model.config.position in ("rope", "none")


def chunk_size(model: GPT) -> int:
    """Return the number of columns that prefill reads at a time."""
    return min(CHUNK, model.config.block_size)
