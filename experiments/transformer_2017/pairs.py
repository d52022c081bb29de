"""Pairs of a source and a target text: read, encoded, and packed for a model with an encoder.

Without a file they are Spanish number words and digits: a translation task in which every word matters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config.validate import short
from jaxgpt.data.conversations import Conversations
from jaxgpt.data.dataset import DataConfig
from jaxgpt.data.pipeline import Dataset
from jaxgpt.data.tokenizer import CharTokenizer, Tokenizer, fingerprint, open_tokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.files import read_lines
from jaxgpt.model import GPTConfig

# A pair is encoded as a line of its file: the tab begins the target, the end of the line ends it.
TARGET_START, TARGET_END = "\t", "\n"
LONGEST_LINE = 2**20  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsConfig(DataConfig):
    """Pairs: the lines of a .tsv file, `path`, each a source, a tab and a target; None: Spanish numbers."""

    corpus: str = "spanish-numbers"

    @property
    def is_packed(self) -> bool:
        """Return that rows hold several pairs."""
        return True

    def open_dataset(self, model: GPTConfig, *, known: dict[str, Any] | None = None) -> Dataset:
        """Return the dataset: the last `val_fraction` of the pairs are for validation."""
        pairs = list(spanish_numbers() if self.path is None else read_pairs(self.path))
        name, train = self.path or self.corpus, int(len(pairs) * (1.0 - self.val_fraction))
        if not 0 < train < len(pairs):
            raise UserError(f"{name} has {len(pairs)} pairs: needs one to train on and one to validate on")
        tokenizer = open_tokenizer(self.tokenizer, "pairs need")
        if self.tokenizer == "char":
            tokenizer = CharTokenizer({*TARGET_START, *TARGET_END}.union(*itertools.chain(*pairs)))
        elif tokenizer is None:
            tokenizer = train_bpe(itertools.chain(*pairs[:train]), self.bpe_vocab_size)
        splits = [Pairs.encode(part, tokenizer, model.block_size) for part in (pairs[:train], pairs[train:])]
        if not all(len(split.lengths) for split in splits):
            raise UserError(f"{name}: no pair fits into block_size={model.block_size}: raise --model.block-size")
        text = "".join(f"{source}\t{target}\n" for source, target in pairs)
        made_of = {
            "text": hashlib.sha256(text.encode()).hexdigest(),
            "train_pairs": train,
            "tokenizer_sha256": fingerprint(tokenizer),
        }
        left_out = sum(split.left_out for split in splits)
        note = f"{len(splits[0].lengths):,} training and {len(splits[1].lengths):,} validation pairs, in rows of "
        note += f"{model.block_size} tokens that are {splits[0].filled:.1%} full; {left_out:,} are longer, and left out"
        return Dataset(train=splits[0], val=splits[1], tokenizer=tokenizer, fingerprint=made_of, notes=(note,))

    def shape_batch(self, tokens_BT: jax.ShapeDtypeStruct) -> Batch:
        """Return the shapes of a training batch: those of packed documents, and their sources."""
        batch = super().shape_batch(tokens_BT)
        return batch._replace(extras={"source_BS": tokens_BT, "source_segments_BS": tokens_BT})


def read_pairs(path: str | Path) -> Iterator[tuple[str, str]]:
    """Yield (source, target) for the lines of a .tsv file that are not blank.

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
        yield fields[0], fields[1]


def encode_source(source: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the encoder reads: the tokenizer's prefix and the source."""
    return [*tokenizer.prefix, *tokenizer.encode(source).tolist()]


def target_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids that begin and end each target. Raises `UserError` unless both are single tokens."""
    start, end = (tokenizer.encode(text).tolist() for text in (TARGET_START, TARGET_END))
    if len(start) != 1 or len(end) != 1:
        raise UserError("this tokenizer has no single token for a tab or an end of line: take char, byte or bpe")
    return start[0], end[0]


class Pairs(Conversations):
    """Pairs for a model with an encoder: sources and targets in separate arrays.

    A pair is left out if its source, or its target with TARGET_END, has more than `block_size` tokens.
    """

    @classmethod
    def encode(cls, pairs: list[tuple[str, str]], tokenizer: Tokenizer, block_size: int) -> Pairs:
        """Encode each pair as source, TARGET_START, target, TARGET_END, of which the last two are to be generated."""
        (start, end), ids, lengths = target_ids(tokenizer), [], []
        for source, target in pairs:
            before, after = encode_source(source, tokenizer), tokenizer.encode(target).tolist()
            ids += [*before, start, *after, end]
            lengths.append((len(before) + 1, len(after) + 1))
        answers = np.repeat(np.tile([False, True], len(pairs)), np.ravel(lengths).astype(int))
        return cls(np.array(ids, np.int32), answers, np.cumsum(np.sum(lengths, axis=1)), block_size)

    def fit(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens to read of each pair, tokens of the longer of its source and target)."""
        written = np.add.reduceat(self.answers, starts, dtype=np.int64)  # tokens of each target and its TARGET_END
        return lengths, np.maximum(lengths - written - 1, written)

    def row(self, members: np.ndarray) -> tuple[Any, ...]:
        """Return (inputs_T, targets_T, mask_T, segments_T, {source_BS, source_segments_BS}), all of block_size."""
        inputs, targets, segments, source, source_segments = (np.zeros(self.block_size, np.int32) for _ in range(5))
        mask, at, read = np.zeros(self.block_size, bool), 0, 0
        for number, member in enumerate(members, 1):
            before, after = self.split(member)
            here, there = slice(at, at + len(after) - 1), slice(read, read + len(before))
            inputs[here], targets[here], mask[here], segments[here] = after[:-1], after[1:], True, number
            source[there], source_segments[there] = before, number
            at, read = at + len(after) - 1, read + len(before)
        return inputs, targets, mask, segments, {"source_BS": source, "source_segments_BS": source_segments}

    def split(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids of the source, ids of TARGET_START, target and TARGET_END) of one pair."""
        ids, answers = self.read(number)
        start = int(np.argmax(answers)) - 1
        return ids[:start], ids[start:]


# Spanish numbers -------------------------------------------------------------------------------------------------------

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


def spanish_numbers() -> Iterator[tuple[str, str]]:
    """Yield COUNT distinct numbers, each in two pairs: words to digits, then digits to words.

    Lengths of one to nine digits are drawn with equal probability and a fixed seed. As few short numbers exist and
    duplicates are dropped, most have five to nine digits.
    """
    rng = np.random.default_rng(2017)
    digits_N = rng.integers(1, 10, 4 * COUNT)
    drawn_N = rng.integers(10 ** (digits_N - 1) * (digits_N > 1), 10**digits_N)
    _, first = np.unique(drawn_N, return_index=True)
    for n in drawn_N[np.sort(first)[:COUNT]].tolist():
        words = spell_number(n)
        yield words, str(n)
        yield str(n), words
