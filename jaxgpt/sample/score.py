"""Log-likelihood of given tokens and texts under a model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config.validate import check_count, short, short_repr
from jaxgpt.data.pipeline import find_window_starts
from jaxgpt.data.tokenizer import Tokenizer, find_start_token
from jaxgpt.errors import UserError
from jaxgpt.loss import log_sum_exp, pick_logprobs
from jaxgpt.model import GPT
from jaxgpt.sample.programs import check_ids, known_ids, next_bucket
from jaxgpt.sample.quantize import apply_model, check_model_type

WINDOWS_AT_ONCE = 8  # windows per batch
LOGITS_AT_ONCE = 256  # positions with logits in memory at once: 50 MB for a vocabulary of 50,000


class LogLikelihood(NamedTuple):
    """Log-likelihood of a continuation, given its context."""

    logprob: float  # nats, summed over its tokens
    is_greedy: bool  # each token is the most probable one: greedy decoding would generate the continuation


class PromptScores(NamedTuple):
    """Log-probabilities of the tokens of a prompt, and of the most probable tokens in their places, in nats."""

    logprobs: list[float]  # nan for the first token, which has no context
    top: list[list[tuple[int, float]]]  # (id, logprob) for each token, best first. The first token has none
    __repr__ = short_repr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Log-likelihood of a text. Without a prefix its first token has no context and is not counted."""

    logprobs: list[float]  # log-probability of each token, in nats, nan for a first token without context
    bits: float  # -log2 of the probability of the counted tokens
    tokens: int  # number of counted tokens
    characters: int  # number of characters that the counted tokens decode to
    __repr__ = short_repr

    @property
    def bits_per_character(self) -> float:
        """Return bits per counted character, nan if there are none."""
        return self.bits / self.characters if self.characters else math.nan


