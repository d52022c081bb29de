import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.data.tokenizer import ByteTokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.sample.score import _logprobs, loglikelihood, pair_ids, score, score_prompt
from tests.conftest import TEXT
from tests.helpers import FLOAT32_REORDERED, TINY, apply, make_model

ONE = dataclasses.replace(TINY, n_layer=1)


def test_each_token_given_those_before_it_and_at_least_half_a_window():
    model, params = make_model(ONE)
    C = TINY.block_size
    texts = [np.random.default_rng(n).integers(0, 11, n).tolist() for n in (3, C, C + 1, C + 2, 5 * C + 3)]
    for text, got in zip(texts, score(model, params, texts), strict=True):
        assert len(got) == len(text) and np.isnan(got[0])
        first = 0
        for i in range(1, len(text)):
            if i - first > C:  # the window that scores token i begins half a context later
                first += C // 2
            window = text[first:i]
            padded = jnp.array([window + [0] * (C - len(window))])
            logprobs_V = jax.nn.log_softmax(apply(model, params, padded)[0, len(window) - 1])
            np.testing.assert_allclose(got[i], logprobs_V[text[i]], rtol=1e-4, atol=1e-4)


def test_little_nothing_and_too_much():
    model, params = make_model(dataclasses.replace(ONE, block_size=1))
    none, one, three = score(model, params, [[], [5], [5, 1, 2]])
    assert len(none) == 0 and np.isnan(one).all() and np.isfinite(three[1:]).all()
    with pytest.raises(UserError, match="text 0 has ids from 3 to 11"):
        score(model, params, [[3, 11]])


def test_likelihoods_are_sums_of_what_the_model_says_of_each_token():
    """Of contexts that fit, that are cut to fit, and of a continuation longer than a context; in any batch."""
    model, params = make_model(ONE)
    C = TINY.block_size
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (3, 2), (C, 1), (C - 3, 3), (C, 3), (5 * C, C), (2 * C, 2), (4, C + 3)]
    pairs = [tuple(rng.integers(0, 11, n).tolist() for n in both) for both in sizes]
    # Endings that greedy decoding writes: the likeliest token, and the likeliest one after it.
    for before, new in pairs[:3]:
        for at in range(len(new)):
            text = [*before, *new[:at]][-C:]
            new[at] = int(apply(model, params, jnp.array([text + [0] * (C - len(text))]))[0, len(text) - 1].argmax())
    compiled = _logprobs._cache_size()
    found = loglikelihood(model, params, pairs)
    assert _logprobs._cache_size() <= compiled + 1
    for (before, new), got in zip(pairs, found, strict=True):
        text = [*before, *new][-max(C, len(new)) - 1 :]
        (logprobs,) = score(model, params, [text])
        np.testing.assert_allclose(got.logprob, logprobs[-len(new) :].sum(), rtol=1e-5)
    assert [got.is_greedy for got in found] == [True] * 3 + [False] * 5
    for got, alone in zip(found, loglikelihood(model, params, pairs[::-1], batch_size=3)[::-1], strict=True):
        assert got.is_greedy == alone.is_greedy and got.logprob == pytest.approx(alone.logprob, rel=1e-5)


def test_a_pair_is_its_text_cut_before_the_spaces():
    tokenizer = train_bpe([TEXT], 300)
    for context, continuation in (("of La Mancha", " the name"), ("of La Mancha  ", "the name"), ("keep a", "n old")):
        before, new = pair_ids(tokenizer, context, continuation)
        assert before == tokenizer.encode(context.rstrip()).tolist()
        assert new == tokenizer.encode(context + continuation).tolist()[len(before) :]
    assert pair_ids(tokenizer, "", "a") == ([tokenizer.end_of_text], tokenizer.encode("a").tolist())
    assert pair_ids(ByteTokenizer(), "  ", "a") == ([10], [32, 32, 97])
    for context, continuation in (("a", ""), ("keep a lan", "ce")):  # "lance" is one token
        with pytest.raises(UserError, match=f"{continuation!r} adds no token to the context"):
            pair_ids(tokenizer, context, continuation)


def test_the_scores_of_a_prompt_are_those_of_score_with_the_best_tokens_beside():
    model, params = make_model(dataclasses.replace(ONE, block_size=100))
    ids = np.random.default_rng(0).integers(0, 11, 100).tolist()
    found = score_prompt(model, params, ids, top=4, vocab_size=9)
    (expected,) = score(model, params, [ids])
    np.testing.assert_allclose(found.logprobs, expected, **FLOAT32_REORDERED)
    logprobs_TV = jax.nn.log_softmax(apply(model, params, np.array([ids]))[0])
    expected_TK, best_TK = jax.lax.top_k(logprobs_TV[:-1, :9], 4)
    assert found.top[0] == [] and [[i for i, _ in row] for row in found.top[1:]] == best_TK.tolist()
    np.testing.assert_allclose([[p for _, p in row] for row in found.top[1:]], expected_TK, rtol=1e-5)
