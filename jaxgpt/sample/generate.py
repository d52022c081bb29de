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
from jaxgpt.model import GPT
from jaxgpt.sample.decoding import BUCKET, Decoding, pad_stop_tokens
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.quantize import unrolled
from jaxgpt.sample.score import score
from jaxgpt.sample.state import Texts, begin, full_B, read, read_all, restarted, slides


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
    `for_decoding` gives a faster form of `model` and `params`.
    Raises `UserError` for no prompts, an empty prompt, max_new_tokens below 1, and ids the model does not have; of
    a prompt longer than block_size the end is read, with a warning.
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
    ((start, texts),) = _decode(model, params, prompts, decoding, key=key, sources=sources)
    ends = start + np.asarray(texts.length_B)

    def completions(values_BX: jax.Array | None) -> list[list]:
        return [row[start:end].tolist() for row, end in zip(np.asarray(values_BX), ends, strict=True)]

    if not logprobs:
        return Generated(tokens=completions(texts.tokens_BX))
    prompt_logprobs = score(model, params, [prompt[-model.config.block_size :] for prompt in prompts])
    return Generated(
        tokens=completions(texts.tokens_BX),
        logprobs=completions(texts.logprobs_BX),
        prompt_logprobs=[row.tolist() for row in prompt_logprobs],
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
    """Continue prompts like `generate`, but yield new ids as they are drawn: the first at once, then every `every`.

    Each item is a list of new ids for each prompt. Joined, they are what `generate` returns, by the same program.
    Arguments are checked at the first `next`.
    """
    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        stop_tokens=stop_tokens,
        vocab_size=vocab_size,
        cache_dtype=cache_dtype,
        bucket=bucket,
        every=every,
    )
    yield from stream_tokens(model, params, prompts, decoding, key=key, sources=sources)


def stream_tokens(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    key: jax.Array,
    sources: Sequence[Sequence[int]] | None = None,
) -> Iterator[list[list[int]]]:
    """Yield the new ids of each prompt as `stream` does, with its options as one value."""
    shown_B = np.zeros(len(prompts), int)
    for start, texts in _decode(model, params, prompts, decoding, key=key, sources=sources):
        length_B, tokens_BX = np.asarray(texts.length_B), np.asarray(texts.tokens_BX)
        yield [row[start + a : start + b].tolist() for row, a, b in zip(tokens_BX, shown_B, length_B, strict=True)]
        shown_B = length_B


def _decode(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    key: jax.Array,
    sources: Sequence[Sequence[int]] | None,
) -> Iterator[tuple[int, Texts]]:
    """Yield (column of the first new token, texts) at each of the limits, until all rows have stopped."""
    texts = begin(model, params, prompts, decoding, key=key, sources=sources)
    start, stops = int(texts.written), pad_stop_tokens(decoding.stop_tokens)
    for limit in decoding.limits:
        texts = advance(model, params, texts, decoding.sampling, stops, start + limit, decoding.known_ids(model))
        yield start, texts
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
