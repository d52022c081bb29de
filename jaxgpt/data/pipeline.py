"""Read the batches of a dataset, a pure function of (seed, step), ahead of the run by a thread of Grain's."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config.validate import short_repr
from jaxgpt.data.tokenizer import Tokenizer

PREFETCH = 16  # batches read ahead
WALKED = 2**16  # windows of an epoch that are permuted at once
MOST_STEPS = 2**40  # steps of an endless run, and the maximum of `TrainConfig.steps`
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
        self._shards = shards
        self._ends = np.cumsum([len(s) for s in shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Return `length` ids from `start` on, int32, across shards if necessary."""
        assert start >= 0 and start + length <= len(self), (start, length, len(self))
        shard = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[shard - 1]) if shard else 0
        parts = []
        while length:
            part = self._shards[shard][start : start + length]
            parts.append(part)
            length -= len(part)
            shard, start = shard + 1, 0
        return np.concatenate(parts).astype(np.int32)

    def training_rows(self, *, block_size: int, seed: int) -> RowReader:
        """Return the reader of (inputs_T, targets_T).

        Each epoch cuts the tokens into adjacent windows and visits each once. The start of the first window is drawn
        for each epoch, so the cuts differ between epochs. Fewer than `2 * block_size` tokens are left over at the two
        ends, and that epoch skips them. The first token is never a target. If there are at least `2 * block_size` tokens,
        the last `len(self) % block_size` are never targets either.
        """
        import grain  # 1.5 s to import, so only when training

        assert len(self) > block_size
        windows = max(1, len(self) // block_size - 1)  # each has block_size + 1 tokens, and fits at any offset
        shuffled: Any = grain.MapDataset.range(windows).shuffle(seed=seed)
        order = shuffled.repeat()  # epochs, each a different permutation
        permute = functools.lru_cache(maxsize=2)(lambda epoch: permutation(windows, seed + epoch))
        most = min(len(self) - 1 - windows * block_size, block_size - 1)  # at least 0

        @functools.lru_cache(maxsize=16)  # drawn once per epoch, not per window
        def offset(epoch: int) -> int:
            return int(np.random.default_rng([seed, epoch]).integers(most + 1))

        def row(n: int) -> tuple[np.ndarray, np.ndarray]:
            epoch, number = divmod(n, windows)
            window = permute(epoch)[number] if windows <= WALKED else order[n]
            tokens = self.read(offset(epoch) + int(window) * block_size, block_size + 1)
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
    fingerprint: dict[str, Any]
    # entries of tokenizer_config.json for the chat template: {} if the tokenizer implies it, None without conversations
    tokenizer_config: dict[str, Any] | None = None
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
    prefetch: int = PREFETCH,
) -> Generator[Batch, None, None]:
    """Yield endless batches from `start_step` on: batch t depends only on (data, seed, t), so resuming needs no state.

    `rows` are the rows of each batch that this process reads. None means all. `prefetch` is the number of batches read
    ahead.
    """
    import grain

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
        block_size: inputs per row.
        batch_size: rows per batch.
        stride: tokens from the start of one window to the next. Half the stride costs twice the work. All targets after
            the first window's have more than `block_size - stride` tokens of context. None means block_size.
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


def permutation(n: int, seed: int) -> np.ndarray:
    """Return Grain's permutation of range(n), n up to 2^16, at once. One by one, the smallest n takes it 50 ms an epoch.

    Both walk a permutation of 16 bits until it gives less than n. It is four rounds of the Simon cipher (Beaulieu et al.
    2013, eprint.iacr.org/2013/404) with keys by C++'s std::seed_seq.
    """
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
    left, right = np.divmod(np.arange(2**16, dtype=np.uint16), 256)
    for key in keys:
        one, two, eight = (right << i | right >> 8 - i for i in (1, 2, 8))
        left, right = right, (left ^ one & eight ^ two ^ key % 256) & 255
    table = left.astype(np.int32) << 8 | right
    walk = np.where(np.arange(2**16) < n, np.arange(2**16), table)
    for _ in range(16):  # each time twice as far
        walk = walk[walk]
    return walk[table[:n]]


def _stack(rows: Iterable[tuple[Any, ...]]) -> Batch:
    return Batch(*jax.tree.map(lambda *arrays: np.stack(arrays), *rows))


def find_window_starts(targets: int, *, block_size: int, stride: int) -> range:
    """Return the starts of windows, `stride` apart, that together cover every target: input i has target i + 1.

    A window scores the inputs that no earlier one scored: the first window all, the others from input
    `block_size - stride` on.
    """
    assert 1 <= stride <= block_size, (stride, block_size)
    return range(0, max(targets - (block_size - stride), min(targets, 1)), stride)


def pick_evenly(items: Sequence[int], count: int) -> list[int]:
    """Return about `count` items, at least one, spread evenly from the first to the last."""
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, max(1, count))]
