"""Generate tokens: prefill and the complete decoding loop in one jitted program.

The program takes a `DecodeState` and returns it with more tokens, up to a limit. Streaming calls the same program with
nearer limits; no single token goes through Python.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Precision
from jaxgpt.model import GPT
from jaxgpt.sample.decoding import BUCKET, Decoding, pad_stop_tokens
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.sample.score import score
from jaxgpt.sample.state import (
    DecodeState,
    init_state,
    is_full_B,
    prefill,
    prefill_chunk,
    recompute_window,
    write_column,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """The completion of each prompt, without the prompt and without the stop token.

    Log-probabilities are in nats, from the logits before temperature and filters; None unless they were requested.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]] | None = None  # of each of `tokens`
    prompt_logprobs: list[list[float]] | None = None  # of each token of the prompt; nan for the first


def generate(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    logprobs: bool = False,
    vocab_size: int | None = None,
    cache_dtype: Precision | None = None,
    bucket: int = BUCKET,
    sources: Sequence[Sequence[int]] | None = None,
) -> Generated:
    """Continue each prompt, a list of ids of any length, by up to `max_new_tokens` ids.

    Past the context, positions "rope" and "none" let the window slide: each token attends to itself and the
    block_size - 1 before it, and keys and values are computed once. "learned" and "sinusoidal" positions have a last
    one: a full window is recomputed from its last block_size // 2 tokens at positions from 0.

    Args:
        model: a GPT or an encoder-decoder. `for_decoding` gives a faster form of it and `params`.
        params: its parameters.
        prompts: lists of ids, none empty, else `UserError`. Beyond block_size only the end is read, with a warning.
        key: of all draws. Each row derives its own from it, the prompt, and how many equal prompts come before it in
            the batch, so that a completion does not depend on other prompts.
        max_new_tokens: at least 1.
        sampling: filters of the logits. None means the model's own distribution.
        stop_tokens: a row ends before the first of these that it draws; the program ends when all rows have.
        logprobs: also return log-probabilities of generated and prompt tokens.
        vocab_size: ids from it on are never drawn, for a vocabulary padded beyond the tokenizer's. None means all.
        cache_dtype: of keys and values. None means the model's dtype. "int8" takes a quarter of float32's memory.
        bucket: prompts are padded to `bucket` tokens, or twice that, four times ..., so that other lengths rarely
            recompile. Attention reads the padding: 256 instead of 64 costs GPT-2 124M a quarter of its speed.
        sources: for a model with an encoder, the ids that it reads for each prompt, at most block_size.
    """
    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        stop_tokens=stop_tokens,
        logprobs=logprobs,
        vocab_size=vocab_size,
        cache_dtype=cache_dtype,
        bucket=bucket,
    )
    ((start, state),) = _decode(model, params, prompts, decoding, key=key, every=None, sources=sources)
    ends = start + np.asarray(state.length_B)

    def completions(values_BX: jax.Array | None) -> list[list]:
        return [row[start:end].tolist() for row, end in zip(np.asarray(values_BX), ends, strict=True)]

    if not logprobs:
        return Generated(tokens=completions(state.tokens_BX))
    prompt_logprobs = score(model, params, [prompt[-model.config.block_size :] for prompt in prompts])
    return Generated(
        tokens=completions(state.tokens_BX),
        logprobs=completions(state.logprobs_BX),
        prompt_logprobs=[row.tolist() for row in prompt_logprobs],
    )


def stream(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    key: jax.Array,
    every: int | None = 8,
    sources: Sequence[Sequence[int]] | None = None,
) -> Iterator[list[list[int]]]:
    """Continue prompts like `generate`, by the same compiled program, but yield new ids as they are drawn.

    Each item is a list of new ids for each prompt; joined, they are what `generate` returns. `every` is the number of
    tokens between two items; the first has one token. None means one item, at the end. Other arguments: see `generate`;
    they are checked at the first `next`.
    """
    shown_B = np.zeros(len(prompts), int)
    for start, state in _decode(model, params, prompts, decoding, key=key, every=every, sources=sources):
        length_B, tokens_BX = np.asarray(state.length_B), np.asarray(state.tokens_BX)
        yield [row[start + a : start + b].tolist() for row, a, b in zip(tokens_BX, shown_B, length_B, strict=True)]
        shown_B = length_B


def _decode(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    key: jax.Array,
    every: int | None,
    sources: Sequence[Sequence[int]] | None,
) -> Iterator[tuple[int, DecodeState]]:
    """Yield (column of the first new token, state) at each of `decoding.limits(every)`, until all rows have stopped."""
    state = init_state(model, params, prompts, decoding, key=key, sources=sources)
    start, stops = int(state.cursor), pad_stop_tokens(decoding.stop_tokens)
    for limit in decoding.limits(every):
        state = advance(model, params, state, decoding.sampling, stops, start + limit, decoding.known_ids(model))
        yield start, state
        if np.asarray(state.stopped_B).all():
            return


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def advance(model, params, state, sampling, stops, limit, vocab_size) -> DecodeState:
    """Generate up to column `limit`, or until all rows have stopped. stops: ids, padded with -1."""
    model, params = unstack_layers(model, params)
    rows_B = jnp.arange(state.tokens_BX.shape[0])

    def is_unfinished(state: DecodeState):
        return (state.cursor < limit) & ~state.stopped_B.all()

    def draw_next(state: DecodeState, x_BD: jax.Array) -> DecodeState:
        logits_B1V: Any = model.apply({"params": params}, x_BD[:, None], method="unembed")
        logits_BV = logits_B1V[:, 0, :vocab_size]
        keys_B = jax.vmap(jax.random.fold_in)(state.keys_B, state.length_B)
        token_B = sampling.draw(logits_BV, keys_B, state.seen_ids(vocab_size))
        stopped_B = state.stopped_B | jnp.isin(token_B, stops)
        if state.seen_BV is not None:
            state = state.replace(seen_BV=state.seen_BV.at[rows_B, token_B].set(True))
        if state.logprobs_BX is not None:
            logprob_B = jax.nn.log_softmax(logits_BV, axis=-1)[rows_B, token_B]
            state = state.replace(logprobs_BX=write_column(state.logprobs_BX, logprob_B, state.cursor))
        return state.append(token_B).replace(length_B=state.length_B + ~stopped_B, stopped_B=stopped_B)

    def decode(state: DecodeState) -> DecodeState:
        state, x_BTD = prefill_chunk(model, params, state, 1)
        return draw_next(state, x_BTD[:, 0])

    def is_decoding(state: DecodeState):
        return is_unfinished(state) & ~is_full_B(model, state).any()

    def prefill_and_decode(state: DecodeState) -> DecodeState:
        state = recompute_window(model, state)
        is_behind = state.cursor - state.cache_cursor > 1
        state = jax.lax.cond(is_behind, lambda s: draw_next(*prefill(model, params, s)), lambda s: s, state)
        return jax.lax.while_loop(is_decoding, decode, state)

    return jax.lax.while_loop(is_unfinished, prefill_and_decode, state)
