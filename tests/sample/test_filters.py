import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.sample import Sampling, filters
from jaxgpt.sample.filters import SamplingRows, draw, keep_min_p, keep_top_k, keep_top_p

LOGITS = jnp.asarray(np.random.default_rng(0).normal(scale=2.0, size=(5, 11)), jnp.float32)
PROBABILITIES = np.asarray(jax.nn.softmax(LOGITS, axis=-1), np.float64)


def drawn(samplings, logits_BV, draws):
    """Tokens [draws, B], each row drawn by its own sampling, in one program."""
    rows, keys = SamplingRows.stack(samplings), jax.random.split(jax.random.key(0), (draws, len(samplings)))
    return np.asarray(jax.jit(jax.vmap(lambda k: rows.draw(logits_BV, k)))(keys))


def test_what_is_greedy():
    """Also top-k 1, and a nucleus of one."""
    how = [{"greedy": True}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.0}]
    found = drawn([Sampling(**each) for each in how], LOGITS, 20)
    np.testing.assert_array_equal(found, np.broadcast_to(LOGITS.argmax(-1), (20, 5)))


def test_top_k_keeps_k_by_sorting_and_by_bisection(monkeypatch):
    """Of ties, zeros of both signs and infinities too, and where one row has another k, or none."""
    logits_BV = jax.random.normal(jax.random.key(0), (4, 500)).at[0, :9].set(jnp.array([0.0, -0.0, 3.0] * 3))
    logits_BV = logits_BV.at[1, ::2].set(-jnp.inf).at[2].set(jnp.round(logits_BV[2]))
    for k in (128, jnp.array([1, 77, 600, 9])):
        kept = np.asarray(keep_top_k(logits_BV, k))
        monkeypatch.setattr(filters, "SMALL_K", 1)  # any larger k is found by bisection
        np.testing.assert_array_equal(kept.view(np.int32), np.asarray(keep_top_k(logits_BV, k)).view(np.int32))
        monkeypatch.undo()
        floats_BV = np.where(np.signbit(logits_BV) & (logits_BV == 0), -1e-30, logits_BV)  # -0 before 0
        for row, count, held in zip(floats_BV, np.broadcast_to(np.minimum(k, 500), 4), kept, strict=True):
            np.testing.assert_array_equal(held != -np.inf, (row >= np.sort(row)[-count]) & (row > -np.inf))


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_the_nucleus_holds_p_and_is_minimal(p):
    for logits in (LOGITS, jax.random.normal(jax.random.key(3), (2, 5000)) * 3.0):
        kept = np.isfinite(keep_top_p(logits, p))
        for row, probability in zip(kept, np.asarray(jax.nn.softmax(logits, axis=-1), np.float64), strict=True):
            assert probability[row].sum() >= p - 1e-6
            # Without its least likely token it is too small. A float32 sum of 5,000 tokens may be off by 1e-4.
            assert probability[row].sum() - probability[row].min() < 1.0001 * p
            assert probability[row].min() >= probability[~row].max(initial=0.0)
        np.testing.assert_array_equal(keep_top_p(logits, 1.0), logits)


def test_the_nucleus_of_nothing_is_the_likeliest():
    """And equally likely tokens at its edge stay."""
    np.testing.assert_array_equal(np.isfinite(keep_top_p(LOGITS, 0.0)).sum(-1), [1] * 5)
    logits = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2]]))
    np.testing.assert_array_equal(np.isfinite(keep_top_p(logits, 0.4)), [[True, False, False, False]])
    np.testing.assert_array_equal(np.isfinite(keep_top_p(logits, 0.5)), [[True] * 4])


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_min_p_is_its_definition(p):
    kept = np.isfinite(keep_min_p(LOGITS, p))
    np.testing.assert_array_equal(kept, p * PROBABILITIES.max(-1, keepdims=True) * (1 - 1e-6) <= PROBABILITIES)
    assert kept.any(-1).all()


def test_counted_penalties_and_biases_are_their_formula():
    """OpenAI's: less c frequency, less presence if c > 0; c counts the completion, without the prompt."""
    seen = np.zeros(LOGITS.shape, np.int32)
    seen[:, 1], seen[:, 2], seen[:, 3] = 1, 2, 2 * 3 + 1  # in the prompt; drawn once; three times and in the prompt
    how = Sampling(frequency_penalty=0.5, presence_penalty=-1.5, logit_bias=((3, -7.0), (10, 100.0)))
    expected = np.asarray(LOGITS) - np.array([0, 0, 0.5 - 1.5, 1.5 - 1.5, *[0] * 7], np.float32)
    expected += np.array([0, 0, 0, -7, *[0] * 6, 100], np.float32)
    rows = SamplingRows.stack([how, *[Sampling()] * 4])
    after = np.asarray(rows.adjust(LOGITS, seen))
    np.testing.assert_allclose(after[0], expected[0], rtol=1e-6)
    np.testing.assert_array_equal(after[1:], LOGITS[1:])
    np.testing.assert_allclose(SamplingRows.stack([how]).adjust(LOGITS, seen), expected, rtol=1e-6)


