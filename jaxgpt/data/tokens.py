"""Token ids in one or more files, and the dataset of a run: its training and validation splits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.data.chat.conversations import Conversations
from jaxgpt.data.pipeline import RowReader, pick_evenly, shuffle_epochs
from jaxgpt.data.tokenizer import Tokenizer


class Tokens:
    """A sequence of token ids in one or more memory-mapped files: only the windows in use are in memory."""

    def __init__(self, shards: list[np.ndarray]):
        """Concatenate shards: 1-D arrays of any integer dtype."""
        self._shards = shards
        self._ends = np.cumsum([len(s) for s in shards])

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Return `length` ids from `start` on, int32, across shards if necessary."""
        assert start >= 0 and start + length <= len(self), (start, length, len(self))
        shard = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[shard - 1]) if shard else 0
        parts = []
        while length:
            part = self._shards[shard][start : start + length]
            parts.append(part)
            length -= len(part)
            shard, start = shard + 1, 0
        return np.concatenate(parts).astype(np.int32)

    def training_rows(self, *, block_size: int, seed: int) -> RowReader:
        """Return the reader of (inputs_T, targets_T): see `pipeline.Split`.

        Each epoch cuts the tokens into adjacent windows and visits each once. The start of the first window is drawn
        for each epoch, so the cuts differ between epochs. Fewer than `2 * block_size` tokens are left over at the two
        ends; they are skipped in that epoch.
        """
        windows = count_windows(len(self), block_size)
        order = shuffle_epochs(windows, seed)
        most = min(len(self) - 1 - windows * block_size, block_size - 1)  # at least 0

        @functools.lru_cache(maxsize=16)  # drawn once per epoch, not per window
        def offset(epoch: int) -> int:
            return int(np.random.default_rng([seed, epoch]).integers(most + 1))

        def row(n: int) -> tuple[np.ndarray, np.ndarray]:
            window = self.read(offset(n // windows) + order[n] * block_size, block_size + 1)
            return window[:-1], window[1:]

        return row

    def validation_rows(
        self, *, block_size: int, stride: int, max_tokens: int | None, prefix_length: int
    ) -> tuple[int, RowReader]:
        """Return (number of rows, reader of (inputs_T, targets_T, mask_T)): see `pipeline.Split`."""
        n_targets = len(self) - 1
        starts: Sequence[int] = find_window_starts(n_targets, block_size=block_size, stride=stride)
        if max_tokens is not None and max_tokens < n_targets:
            starts = pick_evenly(starts, max_tokens // stride)

        def row(n: int) -> tuple[np.ndarray, ...]:
            inputs, targets = np.zeros(block_size, np.int32), np.zeros(block_size, np.int32)
            mask = np.zeros(block_size, bool)
            if n < len(starts):
                start = starts[n]
                length = min(block_size, n_targets - start)
                window = self.read(start, length + 1)
                inputs[:length], targets[:length] = window[:-1], window[1:]
                mask[max(block_size - stride if start else 0, prefix_length - 1 - start) : length] = True
            return inputs, targets, mask

        return len(starts), row


def count_windows(n_tokens: int, block_size: int) -> int:
    """Count the windows of block_size + 1 tokens, each sharing one with the next, that fit at any offset."""
    assert n_tokens > block_size
    return max(1, n_tokens // block_size - 1)


def find_window_starts(targets: int, *, block_size: int, stride: int) -> range:
    """Return the starts of windows, `stride` apart, that together cover every target: input i has target i + 1.

    A window scores the inputs that no earlier one scored: the first window all, the others from input
    `block_size - stride` on.
    """
    assert 1 <= stride <= block_size, (stride, block_size)
    return range(0, max(targets - (block_size - stride), min(targets, 1)), stride)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The two splits, their tokenizer, and a fingerprint: runs with the same one are comparable."""

    train: Tokens | Conversations
    val: Tokens | Conversations
    tokenizer: Tokenizer
    val_characters: int | None = None  # for bits per character; None if the text is unknown
    val_bytes: int | None = None  # of the same text in UTF-8, for bits per byte
    fingerprint: dict[
        str, Any
    ]  # token counts of both splits; SHA-256 of both (for shards: of each file) and of the tokenizer
    # entries of tokenizer_config.json for the chat template; {} if the tokenizer implies it, None without conversations
    tokenizer_config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()  # lines to print before training
