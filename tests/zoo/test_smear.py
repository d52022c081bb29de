"""experiments/zoo/smear.py: shares of the previous token, within its document; cached decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.sample.cache import can_cache
from tests.helpers import FLOAT32_REORDERED, TINY, import_pages, make_model
from tests.zoo.decoding import check_decoding, find_reach

(page,) = import_pages("zoo", "smear")

CONFIG = page.SmearConfig(**dataclasses.asdict(TINY) | dict(n_layer=1, gate_width=3, norm="rmsnorm"))


def test_an_embedding_takes_in_its_share_of_the_one_before_in_the_same_document():
    model, params = make_model(CONFIG)
    tokens = jnp.array([[3, 1, 4, 1, 5, 2]])
    positions = np.array([0, 1, 2, 0, 1, 2])
    out = model.apply({"params": params}, tokens, jnp.asarray(positions)[None], method="embed")[0]
    x = (
        np.asarray(params["wte"]["embedding"])[np.asarray(tokens[0])]
        + np.asarray(params["wpe"]["embedding"])[positions]
    )
    expected = x.copy()
    for t in (1, 2, 4, 5):
        gate = 1 / (1 + np.exp(-x[t, :3] @ np.asarray(params["smear"]["gate"]["kernel"])))
        expected[t] += np.asarray(params["smear"]["scale"]) * gate * x[t - 1]
    np.testing.assert_allclose(out, expected, **FLOAT32_REORDERED)


def test_cached_decoding_is_the_whole_pass():
    model, params = make_model(CONFIG)
    smear = page.Smear(CONFIG.n_embd, 3)
    check_decoding(smear, params["smear"], jax.random.normal(jax.random.key(1), (2, 10, CONFIG.n_embd)))
    assert can_cache(model, params)


def test_a_token_reads_itself_and_those_before_it():
    np.testing.assert_array_equal(find_reach(*make_model(CONFIG), 6), np.tri(6, dtype=bool))
