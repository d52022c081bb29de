"""Pairs of texts, of which the second is to be written from the first: files of them, and their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxgpt.config.validate import short
from jaxgpt.data.chat.conversations import LONGEST_LINE, Conversations
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import read_lines

# A line of the file is also how a pair is written in tokens: what stands between the two begins the second, and the
# end of the line ends it.
START, END = "\t", "\n"


def read_pairs(path: str | Path) -> Iterator[tuple[str, str, str]]:
    """("FILE:LINE", source, target) of every line of a .tsv file; empty lines are none.

    Raises `UserError`, which names file and line, for what is no pair.
    """
    for where, raw in read_lines(path, LONGEST_LINE, "cut the pair"):
        try:
            line = raw.decode().rstrip("\r\n")
        except UnicodeDecodeError as e:
            raise UserError(f"{where} is not UTF-8 text: byte 0x{raw[e.start]:02x}: save it as UTF-8") from None
        fields = line.split(START)
        if len(fields) != 2 or not all(fields):
            raise UserError(f"{where}: got {short(line)}, needs two texts with one tab between them")
        yield where, fields[0], fields[1]


def encode_pairs(
    path: str | Path, tokenizer: Tokenizer, *, prefixed: bool = True
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, which of them are to be written) of every pair: source, START, target, END.

    prefixed: whether a source begins with the tokens that the tokenizer begins texts with.
    """
    prefix = np.array(tokenizer.prefix if prefixed else (), np.int32)
    start, end = start_ids(tokenizer), tokenizer.encode(END)
    for where, source, target in read_pairs(path):
        try:
            before = np.concatenate([prefix, tokenizer.encode(source), start])
            after = np.concatenate([tokenizer.encode(target), end])
        except UserError as e:
            raise UserError(f"{where}: {e}") from None
        ids = np.concatenate([before, after])
        yield ids, np.arange(len(ids)) >= len(before)


def pair_prompt(prompt: str, tokenizer: Tokenizer, *, prefixed: bool = True) -> tuple[list[int], list[int]]:
    """Return (source, what its target begins with) as `encode_pairs` has them.

    A prompt is a source; after a START in it stands how the target begins. Raises `UserError` for an empty source.
    """
    source, _, target = prompt.partition(START)
    if not source:
        raise UserError("the prompt is empty: give a text to read with --prompt TEXT")
    prefix = tokenizer.prefix if prefixed else ()
    begun = [*start_ids(tokenizer).tolist(), *tokenizer.encode(target).tolist()]
    return [*prefix, *tokenizer.encode(source).tolist()], begun


def start_ids(tokenizer: Tokenizer) -> np.ndarray:
    """The token with which a target begins. Raises `UserError` where that is no single token."""
    for name, text in (("tab", START), ("end of line", END)):
        if len(tokenizer.encode(text)) != 1:
            raise UserError(
                f"this tokenizer has no single token for a {name}, which pairs need: take char, byte or bpe"
            )
    return tokenizer.encode(START)


class Pairs(Conversations):
    """Pairs for a model with an encoder: sources and targets lie apart, each of at most `block_size` tokens.

    What is longer is left out.
    """

    def __init__(self, ids: np.ndarray, answers: np.ndarray, ends: np.ndarray, block_size: int):
        self._ids, self._answers, self.block_size = ids, answers, block_size
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        lengths = (ends - starts).astype(np.int64)
        written = np.add.reduceat(answers, starts, dtype=np.int64)  # of the target, with its END
        sizes = np.maximum(lengths - written - 1, written)
        kept = sizes <= block_size
        self.left_out, self.shortened = int((~kept).sum()), 0
        self.starts, self.lengths, self.sizes = starts[kept], lengths[kept], sizes[kept]

    def row(self, members: np.ndarray) -> tuple[np.ndarray, ...]:
        """(inputs_T, targets_T, mask_T, segments_T, source_S, source_segments_S) with S = T = block_size."""
        inputs, targets, segments, source, source_segments = (np.zeros(self.block_size, np.int32) for _ in range(5))
        mask, at, read = np.zeros(self.block_size, bool), 0, 0
        for number, member in enumerate(members, 1):
            before, after = self.split(member)
            here, there = slice(at, at + len(after) - 1), slice(read, read + len(before))
            inputs[here], targets[here], mask[here], segments[here] = after[:-1], after[1:], True, number
            source[there], source_segments[there] = before, number
            at, read = at + len(after) - 1, read + len(before)
        return inputs, targets, mask, segments, source, source_segments

    def split(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, START target END) of one pair."""
        ids, answers = self.read(number)
        start = int(np.argmax(answers)) - 1
        return ids[:start], ids[start:]


def in_memory(
    encoded: Iterable[tuple[np.ndarray, np.ndarray]], block_size: int, *, encoder: bool = False
) -> Conversations:
    """Documents that are not in the cache. encoder: pairs, whose sources and targets lie apart."""
    ids, answers = zip(*encoded, strict=True)
    ends = np.cumsum([len(x) for x in ids])
    return (Pairs if encoder else Conversations)(np.concatenate(ids), np.concatenate(answers), ends, block_size)
