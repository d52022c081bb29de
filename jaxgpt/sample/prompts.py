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
from jaxgpt.sample.decoding import next_bucket


def check_ids(model: GPT, ids: Sequence[int], name: str) -> np.ndarray:
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


def truncate_prompts(model: GPT, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the last block_size ids of each prompt; warn if that cuts one. Raises as `generate`."""
    window = model.config.block_size
    if not len(prompts):
        raise UserError("no prompts: give at least one list of token ids")
    ids = [check_ids(model, prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
    for number, prompt in enumerate(ids):
        if not len(prompt):
            raise UserError(f"prompt {number} is empty: start it from a token, such as the end-of-text or a newline")
        if len(prompt) > window:
            message = f"prompt {number} has {len(prompt)} tokens, block_size={window}: only its last {window} are read"
            warnings.warn(message, stacklevel=5)
    return [prompt[-window:].tolist() for prompt in ids]


def pad_sources(model: GPT, sources: Sequence[Sequence[int]] | None, size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Pad the sources of `size` prompts to one of few lengths: (source_BS, segments_BS), or None without an encoder."""
    window = model.config.block_size
    if not model.config.n_encoder_layer:
        if sources is not None:
            raise UserError("sources are for a model with an encoder: leave them out, or give a text as its prompt")
        return None
    if sources is None or len(sources) != size:
        raise UserError(f"a model with an encoder needs a source for each of {size} prompts, got {len(sources or ())}")
    ids = [check_ids(model, source, f"source {number}") for number, source in enumerate(sources)]
    for number, source in enumerate(ids):
        if not 1 <= len(source) <= window:
            raise UserError(f"source {number} has {len(source)} tokens: needs 1 to {window}, the context of the model")
    S = min(next_bucket(16, max(map(len, ids))), window)
    source_BS, segments_BS = np.zeros((size, S), np.int32), np.zeros((size, S), np.int32)
    for row, source in enumerate(ids):
        source_BS[row, : len(source)], segments_BS[row, : len(source)] = source, 1
    return source_BS, segments_BS


def prompt_keys(
    key: jax.Array, prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None
) -> jax.Array:
    """Derive keys_B from each prompt, its source, and how many equal pairs come before it in the batch."""
    earlier: collections.Counter = collections.Counter()
    words = []
    for source, prompt in zip([()] * len(prompts) if sources is None else sources, prompts, strict=True):
        both = tuple(map(int, source)), tuple(prompt)
        hashed = zlib.crc32(np.asarray([*source, *prompt], np.int32).tobytes())
        words.append((hashed, earlier[both]))
        earlier[both] += 1
    return _fold_in(key, np.array(words, np.uint32))


@jax.jit
def _fold_in(key: jax.Array, words_B2: jax.Array) -> jax.Array:
    return jax.vmap(lambda words: jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1]))(words_B2)
