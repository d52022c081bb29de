"""Pairs of a source and a target text: read, encoded, and packed for a model with an encoder.

The built-in ones are Spanish number words and digits: a translation task in which every word matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxgpt.config.validate import short
from jaxgpt.data.conversations import LONGEST_LINE, Conversations
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import read_lines

# A pair is encoded as a line of its file: the tab begins the target, the end of the line ends it.
TARGET_START, TARGET_END = "\t", "\n"

COUNT = 200_000  # numbers, each in both directions

_SMALL = (
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis diecisiete "
    "dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro veinticinco veintiséis veintisiete "
    "veintiocho veintinueve"
).split()
_TENS = "treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()
_HUNDREDS = (
    "ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos ochocientos novecientos".split()
)


def read_pairs(path: str | Path) -> Iterator[tuple[str, str, str]]:
    """Yield ("FILE:LINE", source, target) for the lines of a .tsv file that are not blank.

    Raises `UserError`, with file and line, for a line that is not a pair.
    """
    for where, raw in read_lines(path, LONGEST_LINE, "cut the pair"):
        try:
            line = raw.decode().rstrip("\r\n")
        except UnicodeDecodeError as e:
            raise UserError(f"{where} is not UTF-8 text: byte 0x{raw[e.start]:02x}: save it as UTF-8") from None
        fields = line.split(TARGET_START)
        if len(fields) != 2 or not all(fields):
            raise UserError(f"{where}: got {short(line)}, needs two texts with one tab between them")
        yield where, fields[0], fields[1]


def encode_pairs(path: str | Path, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, mask) of each pair, encoded as source, TARGET_START, target, TARGET_END.

    The tokenizer's prefix goes before each source. The mask is True for the tokens to generate, target and TARGET_END.
    """
    prefix = np.array(tokenizer.prefix, np.int32)
    start, end = encode_target_start(tokenizer), tokenizer.encode(TARGET_END)
    for where, source, target in read_pairs(path):
        try:
            before = np.concatenate([prefix, tokenizer.encode(source), start])
            after = np.concatenate([tokenizer.encode(target), end])
        except UserError as e:
            raise UserError(f"{where}: {e}") from None
        ids = np.concatenate([before, after])
        yield ids, np.arange(len(ids)) >= len(before)


def encode_pair_prompt(prompt: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return (ids of the source, ids that begin its target), encoded as by `encode_pairs`.

    A prompt is a source, or a source, TARGET_START and the beginning of a target. Raises `UserError` if the source is
    empty.
    """
    source, _, target = prompt.partition(TARGET_START)
    if not source:
        raise UserError("the prompt is empty: give a text to read with --prompt TEXT")
    begun = [*encode_target_start(tokenizer).tolist(), *tokenizer.encode(target).tolist()]
    return [*tokenizer.prefix, *tokenizer.encode(source).tolist()], begun


def encode_target_start(tokenizer: Tokenizer) -> np.ndarray:
    """Return the id of TARGET_START, shape [1]. Raises `UserError` unless it and TARGET_END are single tokens."""
    for name, text in (("tab", TARGET_START), ("end of line", TARGET_END)):
        if len(tokenizer.encode(text)) != 1:
            raise UserError(
                f"this tokenizer has no single token for a {name}, which pairs need: take char, byte or bpe"
            )
    return tokenizer.encode(TARGET_START)


class Pairs(Conversations):
    """Pairs for a model with an encoder: sources and targets in separate arrays.

    A pair is left out if its source, or its target with TARGET_END, has more than `block_size` tokens.
    """

    def _fit(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens to read of each pair, tokens of the longer of its source and target)."""
        written = np.add.reduceat(self._answers, starts, dtype=np.int64)  # tokens of each target and its TARGET_END
        return lengths, np.maximum(lengths - written - 1, written)

    def row(self, members: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return (inputs_T, targets_T, mask_T, segments_T, source_S, source_segments_S), with S = T = block_size."""
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
        """Return (ids of the source, ids of TARGET_START, target and TARGET_END) of one pair."""
        ids, answers = self.read(number)
        start = int(np.argmax(answers)) - 1
        return ids[:start], ids[start:]


def collect_documents(
    encoded: Iterable[tuple[np.ndarray, np.ndarray]], block_size: int, *, encoder: bool = False
) -> Conversations:
    """Concatenate encoded documents in memory, as `Pairs` for an encoder, else as `Conversations`."""
    ids, answers = zip(*encoded, strict=True)
    ends = np.cumsum([len(x) for x in ids])
    return (Pairs if encoder else Conversations)(np.concatenate(ids), np.concatenate(answers), ends, block_size)


def spell_number(n: int) -> str:
    """Spell n, from 0 to 999,999,999, in Spanish: 21,000 is "veintiún mil", 101 "ciento uno".

    Source: Real Academia Española, Ortografía de la lengua española, 2010, chapter VIII.
    """
    words = []
    for unit, one, many in ((1_000_000, "un millón", "millones"), (1000, "mil", "mil")):
        count, n = divmod(n, unit)
        if count:
            # Before a noun "uno" becomes "un": veintiún mil, treinta y un millones.
            counted = re.sub("uno$", "un", re.sub("veintiuno$", "veintiún", _below_1000(count)))
            words.append(one if count == 1 else f"{counted} {many}")
    if n or not words:
        words.append(_below_1000(n))
    return " ".join(words)


def _below_1000(n: int) -> str:
    if n == 100:
        return "cien"
    words = [_HUNDREDS[n // 100 - 1]] if n >= 100 else []
    n %= 100
    if n >= 30:
        words.append(_TENS[n // 10 - 3] + (f" y {_SMALL[n % 10]}" if n % 10 else ""))
    elif n or not words:
        words.append(_SMALL[n])
    return " ".join(words)


def make_number_pairs() -> str:
    """Return a .tsv of COUNT distinct numbers, each on two lines: words to digits, then digits to words.

    Lengths of one to nine digits are drawn with equal probability and a fixed seed. As few short numbers exist and
    duplicates are dropped, most have five to nine digits.
    """
    rng = np.random.default_rng(2017)
    digits_N = rng.integers(1, 10, 4 * COUNT)
    drawn_N = rng.integers(10 ** (digits_N - 1) * (digits_N > 1), 10**digits_N)
    _, first = np.unique(drawn_N, return_index=True)
    lines = []
    for n in drawn_N[np.sort(first)[:COUNT]].tolist():
        words = spell_number(n)
        lines.append(f"{words}\t{n}\n{n}\t{words}\n")
    return "".join(lines)
