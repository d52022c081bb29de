"""The state of batched decoding, and the three programs that change it: `prefill`, `insert` and `decode`.

All shapes are fixed: a request is data, so that none compiles anything that another has not.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxgpt.model import GPT
from jaxgpt.sample.cache import KVCache
from jaxgpt.sample.filters import Sampling, SamplingRows
from jaxgpt.sample.quantize import apply_model, unstack_layers

MAX_TOP = 20  # alternatives whose log-probabilities can be requested, as in OpenAI's interface
NO_STOP = -1  # pads stop tokens; never drawn


class Rows(flax.struct.PyTreeNode):
    """The requests in B slots, without their caches."""

    token_B: jax.Array  # int32: the last token, which is not in the cache yet
    position_B: jax.Array  # int32: its position
    left_B: jax.Array  # int32: tokens still to draw; 0 for a slot that is free or done
    drawn_B: jax.Array  # int32: tokens drawn so far, which make the key of the next draw
    keys_B: jax.Array
    sampling: SamplingRows
    stops_BE: jax.Array  # int32, padded with NO_STOP
    top_B: jax.Array  # int32: alternatives with log-probabilities; -1: no log-probabilities either
    seen_BV: jax.Array  # bool: tokens of prompt and completion, for the repetition penalty


class DecodeState(flax.struct.PyTreeNode):
    """B slots: the caches, and what they are decoding."""

    cache: KVCache
    rows: Rows


class Drawn(flax.struct.PyTreeNode):
    """The tokens of one burst of up to N. Rows are valid up to their count."""

    tokens_BN: jax.Array
    count_B: jax.Array  # int32, without the stop token
    stopped_B: jax.Array  # bool: a stop token was drawn
    logprobs_BN: jax.Array | None  # nats, from the logits before temperature and filters; 0 unless requested
    top_ids_BNA: jax.Array | None  # the A = min(MAX_TOP, V) most probable, best first; 0 unless requested
    top_logprobs_BNA: jax.Array | None

    def without_logprobs(self) -> Drawn:
        """Return the tokens alone."""
        return self.replace(**dict.fromkeys(_TOP_FIELDS))


@functools.partial(jax.jit, static_argnums=(1, 2, 3), keep_unused=True)
def allocate_rows(like: jax.Array, slots: int, stops: int, vocab_size: int) -> Rows:
    """Return the rows of free slots. like: see `prefill.allocate_cache`.

    stops: most stop tokens of a request. vocab_size: ids that may be drawn.
    """
    zeros = jnp.zeros(slots, jnp.int32)
    return Rows(
        token_B=zeros,
        position_B=zeros,
        left_B=zeros,
        drawn_B=zeros,
        keys_B=jax.random.split(jax.random.key(0), slots),
        sampling=jax.tree.map(jnp.asarray, SamplingRows.stack([Sampling(greedy=True)] * slots)),
        stops_BE=jnp.full((slots, stops), NO_STOP, jnp.int32),
        top_B=zeros - 1,
        seen_BV=jnp.zeros((slots, vocab_size), bool),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(model: GPT, params: dict, cache: KVCache, tokens_1T: jax.Array, start: jax.Array) -> KVCache:
    """Read a chunk of one prompt, from position `start` on, into a cache of one row. Padding may follow the prompt."""
    return read(model, params, cache, tokens_1T, start)[1]


def read(model: GPT, params: dict, cache: KVCache, tokens_1T: jax.Array, start: jax.Array) -> tuple[Any, KVCache]:
    """Return (hidden states x_1TD, updated cache) of T tokens of one sequence from position `start` on."""
    model, params = unstack_layers(model, params)
    return cache.decode(model, params, tokens_1T, start + jnp.arange(tokens_1T.shape[1])[None])


@functools.partial(jax.jit, donate_argnums=0)
def insert(state: DecodeState, slot: jax.Array, cache: KVCache, row: Rows) -> DecodeState:
    """Put one prompt, read up to its last token, and its request into a slot.

    cache: of one row. row: each value of the slot, with or without an axis for the row.
    """

    def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, new.reshape(1, *buffer.shape[1:]), slot, axis=0)

    return DecodeState(
        cache=state.cache.insert(cache, slot, row.position_B),
        rows=jax.tree.map(put, state.rows, row),
    )


@functools.partial(jax.jit, donate_argnums=0)
def insert_cache(cache: KVCache, number: jax.Array, row: KVCache, columns: jax.Array) -> KVCache:
    """Copy the first `columns` columns of the one row of a cache into row `number` of another."""
    return cache.insert(row, number, columns)


@functools.partial(jax.jit, donate_argnums=0)
def release(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Free a slot."""
    return state.replace(rows=state.rows.replace(left_B=state.rows.left_B.at[slot].set(0)))


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def decode(model: GPT, params: dict, state: DecodeState, steps: jax.Array, burst: int) -> tuple[DecodeState, Drawn]:
    """Draw up to `steps` tokens, at most `burst`, in each slot that has tokens left; end when none has.

    A slot whose next position is past the model's last one waits: see `has_unbounded_positions`.
    """
    model, params = unstack_layers(model, params)
    B, V = state.rows.seen_BV.shape
    A = min(MAX_TOP, V)

    def is_active(rows: Rows) -> jax.Array:
        has_room_B = has_unbounded_positions(model) | (rows.position_B < model.config.block_size)
        return (rows.left_B > 0) & has_room_B

    def step(carry: tuple[jax.Array, DecodeState, Drawn]) -> tuple[jax.Array, DecodeState, Drawn]:
        number, state, drawn = carry
        rows, active_B = state.rows, is_active(state.rows)
        # A slot without a request reads a token at position 0, which nothing reads.
        positions_B = jnp.where(active_B, rows.position_B, 0)
        x_B1D, cache = state.cache.decode(model, params, rows.token_B[:, None], positions_B[:, None])
        logits_BV = apply_model(model, params, x_B1D, method="unembed")[:, 0, :V]
        rows, token_B, stopped_B = _draw(rows, logits_BV, active_B)
        kept_B = active_B & ~stopped_B
        top = _log_probabilities(logits_BV, token_B, jnp.where(active_B, rows.top_B, -1), A)
        drawn = drawn.replace(
            count_B=drawn.count_B + kept_B,
            stopped_B=drawn.stopped_B | (active_B & stopped_B),
            **{
                name: jax.lax.dynamic_update_slice_in_dim(getattr(drawn, name), new[:, None], number, axis=1)
                for name, new in zip(("tokens_BN", *_TOP_FIELDS), (token_B, *top), strict=True)
            },
        )
        return number + 1, DecodeState(cache, rows), drawn

    def is_unfinished(carry: tuple[jax.Array, DecodeState, Drawn]) -> jax.Array:
        return (carry[0] < steps) & is_active(carry[1].rows).any()

    drawn = Drawn(
        tokens_BN=jnp.zeros((B, burst), jnp.int32),
        count_B=jnp.zeros(B, jnp.int32),
        stopped_B=jnp.zeros(B, bool),
        logprobs_BN=jnp.zeros((B, burst)),
        top_ids_BNA=jnp.zeros((B, burst, A), jnp.int32),
        top_logprobs_BNA=jnp.zeros((B, burst, A)),
    )
    return jax.lax.while_loop(is_unfinished, step, (jnp.int32(0), state, drawn))[1:]


