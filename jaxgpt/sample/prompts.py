"""Check, cut and pad prompts, and derive a random key for each."""

from __future__ import annotations

import collections
import warnings
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.model import GPT


def check_ids(model: GPT, ids: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Return ids as int32. Raise `UserError` for ids that the model lacks: their embeddings would silently be nan."""
    known = model.config.vocab_size
    assert known is not None, "a model with parameters has one"
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):  # lists of different lengths; integers of hundreds of digits
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


def truncate_prompts(model: GPT, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the last block_size ids of each prompt; warn if that cuts one. Raises as `generate`."""
    window = model.config.block_size
    if not len(prompts):
        raise UserError("no prompts: give at least one list of token ids")
    ids = [check_ids(model, prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
    for number, prompt in enumerate(ids):
        if len(prompt) > window:
            message = f"prompt {number} has {len(prompt)} tokens, block_size={window}: only its last {window} are read"
            warnings.warn(message, stacklevel=5)
        check_prompt(model, prompt[-window:], f"prompt {number}")
    return [prompt[-window:].tolist() for prompt in ids]


def check_sources(model: GPT, sources: Sequence[Sequence[int]] | None, size: int) -> None:
    """Raise `UserError` unless there is a source for each of `size` prompts, or none for a model without an encoder."""
    if model.config.n_encoder_layer and (sources is None or len(sources) != size):
        raise UserError(f"a model with an encoder needs a source for each of {size} prompts, got {len(sources or ())}")
    for number, source in enumerate(sources or [None]):
        pad_source(model, source, model.config.block_size, f"source {number}")


def pad_source(
    model: GPT, source: Sequence[int] | None, columns: int, name: str = "the source"
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (source_1S, segments_1S) of `columns` tokens, or None for a model without an encoder.

    Raises `UserError` for a source that the model cannot read.
    """
    if not model.config.n_encoder_layer:
        if source is not None:
            raise UserError("sources are for a model with an encoder: leave them out, or give a text as its prompt")
        return None
    if source is None:
        raise UserError("a model with an encoder needs a source")
    ids = check_ids(model, source, name)
    if not 1 <= len(ids) <= columns:
        raise UserError(f"{name} has {len(ids)} tokens: needs 1 to {columns}, the context of the model")
    padding = (0, columns - len(ids))
    return np.pad(ids, padding)[None], np.pad(np.ones_like(ids), padding)[None]


def prompt_keys(
    key: jax.Array, prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None
) -> list[jax.Array]:
    """Derive a key from each prompt, its source, and how many equal pairs come before it in the batch."""
    earlier: collections.Counter = collections.Counter()
    words = []
    for source, prompt in zip([()] * len(prompts) if sources is None else sources, prompts, strict=True):
        both = tuple(map(int, source)), tuple(prompt)
        words.append(_words(prompt, source, earlier[both]))
        earlier[both] += 1
    return list(_fold_in_all(key, np.array(words, np.uint32)))


def prompt_key(
    key: jax.Array, prompt: Sequence[int], source: Sequence[int] | None = None, *, earlier: int = 0
) -> jax.Array:
    """Derive one key of `prompt_keys`. earlier: equal pairs before it in the batch."""
    return _fold_in(key, np.array(_words(prompt, source or (), earlier), np.uint32))


def _words(prompt: Sequence[int], source: Sequence[int], earlier: int) -> tuple[int, int]:
    # After a source, negative numbers mark where the prompt goes on: ([1, 2], [3]) and ([1], [2, 3]) have other keys.
    # A prompt alone, and a source with one start token, keep the keys of earlier versions.
    ids = [*source, *prompt[:1], *(-1 - int(i) for i in prompt[1:])] if len(source) else prompt
    return zlib.crc32(np.asarray(ids, np.int32).tobytes()), earlier


@jax.jit
def _fold_in(key: jax.Array, words_2: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, words_2[0]), words_2[1])


@jax.jit
def _fold_in_all(key: jax.Array, words_B2: jax.Array) -> jax.Array:
    return jax.vmap(_fold_in, in_axes=(None, 0))(key, words_B2)
