"""Measure memorisation: the longest overlaps of a text with a corpus, and the share of its n-grams that are new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.errors import UserError

LENGTHS = (5, 10, 20, 50)  # n of the n-grams, in characters
SHOWN = 5  # longest overlaps that are reported


class SuffixArray:
    """Index of a corpus for substring search (Manber and Myers 1993; libdivsufsort)."""

    def __init__(self, text: str):
        """Index a corpus. Raises `UserError` without the pydivsufsort package."""
        try:
            import pydivsufsort
        except ImportError:
            raise UserError("this needs the pydivsufsort package: python -m pip install 'jaxgpt[report]'") from None
        self._search, self._bytes = pydivsufsort.sa_search, text.encode()
        self._suffixes = pydivsufsort.divsufsort(self._bytes) if text else np.zeros(0, np.int32)

    def match_lengths(self, text: str) -> np.ndarray:
        """Return the length of the longest match that begins at each character: characters, int64 [len(text)].

        The match at the next character is at most one shorter, so its search starts from that length.
        """
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        sizes = 1 + np.searchsorted([0x80, 0x800, 0x10000], codes, side="right")  # bytes of each character in UTF-8
        raw, at = text.encode(), np.concatenate([[0], np.cumsum(sizes)])
        lengths, grown = np.zeros(len(text), np.int64), 0
        for i in range(len(text)):
            grown = max(grown - 1, 0)
            while i + grown < len(text) and self._find(raw[at[i] : at[i + grown + 1]]) is not None:
                grown += 1
            lengths[i] = grown
        return lengths

    def _find(self, piece: bytes) -> int | None:
        """Return the offset, in bytes, of an occurrence of a string in the corpus; None if there is none."""
        if not self._bytes:
            return None
        count, at = self._search(self._bytes, self._suffixes, piece)
        return int(self._suffixes[at]) if count > 0 else None

    def position(self, piece: str) -> int:
        """Return the offset, in characters, of an occurrence of a string, which the corpus must contain."""
        at = self._find(piece.encode())
        assert at is not None
        return len(self._bytes[:at].decode())


def measure_novelty(corpus: SuffixArray, texts: Sequence[str]) -> dict[str, Any]:
    """Compare texts, each separately, with a corpus.

    Returns:
        characters, the total length of the texts; overlaps, the longest substrings that occur in the corpus, none part
        of another, each with `at`, the offset of one occurrence in characters; novel, for each n the share of the
        texts' n-grams that do not occur in the corpus, or None without n-grams.
    """
    overlaps: set[tuple[int, str]] = set()
    seen: dict[int, list[bool]] = {n: [] for n in LENGTHS}
    for text in texts:
        lengths = corpus.match_lengths(text)
        for n in LENGTHS:
            seen[n] += (lengths[: max(len(text) - n + 1, 0)] >= n).tolist()
        # A match that ends where the one before it ends is part of that one.
        before = np.concatenate([[0], lengths - 1])[:-1]
        for i in np.flatnonzero((lengths > before) & (lengths > 0)):
            overlaps.add((-int(lengths[i]), text[i : i + lengths[i]]))
    return {
        "characters": sum(map(len, texts)),
        "overlaps": [{"text": text, "at": corpus.position(text)} for _, text in sorted(overlaps)[:SHOWN]],
        "novel": {str(n): 1.0 - float(np.mean(found)) if found else None for n, found in seen.items()},
    }
