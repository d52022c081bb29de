import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.sample.filters import Sampling, keep_top_k, keep_top_p

LOGITS = jnp.asarray(np.random.default_rng(0).normal(scale=2.0, size=(5, 11)), jnp.float32)
PROBABILITIES = np.asarray(jax.nn.softmax(LOGITS, axis=-1), np.float64)


def draw(sampling, draws=1):
    keys = jax.random.split(jax.random.key(0), (draws, len(LOGITS)))
    return np.asarray(jax.vmap(lambda k: sampling.draw(LOGITS, k))(keys))


@pytest.mark.parametrize(
    "sampling", [Sampling(greedy=True), Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_p=1e-6)]
)
def test_what_is_greedy(sampling):
    """Also top-k 1, and a nucleus of one."""
    np.testing.assert_array_equal(draw(sampling, 20), np.broadcast_to(LOGITS.argmax(-1), (20, 5)))


def test_top_k_keeps_k():
    for k in (1, 3, 11, 50):
        kept = np.isfinite(keep_top_k(LOGITS, k))
        assert (kept.sum(-1) == min(k, 11)).all()
        assert (np.where(kept, LOGITS, np.inf).min(-1) >= np.where(kept, -np.inf, LOGITS).max(-1)).all()


def test_top_p_1_is_the_identity():
    np.testing.assert_array_equal(keep_top_p(LOGITS, 1.0), LOGITS)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99])
def test_the_nucleus_holds_p_and_is_minimal(p):
    kept = np.isfinite(keep_top_p(LOGITS, p))
    for row, probability in zip(kept, PROBABILITIES, strict=True):
        assert probability[row].sum() >= p - 1e-6
        assert probability[row].sum() - probability[row].min() < p  # without its least likely token it is too small
        assert probability[row].min() >= probability[~row].max(initial=0.0)


def test_frequencies_follow_the_distribution():
    """Chi-squared of 20,000 draws over 11 tokens: 99.9% of seeds stay below 29.6."""
    draws = 20_000
    counts = np.bincount(draw(Sampling(temperature=1.5), draws)[:, 0], minlength=11)
    expected = np.asarray(jax.nn.softmax(LOGITS[0] / 1.5), np.float64) * draws
    assert ((counts - expected) ** 2 / expected).sum() < 29.6


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        (dict(temperature=-1.0), "temperature=-1.0"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.5), "top_p=1.5"),
    ],
)
def test_what_is_out_of_range_is_told(kwargs, said):
    with pytest.raises(UserError, match=said):
        Sampling(**kwargs)
