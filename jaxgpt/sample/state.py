"""Texts that are being written, as one value: tokens in columns, and the cache of what has been read.

All texts of a batch are right-aligned, so that their next tokens share a column: decoding writes one column of
tokens and one slot of the cache, whatever the lengths.
"""

from __future__ import annotations

import collections
import functools
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.layers.cache import EMPTY, CacheIndex, KVCache
from jaxgpt.model import GPT
from jaxgpt.sample.decoding import Decoding, next_bucket
from jaxgpt.sample.score import token_ids

CHUNK = 64  # columns that prefill reads at a time; fewer waste less on padding, more use the hardware better


class Texts(flax.struct.PyTreeNode):
    """B texts in X columns, being written. Column x of row b is position x - start_B[b] of its text."""

    tokens_BX: jax.Array
    logprobs_BX: jax.Array | None
    written: jax.Array  # int32: columns that hold tokens; the next one is drawn for all rows at once
    cached: jax.Array  # int32: columns that the cache has, or never needs
    start_B: jax.Array  # column of position 0; columns before it are padding
    length_B: jax.Array  # tokens drawn, without the stop token and what follows it
    stopped_B: jax.Array  # bool
    keys_B: jax.Array
    seen_BV: jax.Array | None  # bool, for the repetition penalty
    cache: KVCache


