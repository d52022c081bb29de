"""Batches of a split: a pure function of (seed, step), prefetched by Grain's threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxgpt.batch import Batch

PREFETCH = 16  # batches read ahead
MOST_STEPS = 2**40  # steps of an endless run; also the maximum of `TrainConfig.steps`
RowReader = Callable[[int], tuple[np.ndarray, ...]]  # index of a row -> that row of each field of a `Batch`


class Split(Protocol):
    """One split of a dataset, cut into rows of `block_size` inputs."""

    def training_rows(self, *, block_size: int, seed: int) -> RowReader:
        """Return a function from n to the n-th row of an endless run: epoch after epoch, each in its own order."""
        ...

    def validation_rows(
        self, *, block_size: int, stride: int, max_tokens: int | None, prefix_length: int
    ) -> tuple[int, RowReader]:
        """Return (number of rows, reader of a row). Every target occurs once; rows past the last are padding."""
        ...


def training_batches(
    data: Split,
    *,
    block_size: int,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    rows: Sequence[int] | np.ndarray | None = None,
    prefetch: int = PREFETCH,
) -> Generator[Batch, None, None]:
    """Yield endless batches from `start_step` on: batch t depends only on (data, seed, t), so resuming needs no state.

    `rows` are the rows of each batch that this process reads; None means all. `prefetch` is the number of batches read
    ahead.
    """
    import grain  # 1.5 s to import, so only when training

    read = data.training_rows(block_size=block_size, seed=seed)
    local = range(batch_size) if rows is None else [int(row) for row in rows]

    def make_batch(step: int) -> Batch:
        return _stack(read(step * batch_size + row) for row in local)

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
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
    """Yield a split in batches of one shape, with every target once. The last batch is padded and masked.

    Args:
        data: the split.
        block_size: inputs per row.
        batch_size: rows per batch.
        stride: tokens from the start of one window to the next; half the stride costs twice the work. All targets but
            those of the first window have more than `block_size - stride` tokens of context. None means block_size.
        max_tokens: about how many targets to read, in rows spread evenly over the split, the same on every call. None
            means all.
        prefix_length: tokens at the beginning of the split that are not targets. The first token never is one.
        rows: rows of each batch that this process reads. None means all.
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
    """Return an endless sequence of epochs, each a different permutation of the integers below `length`."""
    import grain

    shuffled: Any = grain.MapDataset.range(length).shuffle(seed=seed)
    return shuffled.repeat()


def pick_evenly(items: Sequence[int], count: int) -> list[int]:
    """Return about `count` items, at least one, spread evenly from the first to the last."""
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, max(1, count))]
