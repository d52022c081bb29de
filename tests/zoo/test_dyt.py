"""experiments/zoo/dyt.py: the function, where it stands, and what it starts as."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.optim import label_parameters
from tests.helpers import FLOAT32_REORDERED, TINY, import_pages

(page,) = import_pages("zoo", "dyt")

CONFIG = page.DyTConfig(**dataclasses.asdict(TINY) | dict(first_alpha=0.7, scan_layers=True))


def test_the_function_and_the_dtype():
    rng = np.random.default_rng(0)
    x, scale, bias = rng.normal(size=(2, 3, 4)), rng.normal(size=4), rng.normal(size=4)
    out = page.dynamic_tanh(*map(jnp.float32, (x, 0.7, scale, bias)))
    np.testing.assert_allclose(out, scale * np.tanh(0.7 * x) + bias, **FLOAT32_REORDERED)
    assert page.dynamic_tanh(jnp.bfloat16(x), *map(jnp.float32, (0.7, scale, bias))).dtype == jnp.bfloat16


def test_it_stands_for_every_norm_of_the_stream_and_starts_as_the_paper_says():
    model = CONFIG.make_model()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    block = params["h"]["block"]
    for norm in (block["ln_1"], block["ln_2"], params["ln_f"]):
        assert set(norm) == {"alpha", "scale", "bias"}
        np.testing.assert_allclose(norm["alpha"], 0.7, rtol=1e-6)
    assert float(params["embedding_scale"]) == np.float32(math.sqrt(CONFIG.n_embd))
    labels = label_parameters(params, CONFIG.label_parameter)
    assert set(labels["h"]["block"]["ln_1"].values()) == {"vector"} and labels["embedding_scale"] == "vector"
    x_BTD = model.apply({"params": params}, jnp.array([[3]]), jnp.array([[0]]), method="embed")
    expected = params["wte"]["embedding"][3] + params["wpe"]["embedding"][0]
    np.testing.assert_allclose(x_BTD[0, 0], math.sqrt(CONFIG.n_embd) * expected, **FLOAT32_REORDERED)
    with pytest.raises(UserError, match="learned factor"):
        dataclasses.replace(CONFIG, scale_embeddings=True)
