"""Read the batches of a dataset, a pure function of (seed, step), in a thread that is ahead of the run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config.validate import short_repr
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.files import Json

PREFETCH = 16  # batches read ahead
RowReader = Callable[[int], tuple[Any, ...]]  #: index of a row -> that row of each field of a `Batch`


class Split(Protocol):
    """One split of a dataset, cut into rows of `block_size` inputs."""

    def __len__(self) -> int: ...

    def training_rows(self, *, block_size: int, seed: int) -> RowReader:
        """Return a function from n to the n-th row of an endless run: epoch after epoch, each in its own order."""
        ...

    def validation_rows(
        self, *, block_size: int, stride: int, max_tokens: int | None, prefix_length: int
    ) -> tuple[int, RowReader]:
        """Return (number of rows, reader of a row). Every target occurs once. Rows past the last are padding."""
        ...


class Tokens(Split):
    """A sequence of token ids in one or more memory-mapped files: only the windows in use are in memory."""

    def __init__(self, shards: list[np.ndarray]):
        """Concatenate shards: 1-D arrays of any integer dtype."""
        self.shards = shards
        self._ends = np.cumsum([len(s) for s in shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, here: slice) -> np.ndarray:
        return self.read(here.start, here.stop - here.start)

    def read(self, start: int, length: int) -> np.ndarray:
        """Return `length` ids from `start` on, int32, across shards if necessary."""
        assert start >= 0 and start + length <= len(self), (start, length, len(self))
        shard = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[shard - 1]) if shard else 0
        parts = []
        while length:
            part = self.shards[shard][start : start + length]
            parts.append(part)
            length -= len(part)
            shard, start = shard + 1, 0
        return np.concatenate(parts).astype(np.int32)

    def training_rows(self, *, block_size: int, seed: int) -> RowReader:
        """Return the reader of (inputs_T, targets_T).

        Each epoch cuts the tokens into adjacent windows, from a start of its own, and visits each once. It skips fewer
        than `2 * block_size` tokens at the two ends. The first token is never a target, and if there are at least
        `2 * block_size`, neither are the last `len(self) % block_size`.
        """
        assert len(self) > block_size
        windows = max(1, len(self) // block_size - 1)  # each has block_size + 1 tokens, and fits at any offset
        most = min(len(self) - 1 - windows * block_size, block_size - 1)  # at least 0

        @functools.lru_cache(maxsize=2)  # a batch may have rows of one epoch and of the next
        def begin(epoch: int) -> tuple[int, Callable[[int], int]]:
            offset = int(np.random.default_rng([seed, epoch]).integers(most + 1))
            return offset, permutation(windows, seed + epoch)

        def row(n: int) -> tuple[np.ndarray, np.ndarray]:
            epoch, place = divmod(n, windows)
            offset, window_at = begin(epoch)
            tokens = self.read(offset + window_at(place) * block_size, block_size + 1)
            return tokens[:-1], tokens[1:]

        return row

    def validation_rows(
        self, *, block_size: int, stride: int, max_tokens: int | None, prefix_length: int
    ) -> tuple[int, RowReader]:
        """Return (number of rows, reader of (inputs_T, targets_T, mask_T))."""
        n_targets = len(self) - 1
        starts: Sequence[int] = find_window_starts(n_targets, block_size=block_size, stride=stride)
        if max_tokens is not None and max_tokens < n_targets:
            starts = pick_evenly(starts, max_tokens // stride)

        def row(n: int) -> tuple[np.ndarray, ...]:
            inputs, targets = np.zeros(block_size, np.int32), np.zeros(block_size, np.int32)
            mask = np.zeros(block_size, bool)
            if n < len(starts):
                start = starts[n]
                length = min(block_size, n_targets - start)
                window = self.read(start, length + 1)
                inputs[:length], targets[:length] = window[:-1], window[1:]
                mask[max(block_size - stride if start else 0, prefix_length - 1 - start) : length] = True
            return inputs, targets, mask

        return len(starts), row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The two splits, their tokenizer, and a fingerprint: runs with the same one are comparable."""

    train: Split  # rows to train on
    val: Split  # rows to validate with
    tokenizer: Tokenizer  # the tokenizer of both splits
    val_characters: int | None = None  # length of val's text, for bits per character. None if the text is unknown
    val_bytes: int | None = None  # length of that text in UTF-8, for bits per byte. None if the text is unknown
    # token counts of both splits, and the SHA-256 of both (for shards: of each file) and of the tokenizer
    fingerprint: Json
    # entries of tokenizer_config.json for the chat template: {} if the tokenizer implies it, None without conversations
    tokenizer_config: Json | None = None
    # (trainer, params, batch, key) -> (batch, metrics): makes the batch of a step from the rows, with the parameters
    # before the step, outside the compiled step. It must depend on its arguments only. None means that the rows are the batch
    roll_out: Callable[..., tuple[Batch, dict[str, float]]] | None = None
    notes: tuple[str, ...] = ()  # lines to print before training
    __repr__ = short_repr


