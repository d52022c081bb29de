"""Conversations into rows of one length: as few rows as best fit finds, no conversation cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def best_fit(sizes_N: np.ndarray, room: int) -> np.ndarray:
    """row_N, int64, from 0 on: the row of each size where every one goes, largest first, to the fullest row it fits.

    Johnson et al. 1974, SIAM J. Comput. 3(4): at most 11/9 of the fewest rows, and 4. Sizes are 1 to `room`.
    """
    row_N = np.empty(len(sizes_N), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]  # so much room left
    open_bits = rows = 0  # bit r: there is a row with room r. The fullest that fits is the lowest bit from the size on
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
    """Which conversations share a row: `rows` of them in every epoch, each conversation once.

    Best fit looks at lengths alone, so it is done once: an epoch deals conversations of equal length out anew, and has
    its own order of rows. That keeps the number of rows the same in each, and the n-th row of a run a matter of arithmetic.
    """

    def __init__(self, sizes_N: np.ndarray, block_size: int):
        self._places = np.argsort(-sizes_N, kind="stable")  # conversations, longest first
        row_N = best_fit(sizes_N[self._places], block_size)
        self._by_row = np.argsort(row_N, kind="stable")  # places
        self._ends = np.cumsum(np.bincount(row_N))
        self._sizes = sizes_N
        self.rows = len(self._ends)
        self.filled = float(sizes_N.sum()) / (self.rows * block_size)  # share of the rows' tokens that are no padding

    def epoch(self, seed: int, number: int) -> Callable[[int], np.ndarray]:
        """The conversations of each row of one epoch, by its number there."""
        rng = np.random.default_rng([seed, number])
        shuffled = rng.permutation(len(self._sizes))
        dealt = shuffled[np.argsort(-self._sizes[shuffled], kind="stable")]
        order = rng.permutation(self.rows)
        return lambda row: self._of(dealt, order[row])

    def unshuffled(self, row: int) -> np.ndarray:
        return self._of(self._places, row)

    def _of(self, places: np.ndarray, row: int) -> np.ndarray:
        return places[self._by_row[self._ends[row - 1] if row else 0 : self._ends[row]]]
