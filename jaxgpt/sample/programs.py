"""The state of batched decoding, and the programs that change it, above all `prefill`, `insert` and `decode`.

All shapes are fixed, and requests are arrays, so that none compiles anything that another has not. Prompts are read into
a cache of one row, in chunks of one size, and chunks that later prompts may share are kept.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import ArrayLike

from jaxgpt.config.validate import LARGEST_SIZE, short
from jaxgpt.errors import UserError
from jaxgpt.layers.gpu import with_gpu_forms
from jaxgpt.layers.kernels.cached import LayerCache, put_tokens
from jaxgpt.loss import log_sum_exp, pick_logprobs
from jaxgpt.model import GPT, GPTConfig
from jaxgpt.sample import Precision, Sampling
from jaxgpt.sample.filters import SamplingRows, draw
from jaxgpt.sample.quantize import apply_model, decode_module

LOG = logging.getLogger(__name__)
Cache = Any  # linen's collection "cache", or the tokens of a model without one: see `allocate_cache`
MAX_TOP = 20  # most alternatives with log-probabilities in a request, as in OpenAI's interface
NO_STOP = -1  # pads stop tokens, and is never drawn
CHUNK = 64  # tokens of a prompt that are read at a time: on two CPU cores 256 are no faster for each token
GPU_CHUNK = 512  # the same on a GPU, whose passes over fewer wait for launches
GPU_COLUMNS = 256  # fewest that `decode_plain` reads: attention to so many is one kernel
DEEP = 16  # blocks from which on the start of a program on CPU counts more than its speed with prompts
BLOCK = 128  # columns of the cache that attention reads at a time on CPU: 64 cost a fifth of the speed at 8 rows


def known_ids(model: GPT, vocab_size: int | None = None) -> int:
    """Return the number of ids that may be drawn: the model's, and `vocab_size` at most."""
    assert model.config.vocab_size is not None, "a model with parameters has one"
    return min(model.config.vocab_size, vocab_size or LARGEST_SIZE)


