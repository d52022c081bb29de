"""experiments/zoo/smear.py: shares of the previous token, within its document."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from tests.helpers import FLOAT32_REORDERED, TINY, import_pages, make_model

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
