"""experiments/zoo/multi_token_prediction.py: which targets, which weights, validation without heads, cached decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.loss import chunked_next_token_loss
from tests.helpers import FLOAT32_REORDERED, TINY, import_pages, make_model

(page,) = import_pages("zoo", "multi_token_prediction")

CONFIG = page.FutureConfig(**dataclasses.asdict(TINY) | dict(n_layer=1, n_future=2, norm="rmsnorm"))
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, size=(2, 9))
BATCH = Batch(
    jnp.asarray(TOKENS[:, :-1]),
    jnp.asarray(TOKENS[:, 1:]),
    jnp.array([[True] * 6 + [False, True], [True] * 8]),
    jnp.array([[1] * 5 + [2] * 3, [1] * 8]),
)


def test_the_loss_is_the_next_token_s_plus_those_of_the_heads():
    model, params = make_model(CONFIG)
    head_loss = functools.partial(chunked_next_token_loss, chunk=4)
    loss = jax.jit(page.FutureObjective(weight=0.5).make_loss(model, head_loss=head_loss))
    nats, count, metrics = loss(params, BATCH, jax.random.key(0))

    def mean_nats(x_BTD, targets_BT, mask_BT):
        logits = jax.nn.log_softmax(model.apply({"params": params}, x_BTD, method="unembed"))
        return -jnp.take_along_axis(logits, targets_BT[..., None], axis=-1)[..., 0][mask_BT].mean()

    bound = model.bind({"params": params})
    x_BTD = bound.hidden_states(BATCH.inputs_BT, segments_BT=BATCH.segments_BT)
    expected = mean_nats(x_BTD, BATCH.targets_BT, BATCH.mask_BT)
    stream_BTD = bound.embed(BATCH.inputs_BT, jnp.array([[0, 1, 2, 3, 4, 0, 1, 2], range(8)]))
    positions_BT = jnp.array([[0, 1, 2, 3, 4, 0, 1, 2], range(8)])
    for block in bound.h:
        stream_BTD = block(stream_BTD, positions_BT, segments_BT=BATCH.segments_BT)
    for head in range(2):
        head_BTD = bound.ln_f(bound.h_future[head](stream_BTD, positions_BT, segments_BT=BATCH.segments_BT))
        later = mean_nats(head_BTD, *page.later_targets(BATCH, head + 1))
        np.testing.assert_allclose(metrics[f"future_{head + 2}"] / count, later, **FLOAT32_REORDERED)
        expected += 0.5 * later
    np.testing.assert_allclose(nats / count, expected, **FLOAT32_REORDERED)
