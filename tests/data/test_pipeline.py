"""Invariants of the data order: a pure function of (seed, step), without replacement, complete."""

import hashlib
import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.pipeline import Tokens, find_window_starts, permutation, training_batches, validation_batches

T = 8


def take(n, *, n_tokens=1000, **kwargs):
    options = dict(block_size=T, batch_size=4, seed=0) | kwargs
    return list(itertools.islice(training_batches(Tokens([np.arange(n_tokens)]), **options), n))


def test_batches_are_windows_and_their_next_tokens():
    for batch in take(5):
        assert batch.inputs_BT.shape == batch.targets_BT.shape == (4, T)
        assert batch.inputs_BT.dtype == np.int32
        np.testing.assert_array_equal(batch.inputs_BT[:, 1:], batch.targets_BT[:, :-1])
        np.testing.assert_array_equal(batch.inputs_BT + 1, batch.targets_BT)  # the tokens count up


@pytest.mark.parametrize("start", [1, 7, 31, 200])
def test_batch_t_is_the_same_from_wherever_one_starts(start):
    """Across epochs, too: 1000 tokens are 31 batches."""
    whole = take(start + 3)
    for a, b in zip(whole[start:], take(3, start_step=start), strict=True):
        np.testing.assert_array_equal(a.inputs_BT, b.inputs_BT)
    assert not np.array_equal(whole[0].inputs_BT, take(1, seed=1)[0].inputs_BT)


def test_the_order_is_what_it_always_was():
    """Runs go on with another version of Grain, or of this file: batches of three epochs, by their SHA-256."""
    digest = hashlib.sha256()
    for batch in take(93, seed=7):
        digest.update(batch.inputs_BT.tobytes() + batch.targets_BT.tobytes())
    assert digest.hexdigest() == "02ad7cdd4927bef8ab94e82c3b140ecf5ce098c67cfa81ae35861a6da6923dc5"


@pytest.mark.parametrize("n", [1, 2, 1000, 2**16, 2**16 + 1, 2**18 + 1, 2**32 - 1])
def test_permutations_are_grains(n):
    import grain

    for seed in (0, 7, 2**32 - 1):  # the last one's second epoch has the seed 0
        order = grain.MapDataset.range(n).shuffle(seed=seed).repeat(2)
        for epoch in (0, 1):
            number_at = permutation(n, seed + epoch)
            for place in (*range(min(n, 50)), n - 1):
                assert number_at(place) == order[epoch * n + place]
    assert n > 2**16 or sorted(map(number_at, range(n))) == list(range(n))


@pytest.mark.parametrize("error", [OSError("no disk"), StopIteration(), KeyboardInterrupt()])
def test_what_a_reader_raises_arrives_at_its_batch_and_no_thread_is_left(error):
    def row(n):
        if n == 40:
            raise error
        return np.zeros(T), np.zeros(T)

    before, split = threading.active_count(), SimpleNamespace(training_rows=lambda **_: row)
    batches = training_batches(split, block_size=T, batch_size=4, seed=0)
    assert len(list(itertools.islice(batches, 10))) == 10
    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as e:
        next(batches)
    assert error in (e.value, e.value.__cause__)
    assert threading.active_count() == before


def test_an_epoch_shows_every_window_once_and_epochs_differ():
    """124 windows of 1000 tokens are 31 batches; each epoch has its own order and its own place of the first cut."""
    batches = take(31 * 4)
    epochs = [np.concatenate([b.inputs_BT[:, 0] for b in batches[i : i + 31]]) for i in range(0, 31 * 4, 31)]
    for starts in epochs:
        assert len(set(starts)) == 124
        assert set(np.diff(np.sort(starts))) == {T}  # they touch, and do not overlap
    assert len({tuple(starts) for starts in epochs}) == 4
    assert len({starts.min() for starts in epochs}) > 1


@given(n_tokens=st.integers(T + 1, 60), seed=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_the_shortest_texts_work(n_tokens, seed):
    for batch in take(3, n_tokens=n_tokens, seed=seed, batch_size=2):
        assert batch.targets_BT.max() < n_tokens


@given(targets=st.integers(-1, 40), block_size=st.integers(1, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_windows_of_any_stride_have_every_target_once_and_none_to_spare(targets, block_size, data):
    stride = data.draw(st.integers(1, block_size))
    seen = []
    for start in find_window_starts(targets, block_size=block_size, stride=stride):
        new = list(range(start + (block_size - stride if start else 0), min(start + block_size, targets)))
        assert new
        seen += new
    assert seen == list(range(targets))
    tokens, B = Tokens([np.arange(targets + 1)]), data.draw(st.integers(1, 9))
    batches = list(validation_batches(tokens, block_size=block_size, batch_size=B, stride=stride))
    assert {b.inputs_BT.shape for b in batches} <= {(B, block_size)}
    assert [int(t) for b in batches for t in b.targets_BT[b.mask_BT]] == [i + 1 for i in seen]
    assert [int(t) for b in batches for t in b.inputs_BT[b.mask_BT]] == seen


def test_part_of_validation_is_spread_and_always_the_same():
    tokens = Tokens([np.arange(1000)])

    def starts():
        batches = validation_batches(tokens, block_size=T, batch_size=5, max_tokens=80)
        return [start for batch in batches for start in batch.inputs_BT[:, 0].tolist()]

    first, again = starts(), starts()
    assert first == again and len(first) == 10 and first[0] == 0 and first[-1] > 900
