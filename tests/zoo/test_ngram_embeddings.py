"""experiments/zoo/ngram_embeddings.py: rows of n-grams, exact and hashed; documents."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np

from tests.helpers import FLOAT32_REORDERED, TINY, import_pages, make_model

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
