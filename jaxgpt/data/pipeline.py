"""Batches of a split: a pure function of (seed, step), read ahead by Grain's threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxgpt.batch import Batch

MOST_STEPS = 2**40  # steps of an endless run: the largest that `TrainConfig.steps` may be
RowReader = Callable[[int], tuple[np.ndarray, ...]]  # number of a row -> the fields of a `Batch`, one row of each


class Split(Protocol):
    """One split of a dataset, cut into rows of `block_size` inputs."""

    def training_rows(self, *, block_size: int, seed: int) -> RowReader:
        """Return the n-th row of an endless run as a function of n: epochs follow each other, each in its own order."""
        ...

    def validation_rows(
        self, *, block_size: int, stride: int, max_tokens: int | None, prefix_length: int
    ) -> tuple[int, RowReader]:
        """Return (the number of rows, the reader of one), with every target once; rows after the last are padding."""
        ...


def training_batches(
    data: Split,
    *,
    block_size: int,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    rows: Sequence[int] | np.ndarray | None = None,
) -> Generator[Batch, None, None]:
    """Yield endless batches from `start_step` on: batch t depends on (data, seed, t) alone, so resuming needs no state.

    rows: those of each batch to read, where other processes read the others; None: all.
    """
    import grain  # 1.5 s to import: only for those who train

    read = data.training_rows(block_size=block_size, seed=seed)
    local = range(batch_size) if rows is None else [int(row) for row in rows]

    def make_batch(step: int) -> Batch:
        return _stack(read(step * batch_size + row) for row in local)

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
    yield from grain.MapDataset.range(start_step, MOST_STEPS).map(make_batch).to_iter_dataset(options)


def validation_batches(
    data: Split,
    *,
    block_size: int,
    batch_size: int,
    stride: int | None = None,
    max_tokens: int | None = None,
    prefix_length: int = 0,
    rows: Sequence[int] | np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yield the split, every target once, in batches of one shape (the last padded and masked).

    stride: tokens that each window moves on. All targets but the first window's have more than block_size - stride
        tokens before them; a smaller one costs as many times the work. None: block_size, windows that touch.
    max_tokens: read about this many targets, in rows spread evenly over the split, the same on every call. None: all.
    prefix_length: tokens at the beginning of a text that are not targets; the first token never is.
    rows: those of each batch to read, as for training.
    """
    local = range(batch_size) if rows is None else [int(row) for row in rows]
    stride = block_size if stride is None else stride
    count, read = data.validation_rows(
        block_size=block_size, stride=stride, max_tokens=max_tokens, prefix_length=prefix_length
    )
    for first in range(0, count, batch_size):
        yield _stack(read(first + row) for row in local)


def _stack(rows: Iterable[tuple[np.ndarray, ...]]) -> Batch:
    return Batch(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))


def shuffle_epochs(length: int, seed: int) -> Sequence[int]:
    """Return an endless sequence of epochs, each the integers below `length` in an order of its own."""
    import grain

    shuffled: Any = grain.MapDataset.range(length).shuffle(seed=seed)
    return shuffled.repeat()


def pick_evenly(items: Sequence[int], count: int) -> list[int]:
    """Return about `count` items, at least one, evenly from the first to the last."""
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, max(1, count))]