def check_ids(model: GPT, ids: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Return ids as int32. Raise `UserError` for ids that the model lacks: their embeddings would silently be nan."""
    known = known_ids(model)
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):  # lists of different lengths, or integers of hundreds of digits
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(f"{name} is {short(ids)}: needs a list of token ids, whole numbers from 0 to {known - 1}")
    if array.size and not (array.min() >= 0 and array.max() < known):
        raise UserError(f"{name} has ids from {array.min()} to {array.max()}, the model knows 0 to {known - 1}")
    return array.astype(np.int32)


def check_prompt(model: GPT, prompt: Sequence[int] | np.ndarray, name: str = "the prompt") -> None:
    """Raise `UserError` unless a prompt has 1 to block_size ids that the model knows."""
    ids, most = check_ids(model, prompt, name), model.config.block_size
    if not len(ids):
        raise UserError(f"{name} is empty: start it from a token, such as the end-of-text or a newline")
    if len(ids) > most:
        raise UserError(f"{name} has {len(ids)} tokens: needs at most block_size={most}")


def pad_stop_tokens(stop_tokens: Sequence[int], length: int) -> np.ndarray:
    """Pad ids with NO_STOP."""
    return np.array([*stop_tokens, *[NO_STOP] * (length - len(stop_tokens))], np.int32)


def next_bucket(least: int, wanted: int) -> int:
    """Return the first of `least`, 2 `least`, 4 `least` ... that is at least `wanted`."""
    while least < wanted:
        least *= 2
    return least


def has_unbounded_positions(model: GPT) -> bool:
    """Return whether the window can slide without end. If not, text past the last position is read anew."""
    return model.config.position in ("rope", "none") and not model.config.is_foreign


def chunk_size(model: GPT) -> int:
    """Return the number of tokens of a prompt that are read at a time."""
    return min(CHUNK, model.config.block_size)


def cache_columns(model: GPT, tokens: int | None = None) -> int:
    """Return the number of columns that hold `tokens` tokens, rounded up to whole blocks. None means the context."""
    block_size, chunk = model.config.block_size, chunk_size(model)
    tokens = block_size if tokens is None else min(tokens, block_size)
    block = min(BLOCK, -(-block_size // chunk) * chunk)
    return -(-tokens // block) * block


@functools.cache
def keeps_cache(config: GPTConfig) -> bool:
    """Return whether decoding keeps what it needs of earlier tokens. If not, say once that it computes them again."""
    if config.is_foreign and not config.has_cache:
        name = type(config).__name__
        LOG.warning("%s: each token computes its context again, since %s.has_cache is False", name, name)
        return False
    return True


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4), keep_unused=True)
def allocate_cache(model: GPT, params: dict, batch: int, columns: int, dtype: Precision | None) -> Cache:
    """Return an empty cache of the next tokens of `batch` sequences, with room for `columns` tokens in each.

    It is the collection "cache" of linen: a `LayerCache` for each `Attention`, and what other modules keep. If a model has
    none, it is the tokens, [B, 1, S]. `params` are any parameters of the model, so that the cache is committed to a device
    if they are. `dtype` is the dtype of keys and values, None as the model.
    """
    if not keeps_cache(model.config):
        return jnp.zeros((batch, 1, columns), jnp.int32)
    # On CPU attention takes the time of what it reads. Elsewhere one pass is faster than a loop.
    block = cache_columns(model, 1) if jax.default_backend() == "cpu" else columns
    block = columns if columns % block else block

    def make(params: dict) -> Cache:
        tokens_BS = jnp.zeros((batch, columns), jnp.int32)
        positions_BS = jnp.broadcast_to(jnp.arange(columns), tokens_BS.shape)
        return decode_module(model, params, {}, tokens_BS, positions_BT=positions_BS, method="hidden_states")[1]

    def clear(x: Any) -> Any:
        if not _is_layer(x):
            return jnp.zeros(x.shape, x.dtype)
        return x.clear(dtype or model.dtype, context=min(model.config.block_size, columns), block=block)

    return jax.tree.map(clear, jax.eval_shape(make, params), is_leaf=_is_layer)


def is_columns(cache: Cache) -> bool:
    """Return whether all of a cache are keys and values, in columns: their order in time can be seen and undone."""
    return all(map(_is_layer, jax.tree.leaves(cache, is_leaf=_is_layer)))


def _is_layer(x: Any) -> bool:
    return isinstance(x, LayerCache)


class Chunk(NamedTuple):
    """Some consecutive tokens of a prompt."""

    start: int
    tokens_1T: np.ndarray  # int32, padded with 0
    digest: bytes | None  # digest of all tokens up to its end. None if padding makes it unlike others


def split_chunks(tokens: Sequence[int], size: int) -> Iterator[Chunk]:
    """Yield the chunks of a prompt. Prompts with a common prefix have common chunks, up to the last full one."""
    tokens_T, digest = np.asarray(tokens, np.int32), b""
    for start in range(0, len(tokens_T), size):
        part_T = tokens_T[start : start + size]
        digest, padding = hashlib.sha256(digest + part_T.tobytes()).digest(), size - len(part_T)
        yield Chunk(start, np.pad(part_T, (0, padding))[None], None if padding else digest)


class PrefixStore:
    """Keys and values of the chunks that were read last, in host memory, bounded in bytes."""

    def __init__(self, capacity: int):
        """Start empty. capacity: bytes. 0 keeps nothing."""
        self._capacity = capacity
        self._chunks: collections.OrderedDict[bytes | None, Any] = collections.OrderedDict()

    def restore(self, cache: Cache, chunk: Chunk) -> Cache | None:
        """Return the cache of one row with the keys and values of a chunk, or None if they are not here."""
        if chunk.digest not in self._chunks:
            return None
        self._chunks.move_to_end(chunk.digest)
        return _put_columns(cache, self._chunks[chunk.digest], np.int32(chunk.start))

    def keep(self, cache: Cache, chunk: Chunk) -> None:
        """Keep a full chunk that was read into the cache of one row, and drop the oldest to make room."""
        if not self._capacity or chunk.digest is None or chunk.digest in self._chunks:
            return
        columns = jax.device_get(_take_columns(cache, np.int32(chunk.start), chunk.tokens_1T.size))
        self._chunks[chunk.digest] = columns
        size = sum(x.nbytes for x in jax.tree.leaves(columns))  # the same for all, since all are full
        while len(self._chunks) * size > self._capacity:
            self._chunks.popitem(last=False)


@functools.partial(jax.jit, static_argnums=2)
def _take_columns(cache: Cache, start: jax.Array, size: int) -> Cache:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=2), cache)


@functools.partial(jax.jit, donate_argnums=0)
def _put_columns(cache: Cache, columns: Cache, start: jax.Array) -> Cache:
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=2)
    return jax.tree.map(put, cache, columns)


class Rows(flax.struct.PyTreeNode):
    """The requests in B slots, without their caches."""

    token_B: jax.Array  # int32: the last token, which is not in the cache yet
    position_B: jax.Array  # int32: its position
    left_B: jax.Array  # int32: tokens still to draw, 0 for a slot that is free or done
    drawn_B: jax.Array  # int32: tokens drawn so far, which make the key of the next draw
    keys_B: jax.Array
    sampling: SamplingRows
    stops_BE: jax.Array  # int32, padded with NO_STOP
    top_B: jax.Array  # int32: alternatives with log-probabilities, -1 for no log-probabilities either
    seen_BV: jax.Array  # int32: tokens of prompt and completion, for the penalties, see `SamplingRows.adjust`


class DecodeState(flax.struct.PyTreeNode):
    """B slots: the caches, and what they are decoding."""

    cache: Cache
    rows: Rows


class Drawn(flax.struct.PyTreeNode):
    """The tokens of one burst of up to N. Rows are valid up to their count.

    Log-probabilities are in nats, from the logits before temperature and filters. They are 0 unless requested.
    """

    count_B: jax.Array  # int32, without the stop token
    stopped_B: jax.Array  # bool: a stop token was drawn
    tokens_BN: jax.Array
    logprobs_BN: Any = None
    top_ids_BNA: Any = None  # the A = min(MAX_TOP, V) most probable, best first
    top_logprobs_BNA: Any = None


@functools.partial(jax.jit, static_argnums=(1, 2, 3), keep_unused=True)
def allocate_rows(like: jax.Array, slots: int, stops: int, vocab_size: int) -> Rows:
    """Return the rows of free slots, for ids below `vocab_size` and requests of up to `stops` stop tokens.

    like: see `allocate_cache`.
    """
    zeros = jnp.zeros(slots, jnp.int32)
    keys = jax.random.split(jax.random.key(0), slots)
    sampling = jax.tree.map(jnp.asarray, SamplingRows.stack([Sampling(greedy=True)] * slots))
    stops_BE = jnp.full((slots, stops), NO_STOP, jnp.int32)
    seen_BV = jnp.zeros((slots, vocab_size), jnp.int32)
    return Rows(zeros, zeros, zeros, zeros, keys, sampling, stops_BE, zeros - 1, seen_BV)


def prefill(model: GPT, params: dict, cache: Cache, tokens_1T: ArrayLike, start: ArrayLike, length: ArrayLike) -> Cache:
    """Read a chunk of one prompt, from position `start` on, into a cache of one row. Padding follows `length` tokens.

    On CPU a deep model's blocks are one program: 30 start four seconds sooner, and read a chunk a quarter slower.
    """
    has_equal_blocks = type(model) is GPT and not model.config.is_foreign
    if jax.default_backend() != "cpu" or not has_equal_blocks or model.config.n_layer < DEEP:
        return _prefill_at_once(model, params, cache, tokens_1T, start, length)
    x_1TD, positions_1T, segments_1T = _embed(model, params, tokens_1T, start, length)
    for layer in range(model.config.n_layer):
        name, block = f"h_{layer}", model.config.make_block(layer, model.compute)
        arrays = params[name], cache[name], x_1TD, positions_1T, segments_1T
        x_1TD, cache[name] = _run_block(block, *arrays)
    return cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill_at_once(
    model: GPT, params: dict, cache: Cache, tokens_1T: jax.Array, start: jax.Array, length: jax.Array
) -> Cache:
    return read(model, params, cache, tokens_1T, *_place(tokens_1T, start, length))[1]


@functools.partial(jax.jit, static_argnums=0)
def _embed(model: GPT, params: dict, tokens_1T: jax.Array, start: jax.Array, length: jax.Array) -> tuple[Any, ...]:
    positions_1T, segments_1T = _place(tokens_1T, start, length)
    return apply_model(model, params, tokens_1T, positions_1T, method="embed"), positions_1T, segments_1T


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _run_block(block: nn.Module, params: dict, cache: Cache, x_1TD: jax.Array, *place: jax.Array) -> tuple[Any, Cache]:
    return decode_module(block, params, cache, x_1TD, positions_BT=place[0], segments_BT=place[1])


def _place(tokens_1T: jax.Array, start: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the positions and segments of a chunk."""
    each_1T = jnp.arange(tokens_1T.shape[1])[None]
    return start + each_1T, jnp.where(each_1T < length, 1, 0)


def read(
    model: GPT,
    params: dict,
    cache: Cache,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segments_BT: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Return (hidden states x_BTD, updated cache) of the next T tokens of each sequence.

    A token attends to itself and the block_size - 1 before it. Positions are consecutive in each row and below
    block_size, except with rope and none, which have no limit. `segments_BT` is 0 for padding behind the tokens, which
    must not change the state of a module, else 1. None means no padding.
    """
    if keeps_cache(model.config):
        how: Any = {"positions_BT": positions_BT, "segments_BT": segments_BT, "method": "hidden_states"}
        return decode_module(model, params, cache, tokens_BT, **how)
    cache = put_tokens(cache, tokens_BT[..., None], positions_BT)
    x_BSD = apply_model(model, params, cache[:, 0, : model.config.block_size], method="hidden_states")
    return jnp.take_along_axis(x_BSD, positions_BT[..., None], axis=1), cache


@functools.partial(jax.jit, donate_argnums=0)
def insert(state: DecodeState, slot: jax.Array, cache: Cache, row: Rows) -> DecodeState:
    """Put one prompt, read up to its last token, and its request into a slot.

    cache: a cache of one row. row: each value of the slot, with or without an axis for the row.
    """

    def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, new.reshape(1, *buffer.shape[1:]), slot, axis=0)

    return jax.tree.map(put, state, DecodeState(cache, row))


@jax.jit
def take_rows(state: DecodeState, rows_R: jax.Array, used: jax.Array) -> DecodeState:
    """Return a state with R rows of another. The first `used` of them go on, and the others are free."""
    state = jax.tree.map(lambda x: x[rows_R], state)
    left_R = jnp.where(jnp.arange(len(rows_R)) < used, state.rows.left_B, 0)
    return state.replace(rows=state.rows.replace(left_B=left_R))


@functools.partial(jax.jit, donate_argnums=0)
def release(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Free a slot."""
    return state.replace(rows=state.rows.replace(left_B=state.rows.left_B.at[slot].set(0)))


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def decode(
    model: GPT, params: dict, state: DecodeState, steps: jax.Array, burst: int, allowed_BW: jax.Array
) -> tuple[DecodeState, Drawn]:
    """Draw up to `steps` tokens, at most `burst`, in each slot that has tokens left. End when none has.

    A slot waits if its next position is past the model's last one: see `has_unbounded_positions`. `allowed_BW` has a bit
    for each id that may be drawn, in uint32.
    """
    B, V = state.rows.seen_BV.shape
    A = min(MAX_TOP, V)
    bits_BW32 = allowed_BW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & 1
    may_be_BV = bits_BW32.reshape(B, -1)[:, :V] > 0

    def is_active(rows: Rows) -> jax.Array:
        has_room_B = has_unbounded_positions(model) | (rows.position_B < model.config.block_size)
        return (rows.left_B > 0) & has_room_B

    def step(carry: tuple[jax.Array, DecodeState, Drawn]) -> tuple[jax.Array, DecodeState, Drawn]:
        number, state, drawn = carry
        rows, active_B = state.rows, is_active(state.rows)
        drawn_so_far = drawn.tokens_BN, drawn.logprobs_BN, drawn.top_ids_BNA, drawn.top_logprobs_BNA
        # A slot without a request reads a token at position 0, which nothing reads.
        positions_B = jnp.where(active_B, rows.position_B, 0)
        x_B1D, cache = read(model, params, state.cache, rows.token_B[:, None], positions_B[:, None])
        logits_BU = apply_model(model, params, x_B1D, method="unembed")[:, 0]  # U ids, at least V
        logits_BV = logits_BU[:, :V]
        keys_B = jax.vmap(jax.random.fold_in)(rows.keys_B, rows.drawn_B)
        token_B = rows.sampling.draw(jnp.where(may_be_BV, logits_BV, -jnp.inf), keys_B, rows.seen_BV)
        stopped_B = active_B & (token_B[:, None] == rows.stops_BE).any(axis=1)
        marked_B = jnp.where(active_B, token_B, V)  # out of range: dropped
        seen_BV = rows.seen_BV.at[jnp.arange(B), marked_B].add(2, mode="drop")

        def compute_top() -> tuple[jax.Array, ...]:
            log_sum_B = log_sum_exp(logits_BU)
            best_BA, ids_BA = jax.lax.top_k(logits_BV, A)
            return pick_logprobs(logits_BV, token_B, log_sum_B), ids_BA, best_BA - log_sum_B[:, None]

        has_top = (active_B & (rows.top_B >= 0)).any()
        top = jax.lax.cond(has_top, compute_top, lambda: tuple(jnp.zeros_like(x[:, 0]) for x in drawn_so_far[1:]))
        each = zip(drawn_so_far, (token_B, *top), strict=True)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=number, axis=1)
        drawn_so_far = tuple(put(buffer, new[:, None]) for buffer, new in each)
        drawn = Drawn(drawn.count_B + (active_B & ~stopped_B), drawn.stopped_B | stopped_B, *drawn_so_far)
        rows = rows.replace(
            token_B=jnp.where(active_B, token_B, rows.token_B),
            position_B=rows.position_B + active_B,
            left_B=jnp.where(stopped_B, 0, rows.left_B - active_B),
            drawn_B=rows.drawn_B + active_B,
            seen_BV=seen_BV,
        )
        return number + 1, DecodeState(cache, rows), drawn

    def is_unfinished(carry: tuple[jax.Array, DecodeState, Drawn]) -> jax.Array:
        return (carry[0] < steps) & is_active(carry[1].rows).any()

    tokens_BN, ids_BNA = jnp.zeros((B, burst), jnp.int32), jnp.zeros((B, burst, A), jnp.int32)
    top = tokens_BN.astype(jnp.float32), ids_BNA, ids_BNA.astype(jnp.float32)
    drawn = Drawn(jnp.zeros(B, jnp.int32), jnp.zeros(B, bool), tokens_BN, *top)
    return jax.lax.while_loop(is_unfinished, step, (jnp.int32(0), state, drawn))[1:]


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5), donate_argnums=2)
def decode_plain(
    model: GPT, params: dict, state: DecodeState, steps: int, columns: int, greedy: bool
) -> tuple[DecodeState, Drawn]:
    """Do what `decode` does if all slots that draw are greedy or have a temperature, and nothing else.

    A GPU runs the loop, whose length is known, without the host. A slot that ends goes through the rest of it, and is
    left as no one reads it. So are `seen_BV` and log-probabilities, which such slots do not need. Attention reads
    `columns`, which are above all positions after the last step, or all. `greedy` says whether all slots are.
    """

    def set_live(cache: Cache, columns: int | None) -> Cache:
        return jax.tree.map(lambda x: x.replace(live=columns) if _is_layer(x) else x, cache, is_leaf=_is_layer)

    def step(i: jax.Array, carry: tuple[Cache, jax.Array, jax.Array]) -> tuple[Cache, jax.Array, jax.Array]:
        cache, token_B, tokens_NB = carry
        positions_B1 = jnp.where(i < limit_B, rows.position_B + i, 0)[:, None]
        x_B1D, cache = read_tokens(model, params, cache, token_B[:, None], positions_B1)
        logits_BV = apply_model(model, params, x_B1D, method="unembed")[:, 0, : rows.seen_BV.shape[1]]
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        if not greedy:
            weights_BV = jax.nn.softmax(logits_BV / rows.sampling.temperature_B[:, None], axis=-1)
            keys_B = jax.vmap(jax.random.fold_in)(rows.keys_B, rows.drawn_B + i)
            token_B = jnp.where(rows.sampling.is_greedy_B, token_B, draw(weights_BV, keys_B))
        # A slice would be copied outside of the CUDA graph that all else is.
        return cache, token_B, jnp.where(number_N1 == i, token_B[None], tokens_NB)

    rows, number_N1 = state.rows, jnp.arange(steps)[:, None]
    # XLA's norm of several rows is one kernel, of one row three.
    read_tokens = with_gpu_forms(read) if len(rows.left_B) == 1 else read
    room_B = model.config.block_size - rows.position_B
    limit_B = rows.left_B if has_unbounded_positions(model) else jnp.minimum(rows.left_B, room_B)
    limit_B = jnp.clip(limit_B, 0, steps)
    carry = set_live(state.cache, columns), rows.token_B, jnp.zeros((steps, len(limit_B)), jnp.int32)
    cache, token_B, tokens_NB = jax.lax.fori_loop(0, steps, step, carry)
    is_stop_NB = (tokens_NB[:, :, None] == rows.stops_BE[None]).any(axis=-1)
    count_B = jnp.minimum(limit_B, jnp.where(is_stop_NB, number_N1, steps).min(axis=0))
    left_B = jnp.where(count_B == steps, rows.left_B - steps, 0)
    rows = rows.replace(
        token_B=token_B, position_B=rows.position_B + steps, left_B=left_B, drawn_B=rows.drawn_B + steps
    )
    return DecodeState(set_live(cache, None), rows), Drawn(count_B, count_B < limit_B, tokens_NB.T)
