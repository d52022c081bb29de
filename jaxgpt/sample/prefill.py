"""Read prompts into a cache of one row, in chunks of one size, and keep chunks that later prompts may share."""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Precision
from jaxgpt.model import GPT
from jaxgpt.sample.cache import KVCache
from jaxgpt.sample.prompts import pad_source
from jaxgpt.sample.quantize import apply_model
from jaxgpt.sample.state import prefill

CHUNK = 64  # tokens of a prompt that are read at a time: on two CPU cores 256 are no faster for each token
BLOCK = 128  # columns of the cache that attention reads at a time on CPU: 64 cost a fifth of the speed at 8 rows


def chunk_size(model: GPT) -> int:
    """Return the number of tokens of a prompt that are read at a time."""
    return min(CHUNK, model.config.block_size)


def cache_columns(model: GPT, tokens: int | None = None) -> int:
    """Return the number of columns that hold `tokens` tokens, rounded up to whole blocks. None means the context."""
    tokens = model.config.block_size if tokens is None else min(tokens, model.config.block_size)
    return _round_up(tokens, _block(model))


def _block(model: GPT) -> int:
    return min(BLOCK, _round_up(model.config.block_size, chunk_size(model)))


def _round_up(value: int, factor: int) -> int:
    return -(-value // factor) * factor


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4), keep_unused=True)
def allocate_cache(like: jax.Array, model: GPT, batch: int, columns: int, dtype: Precision | None) -> KVCache:
    """Return an empty cache. dtype: None means the model's.

    like: any parameter, so that the cache is committed to a device if it is.
    """
    c = model.config.explicit()
    assert c.n_kv_head and c.head_dim
    # On CPU attention takes the time of what it reads; elsewhere one pass is faster than a loop.
    block = _block(model) if jax.default_backend() == "cpu" else None
    return KVCache.empty(
        batch=batch,
        columns=columns,
        n_layer=c.n_layer,
        n_kv_head=c.n_kv_head,
        head_dim=c.head_dim,
        dtype=model.dtype if dtype is None else dtype,
        block=block,
    )


class Chunk(NamedTuple):
    """Some consecutive tokens of a prompt."""

    start: int
    tokens_1T: np.ndarray  # int32, padded with 0
    is_full: bool  # without padding, so that another prompt may share it
    digest: bytes  # of the source, if any, and all tokens up to its end


def split_chunks(tokens: Sequence[int], size: int, source: Sequence[int] | None = None) -> Iterator[Chunk]:
    """Yield the chunks of a prompt. Prompts with a common prefix have common chunks, up to the last full one.

    source: ids that the encoder reads, on which keys and values depend too.
    """
    tokens_T, digest = np.asarray(tokens, np.int32), np.asarray(source or (), np.int32).tobytes()
    for start in range(0, len(tokens_T), size):
        part_T = tokens_T[start : start + size]
        digest = hashlib.sha256(digest + part_T.tobytes()).digest()
        yield Chunk(start, np.pad(part_T, (0, size - len(part_T)))[None], len(part_T) == size, digest)


class PrefixStore:
    """Keys and values of the chunks that were read last, in host memory, bounded in bytes."""

    def __init__(self, capacity: int):
        """Start empty. capacity: bytes; 0 keeps nothing."""
        self._capacity, self._size = capacity, 0
        self._chunks: collections.OrderedDict[bytes, Any] = collections.OrderedDict()

    def restore(self, cache: KVCache, chunk: Chunk) -> KVCache | None:
        """Return the cache of one row with the keys and values of a chunk, or None if they are not here."""
        layers = self._chunks.get(chunk.digest)
        if layers is None:
            return None
        self._chunks.move_to_end(chunk.digest)
        return put_columns(cache, layers, np.int32(chunk.start))

    def keep(self, cache: KVCache, chunk: Chunk) -> None:
        """Keep a chunk that was read into the cache of one row, and drop the oldest to make room."""
        if not self._capacity or not chunk.is_full or chunk.digest in self._chunks:
            return
        layers = jax.device_get(take_columns(cache, np.int32(chunk.start), chunk.tokens_1T.size))
        self._chunks[chunk.digest] = layers
        self._size += _num_bytes(layers)
        while self._size > self._capacity:
            self._size -= _num_bytes(self._chunks.popitem(last=False)[1])


def _num_bytes(layers: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(layers))


@functools.partial(jax.jit, static_argnums=2)
def take_columns(cache: KVCache, start: jax.Array, size: int) -> Any:
    """Return keys and values of `size` columns of all layers."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=2), cache.layers)


@functools.partial(jax.jit, donate_argnums=0)
def put_columns(cache: KVCache, layers: Any, start: jax.Array) -> KVCache:
    """Return the cache with keys and values of all layers in the columns from `start` on."""
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=2)
    return cache.replace(layers=jax.tree.map(lambda buffer, new: put(buffer, jnp.asarray(new)), cache.layers, layers))


def read_prompt(model: GPT, params: dict, cache: KVCache, tokens: Sequence[int]) -> KVCache:
    """Read all tokens into a cache of one row."""
    for chunk in split_chunks(tokens, chunk_size(model)):
        cache = prefill(model, params, cache, chunk.tokens_1T, np.int32(chunk.start))
    return cache


def encode_source(model: GPT, params: dict, cache: KVCache, source: Sequence[int] | None, columns: int) -> KVCache:
    """Return a cache with the encoder's keys and values of a source, padded to `columns`, in each row."""
    padded = pad_source(model, source, columns)
    assert padded is not None, "a model with an encoder"
    batch = cache.layers[0].k_BKSH.shape[0]
    return _encode(model, params, cache, *(np.repeat(x_1S, batch, axis=0) for x_1S in padded))


@functools.partial(jax.jit, static_argnums=0)
def _encode(model: GPT, params: dict, cache: KVCache, source_BS: jax.Array, segments_BS: jax.Array) -> Any:
    return apply_model(model, params, cache, source_BS, segments_BS, method="init_cross_cache")
