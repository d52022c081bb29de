import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.loss import next_token_loss


def test_against_the_definition():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    targets = np.array([[0, 4, 2], [1, 1, 3]])
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    nats = -np.log(np.take_along_axis(probability, targets[..., None], -1))
    total, count = next_token_loss(jnp.asarray(logits), jnp.asarray(targets))
    assert float(total) == pytest.approx(nats.sum(), rel=1e-6)
    assert float(count) == 6


def test_masked_targets_do_not_count_whatever_they_are():
    logits = jax.random.normal(jax.random.key(0), (1, 4, 5))
    mask = jnp.array([[True, False, True, False]])
    totals = [
        next_token_loss(logits, jnp.array([[0, poison, 2, poison]]), mask) for poison in (0, -1, 5, 2**30)
    ]  # -1 would be the last class, 5 a NaN
    assert len({(float(t), float(n)) for t, n in totals}) == 1
    alone, two = next_token_loss(logits[:, ::2], jnp.array([[0, 2]]))
    np.testing.assert_allclose(totals[0], (alone, two), rtol=1e-6)


def test_logits_are_summed_in_float32():
    logits = (20.0 * jax.random.normal(jax.random.key(0), (4, 64, 300))).astype(jnp.bfloat16)
    targets = jnp.zeros((4, 64), jnp.int32)
    low, _ = next_token_loss(logits, targets)
    high, _ = next_token_loss(logits.astype(jnp.float32), targets)
    assert low.dtype == jnp.float32
    assert float(low) == float(high)
