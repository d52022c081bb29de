"""experiments/zoo/ngram_embeddings.py: rows of n-grams, exact and hashed; documents; cached decoding."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.sample.cache import can_cache
from tests.helpers import FLOAT32_REORDERED, TINY, import_pages, make_model
from tests.zoo.decoding import check_decoding, find_reach

(page,) = import_pages("zoo", "ngram_embeddings")

V = TINY.vocab_size
CONFIG = page.NGramConfig(**dataclasses.asdict(TINY) | dict(n_layer=1, max_order=3, most_rows=V**2))


def test_n_grams_that_fit_have_a_row_each_and_others_spread_evenly():
    every = jnp.array(list(itertools.product(range(V), repeat=2)))
    assert len(set(page.ngram_rows(every, 2, V, V**2)[:, 0].tolist())) == V**2
    every = jnp.array(list(itertools.product(range(32), repeat=3)))
    counts = np.bincount(page.ngram_rows(every, 3, 32, 4096)[:, 0], minlength=4096)
    assert len(counts) == 4096 and counts.sum() == 32**3
    assert 4 < counts.var() < 12  # 8 to a row: Poisson's variance is 8
    # Tokens that are equal in their low bits have different rows all the same.
    pairs = jnp.stack([jnp.arange(4096), jnp.arange(4096)[::-1]], axis=1)
    near, far = (page.ngram_rows(pairs + offset, 2, 50_000, 4096) for offset in (0, 4096))
    assert jnp.mean(near == far) < 0.01


def test_the_embedding_is_the_sum_of_the_rows_within_the_document():
    model, params = make_model(CONFIG)
    tokens, positions = np.array([3, 1, 4, 1, 5, 2]), np.array([0, 1, 2, 0, 1, 2])
    arrays = jnp.asarray(tokens)[None], jnp.asarray(positions)[None]
    out = model.apply({"params": params}, *arrays, method="embed")[0]
    pairs, triples = (np.asarray(params["ngrams"][f"tables_{i}"]["embedding"]) for i in range(2))
    expected = np.asarray(params["wte"]["embedding"])[tokens] + np.asarray(params["wpe"]["embedding"])[positions]
    for t in (1, 2, 4, 5):
        expected[t] += pairs[V * tokens[t - 1] + tokens[t]]
    for t in (2, 5):
        row = page.ngram_rows(jnp.asarray(tokens[None, t - 2 : t + 1]), 3, V, V**2)[0, 0]
        expected[t] += triples[row]
    np.testing.assert_allclose(out, expected, **FLOAT32_REORDERED)


def test_cached_decoding_is_the_whole_pass():
    model, params = make_model(CONFIG)
    ngrams = page.NGrams(CONFIG.n_embd, V, CONFIG.max_order, CONFIG.most_rows)
    check_decoding(ngrams, params["ngrams"], jax.random.randint(jax.random.key(1), (2, 10), 0, V))
    assert can_cache(model, params)


def test_a_token_reads_itself_and_those_before_it():
    np.testing.assert_array_equal(find_reach(*make_model(CONFIG), 6), np.tri(6, dtype=bool))
