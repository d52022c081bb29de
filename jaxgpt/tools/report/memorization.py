"""What a text has word for word from a corpus: the longest stretches, and how much of it is new."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.errors import UserError

LENGTHS = (5, 10, 20, 50)  # characters of the n-grams that are looked for
SHOWN = 5  # overlaps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """A stretch that is in the corpus too, and that could not be longer on either side."""

    text: str
    at: int  # character of the corpus where it stands, one of the places


@dataclasses.dataclass(frozen=True, kw_only=True)
class Novelty:
    characters: int  # of all texts together
    overlaps: list[Overlap]  # the longest, none inside another
    novel: dict[int, float | None]  # by n: share of the texts' n-grams that the corpus has not; None: they have none


class Corpus:
    """A text to be looked in, by its suffix array (Manber and Myers 1993; libdivsufsort)."""

    def __init__(self, text: str):
        self._bytes = text.encode()
        self._suffixes = _divsufsort().divsufsort(self._bytes) if text else np.zeros(0, np.int32)

    def match_lengths(self, text: str) -> np.ndarray:
        """Of each character: how many from it on, itself included, the corpus has in a row somewhere. int64 [len(text)].

        From one character to the next, a match loses at most that one: it is grown from there, and never sought anew.
        """
        raw, starts = text.encode(), _starts(text)
        ends = np.append(starts, len(raw))
        lengths, grown = np.zeros(len(text), np.int64), 0
        for i in range(len(text)):
            grown = max(grown - 1, 0)
            while i + grown < len(text) and self._find(raw[starts[i] : ends[i + grown + 1]]) is not None:
                grown += 1
            lengths[i] = grown
        return lengths

    def _find(self, piece: bytes) -> int | None:
        """A byte at which the corpus has this piece."""
        if not self._bytes:
            return None
        count, at = _divsufsort().sa_search(self._bytes, self._suffixes, piece)
        return int(self._suffixes[at]) if count > 0 else None

    def place(self, piece: str) -> int:
        """The character at which the corpus has this piece, which it does."""
        at = self._find(piece.encode())
        assert at is not None
        return len(self._bytes[:at].decode())


def novelty(corpus: Corpus, texts: Sequence[str]) -> Novelty:
    """Of texts that a model wrote, each by itself, beside the corpus that it was trained on."""
    overlaps: list[tuple[int, str]] = []
    seen: dict[int, list[bool]] = {n: [] for n in LENGTHS}
    for text in texts:
        lengths = corpus.match_lengths(text)
        for n in LENGTHS:
            seen[n] += (lengths[: max(len(text) - n + 1, 0)] >= n).tolist()
        # What a match before it reaches as far is inside that one.
        before = np.concatenate([[0], lengths[:-1] - 1]) if len(lengths) else lengths
        for i in np.flatnonzero((lengths > before) & (lengths > 0)):
            overlaps.append((int(lengths[i]), text[i : i + lengths[i]]))
    longest = sorted(set(overlaps), key=lambda found: (-found[0], found[1]))[:SHOWN]
    return Novelty(
        characters=sum(map(len, texts)),
        overlaps=[Overlap(text=text, at=corpus.place(text)) for _, text in longest],
        novel={n: 1.0 - float(np.mean(found)) if found else None for n, found in seen.items()},
    )


def _starts(text: str) -> np.ndarray:
    """The byte at which each character begins, in UTF-8."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + np.searchsorted([0x80, 0x800, 0x10000], codes, side="right")
    return np.cumsum(sizes) - sizes


def _divsufsort() -> Any:
    try:
        import pydivsufsort
    except ImportError:
        raise UserError("this needs the pydivsufsort package: python -m pip install 'jaxgpt[report]'") from None
    return pydivsufsort