_TOP_FIELDS = ("logprobs_BN", "top_ids_BNA", "top_logprobs_BNA")


def _draw(rows: Rows, logits_BV: jax.Array, active_B: jax.Array) -> tuple[Rows, jax.Array, jax.Array]:
    """Draw the next token of the active rows. Return (rows, token_B, stopped_B)."""
    keys_B = jax.vmap(jax.random.fold_in)(rows.keys_B, rows.drawn_B)
    sampling = rows.sampling.where(active_B)
    token_B = sampling.draw(logits_BV, keys_B, rows.seen_BV)
    stopped_B = (token_B[:, None] == rows.stops_BE).any(axis=1)
    V = rows.seen_BV.shape[1]
    marked_B = jnp.where(active_B, token_B, V)  # out of range: dropped
    seen_BV = jax.lax.cond(
        sampling.has_penalty,
        lambda seen_BV: seen_BV.at[jnp.arange(len(token_B)), marked_B].set(True, mode="drop"),
        lambda seen_BV: seen_BV,
        rows.seen_BV,
    )
    rows = rows.replace(
        token_B=jnp.where(active_B, token_B, rows.token_B),
        position_B=rows.position_B + active_B,
        left_B=jnp.where(active_B, jnp.where(stopped_B, 0, rows.left_B - 1), rows.left_B),
        drawn_B=rows.drawn_B + active_B,
        seen_BV=seen_BV,
    )
    return rows, token_B, stopped_B


def _log_probabilities(
    logits_BV: jax.Array, token_B: jax.Array, top_B: jax.Array, A: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (logprob_B, top_ids_BA, top_logprobs_BA), computed only if a row requests them."""
    B = len(token_B)
    no_top = jnp.zeros((B, A), jnp.int32), jnp.zeros((B, A))

    def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
        logprob_BV = jax.nn.log_softmax(logits_BV, axis=-1)
        logprob_B = jnp.take_along_axis(logprob_BV, token_B[:, None], axis=1)[:, 0]

        def find_top() -> tuple[jax.Array, jax.Array]:
            best_BA, ids_BA = jax.lax.top_k(logprob_BV, A)
            return ids_BA, best_BA

        ids_BA, best_BA = jax.lax.cond((top_B > 0).any(), find_top, lambda: no_top)
        return logprob_B, ids_BA, best_BA

    return jax.lax.cond((top_B >= 0).any(), compute, lambda: (jnp.zeros(B), *no_top))


def has_unbounded_positions(model: GPT) -> bool:
    """Return whether the window can slide without end. If not, text past the last position is read anew."""
    return model.config.position in ("rope", "none")