def begin(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    key: jax.Array,
    extra_slots: int = 0,
    sources: Sequence[Sequence[int]] | None = None,
) -> Texts:
    """The prompts as texts, nothing read yet but the sources. Raises and warns as `generate` says.

    extra_slots: of the cache, beyond block_size.
    """
    c = model.config
    prompts = _checked(model, prompts)
    memory = _source(model, sources, len(prompts))
    longest, chunk = max(len(prompt) for prompt in prompts), chunk_of(c.block_size)
    columns = min(next_bucket(decoding.bucket, longest), c.block_size)
    columns = -(-columns // chunk) * chunk
    X = columns + next_bucket(CHUNK, decoding.max_new_tokens + extra_slots)
    tokens_BX = np.zeros((len(prompts), X), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BX[row, columns - len(prompt) : columns] = prompt
    texts = _empty(
        tokens_BX,
        np.array([columns - len(prompt) for prompt in prompts], np.int32),
        row_keys(key, prompts, sources),
        np.int32(columns),
        np.int32(columns - -(-longest // chunk) * chunk),
        jax.tree.leaves(params)[0],
        config=c,
        cache_dtype=str(jnp.dtype(decoding.cache_dtype or model.dtype)),
        logprobs=decoding.logprobs,
        seen=decoding.sampling.repetition_penalty is not None,
        slots=min(c.block_size + extra_slots, X),
    )
    return texts if memory is None else texts.replace(cache=_remembered(model, params, texts.cache, *memory))


def _source(model: GPT, sources: Sequence[Sequence[int]] | None, rows: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(source_BS, segments_BS), padded to one of few lengths; None for a model that has no encoder."""
    window = model.config.block_size
    if not model.config.n_encoder_layer:
        if sources is not None:
            raise UserError("sources are for a model with an encoder: leave them out, or give a text as its prompt")
        return None
    if sources is None or len(sources) != rows:
        raise UserError(f"a model with an encoder needs a source for each of {rows} prompts, got {len(sources or ())}")
    for number, source in enumerate(sources):
        source = token_ids(model, source, f"source {number}")
        if not 1 <= len(source) <= window:
            raise UserError(f"source {number} has {len(source)} tokens: needs 1 to {window}, the context of the model")
    S = min(next_bucket(16, max(len(source) for source in sources)), window)
    source_BS, segments_BS = np.zeros((rows, S), np.int32), np.zeros((rows, S), np.int32)
    for row, source in enumerate(sources):
        source_BS[row, : len(source)], segments_BS[row, : len(source)] = source, 1
    return source_BS, segments_BS


@functools.partial(jax.jit, static_argnums=0)
def _remembered(model: GPT, params: dict, cache: KVCache, source_BS: jax.Array, segments_BS: jax.Array) -> KVCache:
    remembered: Any = model.apply({"params": params}, cache, source_BS, segments_BS, method="init_cross_cache")
    return remembered


def _checked(model: GPT, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The last block_size ids of each prompt, with a warning where that is not all; raises as `generate` says."""
    window = model.config.block_size
    if not len(prompts):
        raise UserError("no prompts: give at least one list of token ids")
    ids = [token_ids(model, prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
    for number, prompt in enumerate(ids):
        if not len(prompt):
            raise UserError(f"prompt {number} is empty: start it from a token, such as the end-of-text or a newline")
        if len(prompt) > window:
            said = f"prompt {number} has {len(prompt)} tokens, block_size={window}: only its last {window} are read"
            warnings.warn(said, stacklevel=4)
    return [prompt[-window:].tolist() for prompt in ids]


def row_keys(
    key: jax.Array, prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None
) -> jax.Array:
    """One key for each prompt and its source: of these, and of how often both stood before in the batch."""
    before: collections.Counter = collections.Counter()
    words = []
    for source, prompt in zip([()] * len(prompts) if sources is None else sources, prompts, strict=True):
        both = tuple(map(int, source)), tuple(prompt)
        hashed = zlib.crc32(np.asarray([*source, *prompt], np.int32).tobytes())
        words.append((hashed, before[both]))
        before[both] += 1
    return _fold_in(key, np.array(words, np.uint32))


@jax.jit
def _fold_in(key, words_B2):
    return jax.vmap(lambda words: jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1]))(words_B2)


@functools.partial(jax.jit, static_argnames=("config", "cache_dtype", "logprobs", "seen", "slots"), keep_unused=True)
def _empty(tokens_BX, start_B, keys_B, written, cached, like, *, config, cache_dtype, logprobs, seen, slots) -> Texts:
    """like: any of the parameters; where they are committed to a device, so are the texts, from the first call on."""
    c, (B, X) = config.explicit(), tokens_BX.shape
    seen_BV = None
    if seen:
        columns_1X = jnp.arange(X)[None]
        real_BX = (columns_1X >= start_B[:, None]) & (columns_1X < written)
        tokens_BX_or_none = jnp.where(real_BX, tokens_BX, c.vocab_size)  # beyond the last, which "drop" drops
        seen_BV = jnp.zeros((B, c.vocab_size), bool)
        seen_BV = seen_BV.at[jnp.arange(B)[:, None], tokens_BX_or_none].set(True, mode="drop")
    return Texts(
        tokens_BX=tokens_BX,
        logprobs_BX=jnp.zeros((B, X)) if logprobs else None,
        written=written,
        cached=cached,
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


def read(model: GPT, params: dict, t: Texts, T: int) -> tuple[Texts, jax.Array]:
    """The next T columns into the cache; their features, x_BTD."""
    tokens_BT = jax.lax.dynamic_slice_in_dim(t.tokens_BX, t.cached, T, axis=1)
    columns_T = t.cached + jnp.arange(T)
    positions_BT = columns_T[None] - t.start_B[:, None]
    valid_BT = positions_BT >= 0
    if not slides(model):
        valid_BT &= positions_BT < model.config.block_size
    index = CacheIndex(jnp.where(valid_BT, positions_BT, EMPTY), columns_T % t.cache.slots)
    x_BTD, cache = model.apply({"params": params}, tokens_BT, t.cache, index, method="decode")
    return t.replace(cache=cache, cached=t.cached + T), x_BTD


def read_all(model: GPT, params: dict, t: Texts) -> tuple[Texts, jax.Array]:
    """All columns that are written, a chunk at a time; features of the last, x_BD. A chunk must fit their number."""
    chunk = chunk_of(model.config.block_size)

    def body(tx):
        t, x_BTD = read(model, params, tx[0], chunk)
        return t, x_BTD[:, -1]

    x_BD = jnp.zeros((t.tokens_BX.shape[0], model.config.n_embd), model.dtype)
    return jax.lax.while_loop(lambda tx: tx[0].cached < tx[0].written, body, (t, x_BD))


def full_B(model: GPT, t: Texts, ahead: int | jax.Array = 0) -> jax.Array:
    """The rows for which the last token, or the one `ahead` of it, stands past the last position."""
    return (t.written - 1 + ahead - t.start_B >= model.config.block_size) & ~t.stopped_B


def restarted(model: GPT, t: Texts, full: jax.Array) -> Texts:
    """Those rows begin anew from their last half window. The others will read those columns again, to no effect."""
    c = model.config
    half, chunk = max(c.block_size // 2, 1), chunk_of(c.block_size)
    cache = t.cache.replace(positions_BS=jnp.where(full[:, None], EMPTY, t.cache.positions_BS))
    return t.replace(
        cache=cache,
        cached=jnp.where(full.any(), t.written - -(-half // chunk) * chunk, t.cached),
        start_B=jnp.where(full, t.written - half, t.start_B),
    )


def slides(model: GPT) -> bool:
    """Whether positions have no end, so that the window slides; else full texts are `restarted`."""
    return model.config.position in ("rope", "none")


def chunk_of(block_size: int) -> int:
    return min(CHUNK, block_size)