def test_the_penalty_makes_seen_tokens_less_likely_and_no_other():
    seen = np.zeros(LOGITS.shape, bool)
    seen[:, ::2] = True
    after = np.asarray(SamplingRows.stack([Sampling(repetition_penalty=1.3)]).adjust(LOGITS, seen))
    np.testing.assert_array_equal(after[~seen], np.asarray(LOGITS)[~seen])
    assert (after[seen] < np.asarray(LOGITS)[seen]).all()
    rows = SamplingRows.stack([Sampling(repetition_penalty=penalty) for penalty in (1.3, 1.0, 1.0, 1.0, 1.0)])
    np.testing.assert_array_equal(rows.adjust(LOGITS, seen)[1:], LOGITS[1:])


def test_frequencies_follow_the_distribution():
    """Chi-squared of 20,000 draws over at most 11 tokens: 99.9% of seeds stay below 29.6. What is out stays out."""
    hows: list[dict] = [{"temperature": 1.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}]
    hows.append({"temperature": 0.8, "top_k": 6, "top_p": 0.95, "min_p": 0.05})
    draws, logits_BV = 20_000, jnp.broadcast_to(LOGITS[:1], (5, 11))
    tokens_RB = drawn([Sampling(**how) for how in hows], logits_BV, draws)
    for row, how in enumerate(hows):
        counts = np.bincount(tokens_RB[:, row], minlength=11)
        logits = LOGITS[:1] / how.get("temperature", 1.0)
        for keep, name in ((keep_top_k, "top_k"), (keep_top_p, "top_p"), (keep_min_p, "min_p")):
            logits = keep(logits, how[name]) if name in how else logits
        expected = np.asarray(jax.nn.softmax(logits[0]), np.float64) * draws
        assert (counts[expected == 0] == 0).all(), how
        inside = expected > 0
        assert ((counts - expected)[inside] ** 2 / expected[inside]).sum() < 29.6, how


def test_a_token_without_weight_is_never_drawn():
    weights_BV = jnp.zeros((1000, 4097)).at[:, 17].set(1e-30).at[:, 4000].set(1e-30)
    tokens_B = draw(weights_BV, jax.random.split(jax.random.key(0), 1000))
    assert set(np.asarray(tokens_B).tolist()) == {17, 4000}


MIXED = [
    Sampling(),
    Sampling(greedy=True, repetition_penalty=1.3),
    Sampling(temperature=0.7, top_k=4),
    Sampling(top_p=0.8, repetition_penalty=0.9, frequency_penalty=0.7, logit_bias=((2, 3.0),)),
    Sampling(temperature=1.4, top_k=6, top_p=0.95, min_p=0.05, presence_penalty=-1.0),
]


def test_each_row_has_its_own_sampling_to_the_bit():
    """Alone, where nobody else's filters run, and among all others, in one program."""
    seen_BV, keys_B = (LOGITS > 0) * 3, jax.random.split(jax.random.key(1), 5)
    draw_rows = jax.jit(lambda rows: (rows.probabilities(LOGITS, seen_BV), rows.draw(LOGITS, keys_B, seen_BV)))
    probabilities_BV, tokens_B = draw_rows(SamplingRows.stack(MIXED))
    for number, sampling in enumerate(MIXED):
        alone_BV, alone_B = draw_rows(SamplingRows.stack([sampling] * 5))
        np.testing.assert_array_equal(probabilities_BV[number], alone_BV[number])
        assert tokens_B[number] == alone_B[number]
    assert draw_rows._cache_size() == 1


def test_extremes_give_probabilities_or_are_refused():
    hows = [
        *({"temperature": 10.0**n} for n in (-320, -38, -7, 0, 18, 38, 300)),
        *({name: 10.0**n} for name in ("top_p", "min_p") for n in (-320, -38, 0)),
        *({"repetition_penalty": 10.0**n, "temperature": 1e-6} for n in (-38, -6, 6, 38)),
        {"repetition_penalty": 1.0 - 1e-16, "top_p": 1.0 - 1e-16, "min_p": 1.0 - 1e-16},
    ]
    taken = []
    for how in hows:
        with contextlib.suppress(UserError):
            taken.append(Sampling(**how))
    assert 4 < len(taken) < len(hows)
    for logits_V in ([0.0, 3.0, 9.0, 4.0], [-200.0, 90.0, 0.0, 1.0]):
        logits_BV = jnp.broadcast_to(jnp.array(logits_V), (len(taken), 4))
        found_BV = SamplingRows.stack(taken).probabilities(logits_BV, jnp.ones(logits_BV.shape, bool))
        np.testing.assert_allclose(found_BV.sum(axis=1), 1.0, rtol=1e-6)
        for sampling, found_V in zip(taken, np.asarray(found_BV), strict=True):
            if sampling.repetition_penalty is None and (sampling.temperature or 1.0) < 1e-3:
                assert found_V.max() == 1.0, sampling
