"""Several documents in a row: each gives the same result as in a row of its own, for every kernel and kind of model."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.batch import Batch
from jaxgpt.layers.position import positions_from_segments
from jaxgpt.loss import make_loss
from jaxgpt.parallel.device import find_kernel
from tests.helpers import TINY, make_model
from tests.sample.test_cached import CACHED
from tests.test_model import ARCHITECTURES

T = 16
DOCUMENTS = ([3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5], [8])  # and 4 of padding
PACKED = np.array([[*itertools.chain(*DOCUMENTS), 0, 0, 0, 0], [7] * T], np.int32)
SEGMENTS = np.array([[1] * 5 + [2] * 6 + [3] + [0] * 4, [1] * T], np.int32)

# Every way to place a token, a window and none, layers alike and not.
KINDS = {
    "gemma 2": ARCHITECTURES["gemma 2"],
    "scanned": dict(position="rope", scan_layers=True, remat="full", sliding_window=4),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def made(request):
    return make_model(dataclasses.replace(TINY, block_size=T, **request.param))


def test_positions_start_anew():
    expected = np.array([[*range(5), *range(6), 0, *range(4)], [*range(T)]], np.int32)
    np.testing.assert_array_equal(jax.jit(positions_from_segments)(SEGMENTS), expected, strict=True)


def test_packed_equals_separate(made):
    """A row for each document, padded at its end where no token of it looks, against one row for all."""
    model, params = made
    logits = jax.jit(lambda tokens, segments: model.apply({"params": params}, tokens, segments_BT=segments))
    alone = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    rows = np.array([document + [0] * (T - len(document)) for document in DOCUMENTS], np.int32)
    at, (packed, _), separate = 0, logits(PACKED, SEGMENTS), alone(rows)
    for number, document in enumerate(DOCUMENTS):
        np.testing.assert_allclose(packed[at : at + len(document)], separate[number, : len(document)], **CACHED)
        at += len(document)


def test_the_loss_is_that_of_separate_rows():
    model, params = make_model(dataclasses.replace(TINY, block_size=T, position="rope", n_layer=1))
    loss = jax.jit(lambda batch: make_loss(model)(params, batch, None)[:2])
    here = SEGMENTS[0] > 0
    packed = loss(Batch(PACKED[:1], PACKED[:1], here[None], SEGMENTS[:1]))
    alone = [loss(Batch(row, row)) for row in (np.array([document], np.int32) for document in DOCUMENTS)]
    np.testing.assert_allclose(packed, np.sum(alone, axis=0), **CACHED)


def test_cudnn_gives_way_where_there_are_segments():
    """A run of text keeps that kernel, and is then asked about conversations: the program is the plain one."""
    heads_BTNH = jnp.ones((*SEGMENTS.shape, 2, 8))
    cudnn, plain = (
        jax.make_jaxpr(find_kernel(kernel))(heads_BTNH, heads_BTNH, heads_BTNH, segments_BT=SEGMENTS)
        for kernel in ("cudnn", "plain")
    )
    assert str(cudnn) == str(plain)
