"""Tokens from a model: prefill and the whole decoding loop in one jitted program.

The program takes texts as they stand and returns them longer, so that streaming is the same program with a nearer
limit, and no step of either goes through Python.
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
from jaxgpt.config.validate import LARGEST_SIZE, check_count
from jaxgpt.model import GPT
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.quantize import unrolled
from jaxgpt.sample.score import score
from jaxgpt.sample.state import (
    BUCKET,
    Texts,
    begin,
    doubled,
    full_B,
    known_vocabulary,
    read,
    read_all,
    restarted,
    slides,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What was written, prompt by prompt, without the prompts and without the stop token.

    logprobs: of each of `tokens`, in nats, by the model itself: before temperature and filters.
    prompt_logprobs: of each token of the prompt after its first, given those before it; the first has nan.
    Both are None unless they were asked for.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]] | None = None
    prompt_logprobs: list[list[float]] | None = None


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

    A prompt's continuation depends on the prompt and the key alone, not on the batch or its place in it: each row
    draws by its own key, made of `key`, the prompt, and how often the same prompt stood before it in the batch.

    Past the context, text goes on. With positions "rope" and "none" the window slides: each token reads itself and
    the block_size - 1 before it, through keys that were computed once, when their tokens were read. With "learned"
    and "sinusoidal" positions, whose table ends, a full text is read anew from its last block_size // 2 tokens at
    positions from 0, and goes on from there.

    stop_tokens: a row ends before the first of these that it draws; the program ends when all rows have.
    logprobs: also return log-probabilities, of generated and prompt tokens.
    vocab_size: ids from it on are never drawn, for models whose vocabulary is padded beyond the tokenizer's.
    cache_dtype: of keys and values; None: the model's dtype. "int8" takes a quarter of float32's memory.
    bucket: prompts take room for `bucket` tokens, or twice that, four times ..., so that another length does not
        compile anew (nor does another max_new_tokens up to the next power of two). More room, fewer compilations;
        but attention passes over it, which in GPT-2 124M costs a quarter of the speed for 256 in place of 64.
    sources: of a model with an encoder, the text that it reads for each prompt, at most block_size ids.
    `sample.weights.for_decoding` gives a faster form of `model` and `params`.
    Raises `UserError` for no prompts, an empty prompt, max_new_tokens below 1, and ids the model does not have; of
    a prompt longer than block_size the end is read, with a warning.
    """
    ((first, texts),) = _written(
        model,
        params,
        prompts,
        key,
        [max_new_tokens],
        sampling=sampling,
        stop_tokens=stop_tokens,
        logprobs=logprobs,
        vocab_size=vocab_size,
        cache_dtype=cache_dtype,
        bucket=bucket,
        sources=sources,
    )
    lengths, tokens_BX = np.asarray(texts.length_B), np.asarray(texts.tokens_BX)
    rows = [slice(first, first + int(length)) for length in lengths]
    out = Generated(tokens=[row[kept].tolist() for row, kept in zip(tokens_BX, rows, strict=True)])
    if not logprobs:
        return out
    logprobs_BX = np.asarray(texts.logprobs_BX)
    of_prompts = score(model, params, [prompt[-model.config.block_size :] for prompt in prompts])
    return dataclasses.replace(
        out,
        logprobs=[row[kept].tolist() for row, kept in zip(logprobs_BX, rows, strict=True)],
        prompt_logprobs=[row.tolist() for row in of_prompts],
    )


def stream(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    vocab_size: int | None = None,
    cache_dtype: Precision | None = None,
    bucket: int = BUCKET,
    every: int = 8,
    sources: Sequence[Sequence[int]] | None = None,
) -> Iterator[list[list[int]]]:
    """`generate`, told as it goes: for each prompt the ids since last time, the first at once, then every `every`.

    Joined, they are what `generate` returns, by the same program. Arguments are checked at the first `next`.
    """
    max_new_tokens, every = check_count("max_new_tokens", max_new_tokens), check_count("every", every)
    told = np.zeros(len(prompts), int)
    for first, texts in _written(
        model,
        params,
        prompts,
        key,
        [*range(1, max_new_tokens, every), max_new_tokens],
        sampling=sampling,
        stop_tokens=stop_tokens,
        vocab_size=vocab_size,
        cache_dtype=cache_dtype,
        bucket=bucket,
        sources=sources,
    ):
        lengths, tokens_BX = np.asarray(texts.length_B), np.asarray(texts.tokens_BX)
        yield [row[first + a : first + b].tolist() for row, a, b in zip(tokens_BX, told, lengths, strict=True)]
        told = lengths