def score(model: GPT, params: dict, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the log-probability in nats of each token given those before it: a float32 array for each list of ids.

    The first token has no context and gets nan. Texts longer than block_size are read in windows that overlap by half, so
    that later tokens have at least block_size // 2 tokens of context. Raises `UserError` for ids that the model lacks.
    """
    return [logprobs for logprobs, *_ in _score_windows(model, params, texts, [1] * len(texts), WINDOWS_AT_ONCE)]


def score_prompt(
    model: GPT, params: dict, ids: Sequence[int], *, top: int, vocab_size: int | None = None
) -> PromptScores:
    """Return the log-probability of each token of a prompt, and of the `top` most probable tokens in its place.

    These are below `vocab_size`. There is one program for each of `prompt_widths`, so that all can be compiled in
    advance. Windows and errors: see `score`.
    """
    known = known_ids(model, vocab_size)
    ((logprobs, _, best_TK, top_TK),) = _score_windows(model, params, [ids], [1], 1, min(top, known), known)
    return PromptScores(logprobs.tolist(), [[], *pair_up(best_TK, top_TK)[1:]][: len(ids)])


def pair_up(ids_TK: np.ndarray, logprobs_TK: np.ndarray) -> list[list[tuple[int, float]]]:
    """Return pairs of an id and its log-probability, a list of them for each token."""
    return [list(zip(*pair, strict=True)) for pair in zip(ids_TK.tolist(), logprobs_TK.tolist(), strict=True)]


def prompt_widths(model: GPT) -> list[int]:
    """Return the numbers of tokens that `score_prompt` pads a prompt to."""
    block_size = model.config.block_size
    return sorted({min(next_bucket(64, width), block_size) for width in range(64, block_size + 64, 64)})


def score_texts(model: GPT, params: dict, tokenizer: Tokenizer, texts: Sequence[str]) -> list[Score]:
    """Return the score of each text, after the prefix that the tokenizer puts before texts."""
    if isinstance(texts, str):
        raise UserError(f"texts={short(texts)}: needs a list of texts")
    prefix, ids = tokenizer.prefix, [tokenizer.encode(text).tolist() for text in texts]
    uncounted, scores = 0 if prefix else 1, []  # a first token without context
    for text, row, found in zip(texts, ids, score(model, params, [[*prefix, *row] for row in ids]), strict=True):
        logprobs = found[len(prefix) :]
        counted = logprobs[uncounted:]
        bits = -float(np.sum(counted, dtype=np.float64)) / math.log(2)
        characters = max(len(text) - len(tokenizer.decode(row[:uncounted])), 0)
        scores.append(Score(logprobs=logprobs.tolist(), bits=bits, tokens=len(counted), characters=characters))
    return scores


def loglikelihood(
    model: GPT, params: dict, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, batch_size: int = WINDOWS_AT_ONCE
) -> list[LogLikelihood]:
    """Return the log-likelihood of the continuation in each pair of ids (context, continuation).

    The context is cut from the left so that both have at most block_size + 1 ids. A continuation of more than
    block_size ids is read in windows, as by `score`. `batch_size` is the number of windows read together. Raises
    `UserError` for an empty context, and for ids that the model does not have.
    """
    limits = [max(model.config.block_size, len(new)) + 1 for _, new in pairs]
    texts = [[*context, *new][-limit:] for (context, new), limit in zip(pairs, limits, strict=True)]
    firsts = [len(text) - len(new) for text, (_, new) in zip(texts, pairs, strict=True)]
    if 0 in firsts:
        raise UserError(f"pair {firsts.index(0)} has an empty context: put a start token there")
    results = _score_windows(model, params, texts, firsts, batch_size)
    return [
        LogLikelihood(float(np.sum(logprobs[first:], dtype=np.float64)), bool(is_greedy[first:].all()))
        for (logprobs, is_greedy, *_), first in zip(results, firsts, strict=True)
    ]


def pair_ids(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the ids of a context and its continuation, as `loglikelihood` takes them.

    They are encoded as one text and split after the context. Spaces at its end move to the continuation, as most tokenizers
    join a space to the next word. With an empty context the continuation follows the start token. `UserError` if it has none.
    """
    context, spaces = context.rstrip(), context[len(context.rstrip()) :]
    both = tokenizer.encode(context + spaces + continuation).tolist()
    first = tokenizer.encode(context).tolist()
    if len(both) <= len(first):
        raise UserError(f"{continuation[:40]!r} adds no token to the context before it: it needs at least one")
    return [*tokenizer.prefix, *first] or [find_start_token(tokenizer)[0]], both[len(first) :]


def _score_windows(
    model: GPT,
    params: dict,
    texts: Sequence[Sequence[int]],
    firsts: Sequence[int],
    batch_size: int,
    top: int = 0,
    vocab_size: int | None = None,
) -> list[list[np.ndarray]]:
    """Return the results of `_logprobs` for the tokens of each text from its `first` on. Before it they are nan, False and 0."""
    check_model_type(model)
    block_size, batch_size = model.config.block_size, check_count("batch_size", batch_size)
    stride = max(block_size // 2, 1)
    results, windows = [], []
    for number, (text, first) in enumerate(zip(texts, firsts, strict=True)):
        ids = check_ids(model, text, f"text {number}")
        T, targets = len(ids), len(ids) - 1
        best = np.zeros((T, top), int), np.zeros((T, top), np.float32)
        results.append([np.full(T, np.nan, np.float32), np.zeros(T, bool), *best])
        for start in find_window_starts(targets, block_size=block_size, stride=stride):
            new = max(start + block_size - stride if start else 0, first - 1)  # the first input that is scored
            windows.append((min(block_size, targets - start), number, start, new, ids))
    windows.sort(key=lambda window: window[:3])  # a batch is as wide as its longest window
    for at in range(0, len(windows), batch_size):
        batch = windows[at : at + batch_size]
        T = min(block_size, next_bucket(64, batch[-1][0]))  # few widths, few compilations
        arrays = inputs_BT, targets_BT, wanted_BT = np.zeros((3, batch_size, T), np.int32)
        for row, (length, _, start, new, ids) in enumerate(batch):
            tokens = ids[start : start + length + 1]
            inputs_BT[row, :length], targets_BT[row, :length] = tokens[:-1], tokens[1:]
            wanted_BT[row, new - start : length] = 1
        scores = jax.device_get(_logprobs(model, params, *arrays, top, vocab_size))
        for row, (length, number, start, new, _) in enumerate(batch):
            for result, score_BT in zip(results[number], scores, strict=True):
                result[new + 1 : start + length + 1] = score_BT[row, new - start : length]
    return results


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _logprobs(model, params, inputs_BT, targets_BT, wanted_BT, top=0, vocab_size=None) -> tuple[jax.Array, ...]:
    """Return (logprobs_BT, is_greedy_BT) of the wanted targets, and (ids_BTK, logprobs_BTK) of the `top` best ids.

    Logits are computed for these only: few, for a short continuation of a long context.
    """
    x_BTD = apply_model(model, params, inputs_BT, method="hidden_states")
    B, T, D = x_BTD.shape
    M, R = B * T, min(LOGITS_AT_ONCE, B * T)
    x_MD, targets_M = x_BTD.reshape(M, D), targets_BT.reshape(M)
    # Padded with M, an index out of range: gathers clip it, and scatters drop it.
    wanted = jnp.flatnonzero(wanted_BT, size=M + -M % R, fill_value=M)

    def score_rows(number: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at_R = jax.lax.dynamic_slice_in_dim(wanted, number * R, R)
        targets_R = targets_M.at[at_R].get(mode="clip")
        logits_RV = apply_model(model, params, x_MD.at[at_R].get(mode="clip")[None], method="unembed")[0]
        log_sum_R = log_sum_exp(logits_RV)
        best_RK, ids_RK = jax.lax.top_k(logits_RV[:, :vocab_size], top)
        is_greedy_R = logits_RV.argmax(axis=1) == targets_R
        found = pick_logprobs(logits_RV, targets_R, log_sum_R), is_greedy_R, ids_RK, best_RK - log_sum_R[:, None]
        return tuple(x.at[at_R].set(new, mode="drop") for x, new in zip(results, found, strict=True))

    best = jnp.zeros((M, top), jnp.int32), jnp.zeros((M, top), jnp.float32)
    empty = jnp.full(M, jnp.nan, jnp.float32), jnp.zeros(M, bool), *best
    results = jax.lax.fori_loop(0, -(-wanted_BT.sum() // R), score_rows, empty)
    return tuple(x.reshape(B, T, *x.shape[1:]) for x in results)
