"""Continue a batch of prompts with the engine: all at once, or as a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from jaxgpt.config import Precision
from jaxgpt.config.validate import check_count
from jaxgpt.model import GPT
from jaxgpt.sample.decoding import BUCKET, Decoding, next_bucket
from jaxgpt.sample.engine import BURST, Engine, Piece, Request
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.prefill import cache_columns
from jaxgpt.sample.prompts import check_sources, prompt_keys, truncate_prompts
from jaxgpt.sample.score import score


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
    slots: int | None = None,
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
        key: of all draws. Each prompt has its own, derived from it and from how many equal prompts come before it.
        max_new_tokens: at least 1.
        sampling: filters of the logits. None means the model's own distribution.
        stop_tokens: a row ends before the first of these that it draws.
        logprobs: also return log-probabilities of generated and prompt tokens.
        vocab_size: ids from it on are never drawn, for a vocabulary padded beyond the tokenizer's. None means all.
        cache_dtype: of keys and values. None means the model's dtype. "int8" takes a quarter of float32's memory.
        bucket: the cache has room for `bucket` tokens, or twice that, or four times: other lengths rarely recompile.
        slots: prompts that are decoded together; None means all. Another number may round a logit differently.
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
        slots=slots,
    )
    rows: list[list[Piece]] = [[] for _ in prompts]
    for pieces in _decode(model, params, prompts, decoding, key=key, every=None, sources=sources):
        for row, piece in pieces:
            rows[row].append(piece)
    tokens = [[token for piece in row for token in piece.tokens] for row in rows]
    if not logprobs:
        return Generated(tokens=tokens)
    read = [prompt[-model.config.block_size :] for prompt in prompts]
    return Generated(
        tokens=tokens,
        logprobs=[[logprob for piece in row for logprob in piece.logprobs] for row in rows],
        prompt_logprobs=[row.tolist() for row in score(model, params, read)],
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
    """Continue prompts like `generate`, by the same compiled programs, but yield new ids as they are drawn.

    Each item is a list of new ids for each prompt; joined, they are what `generate` returns. `every` is the most tokens
    of an item in each list; the first has one. None means one item, at the end. Other arguments: see `generate`; they
    are checked at the first `next`.
    """
    new: list[list[int]] = [[] for _ in prompts]
    for pieces in _decode(model, params, prompts, decoding, key=key, every=every, sources=sources):
        for row, piece in pieces:
            new[row] += piece.tokens
        if every is not None:
            yield new
            new = [[] for _ in prompts]
    if every is None:
        yield new


def _decode(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    key: jax.Array,
    every: int | None,
    sources: Sequence[Sequence[int]] | None,
) -> Iterator[list[tuple[int, Piece]]]:
    """Yield the new tokens of each burst, of at most `every` tokens, with the number of their prompt."""
    every = BURST if every is None else check_count("every", every)
    ids = truncate_prompts(model, prompts)
    check_sources(model, sources, len(ids))
    longest_source = max(map(len, sources)) if sources is not None else 1
    engine = Engine(
        model,
        params,
        slots=len(ids) if decoding.slots is None else decoding.slots,
        vocab_size=decoding.vocab_size,
        cache_dtype=decoding.cache_dtype,
        columns=cache_columns(model, next_bucket(decoding.bucket, max(map(len, ids)) + decoding.max_new_tokens)),
        source_columns=min(next_bucket(16, longest_source), model.config.block_size),
        max_stops=next_bucket(4, len(decoding.stop_tokens)),
        slides=True,
    )
    keys, waiting, running = prompt_keys(key, ids, sources), list(range(len(ids)))[::-1], {}
    burst = 1
    while waiting or running:
        while waiting and engine.num_free:
            row = waiting.pop()
            request = Request(
                prompt=ids[row],
                key=keys[row],
                max_new_tokens=decoding.max_new_tokens,
                sampling=decoding.sampling,
                stop_tokens=decoding.stop_tokens,
                top_logprobs=0 if decoding.logprobs else None,
                source=None if sources is None else sources[row],
            )
            running[engine.submit(request)] = row
        engine.finish_reading()
        pieces = engine.decode(burst)
        yield [(running[piece.slot], piece) for piece in pieces]
        for piece in pieces:
            if piece.finish is not None:
                del running[piece.slot]
        burst = every