def _written(
    model,
    params,
    prompts,
    key,
    stages,
    *,
    sampling,
    stop_tokens,
    vocab_size,
    cache_dtype,
    bucket,
    sources,
    logprobs=False,
) -> Iterator[tuple[int, Texts]]:
    """(the column of the first new token, the texts) with each number of new tokens in turn, until all have stopped."""
    sampling = sampling or Sampling()
    texts = begin(
        model,
        params,
        prompts,
        key=key,
        max_new_tokens=stages[-1],
        seen=sampling.repetition_penalty is not None,
        logprobs=logprobs,
        cache_dtype=cache_dtype,
        bucket=bucket,
        sources=sources,
    )
    first, stops = int(texts.written), padded_stops(stop_tokens)
    for new in stages:
        texts = advance(model, params, texts, sampling, stops, first + new, known_vocabulary(model, vocab_size))
        yield first, texts
        if np.asarray(texts.stopped_B).all():
            return


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def advance(model, params, texts, sampling, stops, limit, vocab_size) -> Texts:
    """The texts with `limit` columns written, or fewer if all rows have stopped. stops: ids, padded with -1."""
    model, params = unrolled(model, params)
    rows_B = jnp.arange(texts.tokens_BX.shape[0])

    def unfinished(t: Texts):
        return (t.written < limit) & ~t.stopped_B.all()

    def write(t: Texts, x_BD):
        """The token after the last, drawn."""
        logits_B1V: Any = model.apply({"params": params}, x_BD[:, None], method="unembed")
        logits_BV = logits_B1V[:, 0, :vocab_size]
        seen_BV = None if t.seen_BV is None else t.seen_BV[:, :vocab_size]
        token_B = sampling.draw(logits_BV, jax.vmap(jax.random.fold_in)(t.keys_B, t.length_B), seen_BV)
        stopped_B = t.stopped_B | (token_B[:, None] == stops[None]).any(axis=1)
        if t.seen_BV is not None:
            t = t.replace(seen_BV=t.seen_BV.at[rows_B, token_B].set(True))
        if t.logprobs_BX is not None:
            logprobs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
            t = t.replace(logprobs_BX=_column(t.logprobs_BX, logprobs_BV[rows_B, token_B], t.written))
        return t.replace(
            tokens_BX=_column(t.tokens_BX, token_B, t.written),
            length_B=t.length_B + ~stopped_B,
            stopped_B=stopped_B,
            written=t.written + 1,
        )

    def prefill(t: Texts):
        return write(*read_all(model, params, t))

    def decode(t: Texts):
        t, x_BTD = read(model, params, t, 1)
        return write(t, x_BTD[:, 0])

    def decoding(t: Texts):
        return unfinished(t) if slides(model) else unfinished(t) & ~full_B(model, t).any()

    def prefill_and_decode(t: Texts):
        t = t if slides(model) else restarted(model, t, full_B(model, t))
        t = jax.lax.cond(t.written - t.cached > 1, prefill, lambda t: t, t)
        return jax.lax.while_loop(decoding, decode, t)

    return jax.lax.while_loop(unfinished, prefill_and_decode, texts)


def _column(values_BX: jax.Array, value_B: jax.Array, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(values_BX, value_B[:, None].astype(values_BX.dtype), at, axis=1)


def padded_stops(stop_tokens: Sequence[int]) -> np.ndarray:
    """With an id that is never drawn, so that one more stop token rarely compiles anew."""
    stops = np.full(doubled(4, len(stop_tokens)), -1, np.int32)
    stops[: len(stop_tokens)] = [check_count("stop_tokens", i, 0, LARGEST_SIZE) for i in stop_tokens]
    return stops
