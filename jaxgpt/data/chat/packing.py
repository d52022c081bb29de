"""Pack conversations into rows of one length with best fit, without cutting any."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxgpt.data.pipeline import pick_evenly


def pack_best_fit(sizes_N: np.ndarray, room: int) -> np.ndarray:
    """Return row_N, int64: the row of each size, if each goes, largest first, to the fullest row that it fits.

    Sizes are from 1 to `room`. At most 11/9 of the minimum number of rows plus 4 are used (Johnson et al. 1974, SIAM J.
    Comput. 3(4)).
    """
    row_N = np.empty(len(sizes_N), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]  # rows by the room left in them
    open_bits = rows = 0  # bit r: a row has room r. The lowest bit from the size on is the fullest row that fits
    for item in np.argsort(-sizes_N, kind="stable").tolist():
        size = int(sizes_N[item])
        fitting = open_bits >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                open_bits ^= 1 << left
        else:
            left, row, rows = room, rows, rows + 1
        row_N[item] = row
        rows_with[left - size].append(row)
        open_bits |= 1 << left - size
    return row_N


class Packing:
    """An assignment of conversations to `rows` rows, each conversation once.

    Best fit depends only on lengths, so it runs once: each epoch shuffles conversations of equal length among the rows,
    and the order of the rows. Every epoch thus has the same number of rows, and the n-th row of a run follows by
    arithmetic.
    """

    def __init__(self, sizes_N: np.ndarray, block_size: int):
        """Pack conversations that take up `sizes_N` inputs into rows of `block_size`."""
        self._longest_first = np.argsort(-sizes_N, kind="stable")  # indices of conversations
        row_N = pack_best_fit(sizes_N[self._longest_first], block_size)
        self._by_row = np.argsort(row_N, kind="stable")  # their ranks by length, sorted by row
        self._ends = np.cumsum(np.bincount(row_N))
        self._sizes, self.block_size = sizes_N, block_size
        self.rows = len(self._ends)
        self.filled = float(sizes_N.sum()) / (self.rows * block_size)  # fraction of the rows that is not padding

    def training_members(self, seed: int) -> Callable[[int], np.ndarray]:
        """Return a function from n to the conversations of the n-th row of a run."""

        @functools.lru_cache(maxsize=2)  # epochs: a batch may have rows of one and of the next
        def shuffle(epoch: int) -> tuple[np.ndarray, np.ndarray]:
            rng = np.random.default_rng([seed, epoch])
            shuffled = rng.permutation(len(self._sizes))
            return shuffled[np.argsort(-self._sizes[shuffled], kind="stable")], rng.permutation(self.rows)

        def members(n: int) -> np.ndarray:
            longest_first, order = shuffle(n // self.rows)
            return self._members(longest_first, order[n % self.rows])

        return members

    def validation_members(self, max_tokens: int | None) -> list[np.ndarray]:
        """Return the conversations of each row, or of evenly spread rows with about `max_tokens` tokens in all."""
        rows: Sequence[int] = range(self.rows)
        if max_tokens is not None and max_tokens < self.rows * self.block_size:
            rows = pick_evenly(rows, max_tokens // self.block_size)
        return [self._members(self._longest_first, row) for row in rows]

    def _members(self, longest_first: np.ndarray, row: int) -> np.ndarray:
        return longest_first[self._by_row[self._ends[row - 1] if row else 0 : self._ends[row]]]
