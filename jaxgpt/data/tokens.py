"""Token ids over several files, and the two splits of them that a run trains and validates on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxgpt.data.chat.conversations import Conversations
from jaxgpt.data.tokenizer import Tokenizer


class Tokens:
    """A sequence of token ids over one or more memory-mapped files: only what is read is in memory."""

    def __init__(self, shards: list[np.ndarray]):
        self._shards = shards
        self._ends = np.cumsum([len(s) for s in shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """`length` ids from `start` on, int32; windows cross from one shard to the next."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The two splits, the tokenizer they are written in, and what makes two runs comparable."""

    train: Tokens | Conversations
    val: Tokens | Conversations
    tokenizer: Tokenizer
    val_characters: int | None = None  # for bits per character; None where the text is not known
    val_bytes: int | None = None  # of the same text in UTF-8, for bits per byte
    fingerprint: dict  # tokens of both splits; SHA-256 of both or, of .bin shards, of each file; and of the tokenizer
    # the chat template of conversations, as tokenizer_config.json has it; empty: it follows from the tokenizer; None: these
    # are no conversations
    tokenizer_config: dict[str, Any] | None = None
    said: tuple[str, ...] = ()  # what the user should know about it
