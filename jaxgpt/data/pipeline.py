"""Batches: a pure function of (seed, step), read ahead by Grain's threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.data.chat.conversations import Conversations
from jaxgpt.data.dataset import Tokens

MOST_STEPS = 2**40  # what an endless run takes


def training_batches(
    data: Tokens | Conversations,
    *,
    block_size: int,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    rows: Sequence[int] | np.ndarray | None = None,
    prefetch: int = 16,
) -> Generator[Batch, None, None]:
    """Endless batches from `start_step` on: batch t depends on (data, seed, t) alone, so resuming needs no state.

    Conversations are packed into rows, each one once an epoch: see `packing.Packing`. Of a text, each epoch cuts it into windows that touch but do not overlap, and visits each once, in an order of its
    own. Where the first window starts is drawn anew each epoch, so the same text is cut elsewhere next time; the
    fewer than 2 block_size tokens left over at the two ends are skipped in that epoch.
    rows: those of each batch to read, where other processes read the others; None: all. prefetch: batches made
    ahead, by threads.
    """
    import grain  # 1.5 s to import: only for those who train

    row: Callable[[int], Any]  # the n-th of the run
    if isinstance(data, Conversations):
        row = _packed_rows(data, seed)
    else:
        windows = windows_per_epoch(len(data), block_size)
        order: Any = grain.MapDataset.range(windows).shuffle(seed=seed).repeat()  # a new shuffle each epoch

        def row(n: int) -> tuple[np.ndarray, np.ndarray]:
            window_T1 = _window(data, block_size, windows, seed, n, order[n])
            return window_T1[:-1], window_T1[1:]

    mine = range(batch_size) if rows is None else rows

    def batch(step: int) -> Batch:
        made = [row(step * batch_size + int(number)) for number in mine]
        return Batch(*(np.stack(arrays) for arrays in zip(*made, strict=True)))

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    steps = grain.MapDataset.range(start_step, MOST_STEPS).map(batch)
    yield from steps.to_iter_dataset(options)


def _packed_rows(data: Conversations, seed: int) -> Callable[[int], tuple[np.ndarray, ...]]:
    """Return the function of a row's number in the run: of (data, seed, number) alone."""
    epoch = functools.lru_cache(maxsize=2)(functools.partial(data.packing.epoch, seed))

    def row(n: int) -> tuple[np.ndarray, ...]:
        return data.row(epoch(n // data.packing.rows)(n % data.packing.rows))

    return row


def windows_per_epoch(n_tokens: int, block_size: int) -> int:
    """Windows of block_size + 1 tokens, each sharing one token with the next, that fit wherever the cut falls."""
    assert n_tokens > block_size
    return max(1, n_tokens // block_size - 1)


def _window(tokens: Tokens, block_size: int, windows: int, seed: int, index: int, window: int) -> np.ndarray:
    room = len(tokens) - 1 - windows * block_size  # at least 0
    offset = _offset(min(room, block_size - 1), seed, index // windows)
    return tokens.read(offset + window * block_size, block_size + 1)


@functools.lru_cache(maxsize=16)  # drawn once an epoch, not once a window
def _offset(largest: int, seed: int, epoch: int) -> int:
    return int(np.random.default_rng([seed, epoch]).integers(largest + 1))


def window_starts(targets: int, *, block_size: int, stride: int) -> range:
    """Where windows begin that move on by `stride` and together reach every target: input i has target i + 1.

    A window scores those of its inputs that no earlier one has: all of the first, and from input
    block_size - stride on of the others.
    """
    assert 1 <= stride <= block_size, (stride, block_size)
    return range(0, max(targets - (block_size - stride), min(targets, 1)), stride)


def validation_batches(
    data: Tokens | Conversations,
    *,
    block_size: int,
    batch_size: int,
    stride: int | None = None,
    max_tokens: int | None = None,
    given: int = 0,
    rows: Sequence[int] | np.ndarray | None = None,
) -> Iterator[Batch]:
    """The split, every target once, in batches of one shape (the last padded and masked).

    stride: tokens that each window moves on. All targets but the first window's have more than block_size - stride
        tokens before them; a smaller one costs as many times the work. None: block_size, windows that touch.
    max_tokens: about so many targets instead of all, in windows spread evenly; the same ones on every call.
    given: tokens at the beginning that are no targets, of a text; the first one never is.
    rows: those of each batch to read, as for training.
    """
    mine = np.arange(batch_size) if rows is None else np.asarray(rows)
    if isinstance(data, Conversations):
        yield from _packed_validation(data, batch_size, max_tokens, mine)
        return
    stride = block_size if stride is None else stride
    targets = len(data) - 1
    starts: Sequence[int] = window_starts(targets, block_size=block_size, stride=stride)
    if max_tokens is not None and max_tokens < targets:
        starts = _spread(starts, max_tokens // stride)
    for first in range(0, len(starts), batch_size):
        shape = (len(mine), block_size)
        inputs, outputs, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
        for row, number in enumerate((first + mine).tolist()):
            if number >= len(starts):
                continue
            start = starts[number]
            length = min(block_size, targets - start)
            window = data.read(start, length + 1)
            inputs[row, :length], outputs[row, :length] = window[:-1], window[1:]
            mask[row, max(block_size - stride if start else 0, given - 1 - start) : length] = True
        yield Batch(inputs_BT=inputs, targets_BT=outputs, mask_BT=mask)


def _packed_validation(
    data: Conversations, batch_size: int, max_tokens: int | None, mine: np.ndarray
) -> Iterator[Batch]:
    packing, block_size = data.packing, data.block_size
    numbers: Sequence[int] = range(packing.rows)
    if max_tokens is not None and max_tokens < packing.rows * block_size:
        numbers = _spread(numbers, max_tokens // block_size)
    nobody = np.zeros(0, np.int64)
    for first in range(0, len(numbers), batch_size):
        at = (first + mine).tolist()
        members = [packing.unshuffled(int(numbers[n])) if n < len(numbers) else nobody for n in at]
        made = [data.row(those) for those in members]
        yield Batch(*(np.stack(arrays) for arrays in zip(*made, strict=True)))


def _spread(items: Sequence[int], keep: int) -> list[int]:
    """About so many, at least one, evenly from the first to the last."""
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, max(1, keep))]