def training_batches(
    data: Split,
    *,
    block_size: int,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    rows: Sequence[int] | np.ndarray | None = None,
) -> Generator[Batch, None, None]:
    """Yield endless batches from `start_step` on: batch t depends only on (data, seed, t), so resuming needs no state.

    `rows` are the rows of each batch that this process reads, or None for all. A thread reads PREFETCH batches ahead.
    """
    read = data.training_rows(block_size=block_size, seed=seed)
    local = range(batch_size) if rows is None else rows
    reader, firsts = ThreadPoolExecutor(1, "reader"), itertools.count(start_step * batch_size, batch_size)
    try:
        ahead = deque(reader.submit(_read_batch, read, next(firsts), local) for _ in range(PREFETCH))
        for first in firsts:
            batch = ahead.popleft().result()
            ahead.append(reader.submit(_read_batch, read, first, local))
            yield batch
    finally:
        reader.shutdown(cancel_futures=True)


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
        block_size: inputs per row.
        batch_size: rows per batch.
        stride: tokens from one window to the next, by default block_size. Half costs twice the work. All targets after
            the first window's have more than `block_size - stride` tokens of context.
        max_tokens: about how many targets to read, in the same rows on every call, spread evenly. None means all.
        prefix_length: tokens at the beginning of the split that are not targets. The first token never is one.
        rows: rows of each batch that this process reads. None means all.
    """
    size = {"block_size": block_size, "stride": block_size if stride is None else stride}
    count, read = data.validation_rows(**size, max_tokens=max_tokens, prefix_length=prefix_length)
    for first in range(0, count, batch_size):
        yield _read_batch(read, first, range(batch_size) if rows is None else rows)


def permutation(n: int, seed: int) -> Callable[[int], int]:
    """Return a function from a place to a number, which is a permutation of range(n), in the order of Grain's shuffle.

    Four rounds of the Simon cipher (Beaulieu et al. 2013, eprint.iacr.org/2013/404) permute numbers of an even count of
    bits, at least 16. They are repeated until the result is less than n. The seed has 32 bits.
    """
    half = max(8, ((n - 2).bit_length() + 1) // 2)  # n - 2 as in Grain: 4**k + 1 places have the numbers of 4**k
    mask = (1 << half) - 1
    keys = [key & mask for key in _expand_key(seed)]

    def encrypt(x: Any) -> Any:
        left, right = x >> half & mask, x & mask
        for key in keys:
            twice = right << half | right  # for rotations by 1, 2 and 8 bits
            mixed = twice >> half - 1 & twice >> half - 8 ^ twice >> half - 2
            left, right = right, left ^ mixed & mask ^ key
        return left << half | right

    if n <= 2**16:  # one by one, the smallest n would be looked for among all numbers of 16 bits
        numbers = np.arange(2**16, dtype=np.int32)
        following = encrypt(numbers)
        found = np.where(numbers < n, numbers, following)
        for _ in range(16):  # each time twice as far
            found = found[found]
        return found[following[:n]].item

    def number_at(place: int) -> int:
        while (place := encrypt(place)) >= n:
            pass
        return place

    return number_at


def _expand_key(seed: int) -> list[int]:
    """Return four numbers of 32 bits, as C++'s std::seed_seq makes them of one."""
    keys = [0x8B8B8B8B] * 4
    for k in range(8):
        join = operator.xor if k < 4 else operator.add
        a, b, c, d = (keys[k + i & 3] for i in range(4))
        x = join(join(a, b), d) & 0xFFFFFFFF
        x = (x ^ x >> 27) * (1664525 if k < 4 else 1566083941)
        y = x + (1, 1 + seed, 2, 3, 0, -1, -2, -3)[k]
        join = operator.add if k < 4 else operator.xor
        for i, key in enumerate((y, join(b, x), join(c, y))):
            keys[k + i & 3] = key & 0xFFFFFFFF
    return keys


def _read_batch(read: RowReader, first: int, rows: Iterable[int]) -> Batch:
    return Batch(*jax.tree.map(lambda *arrays: np.stack(arrays), *(read(first + int(row)) for row in rows)))


def find_window_starts(targets: int, *, block_size: int, stride: int) -> range:
    """Return the starts of windows, `stride` apart, that together cover every target: input i has target i + 1.

    A window scores what no earlier one scored: the first all inputs, the others from `block_size - stride` on.
    """
    assert 1 <= stride <= block_size, (stride, block_size)
    return range(0, max(targets - (block_size - stride), min(targets, 1)), stride)


def pick_evenly(items: Sequence[int], count: int) -> list[int]:
    """Return about `count` items, at least one, spread evenly from the first to the last."""
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, max(1, count))]
