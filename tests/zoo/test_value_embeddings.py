"""experiments/zoo/value_embeddings.py: which layers have tables, what they add, remat."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.layers import Attention
from jaxgpt.optim import label_parameters
from tests.helpers import FLOAT32_REORDERED, TINY, import_pages, make_model

(page,) = import_pages("zoo", "value_embeddings")

CONFIG = page.ValueConfig(
    **dataclasses.asdict(TINY) | dict(n_layer=3, n_head=4, n_kv_head=2, gate_width=3, position="rope", norm="rmsnorm")
)


def test_values_take_in_the_gated_embedding():
    model, params = make_model(CONFIG)
    attention, plain = (CONFIG.make_attention(layer, model.compute) for layer in (2, 1))
    assert type(plain) is Attention
    own = params["h_2"]["attn"]
    rng = np.random.default_rng(0)
    x_BTD, values_BTF = (jnp.asarray(rng.normal(size=(2, 6, size)), jnp.float32) for size in (8, 4))
    out_BTD = attention.apply({"params": own}, x_BTD, values_BTF=values_BTF)
    gate_BTK = 2 / (1 + np.exp(-np.asarray(x_BTD)[..., :3] @ np.asarray(own["gate"]["kernel"])))
    plain = plain.bind({"params": {name: value for name, value in own.items() if name != "gate"}})
    q_BTNH, k_BTKH, v_BTKH = plain.project(x_BTD, None)
    v_BTKH = v_BTKH + gate_BTK[..., None] * np.asarray(values_BTF).reshape(2, 6, 2, 2)
    expected_BTD = plain.merge_heads(plain.attend(q_BTNH, k_BTKH, v_BTKH))
    np.testing.assert_allclose(out_BTD, expected_BTD, **FLOAT32_REORDERED)


def test_every_second_layer_from_the_last_has_a_table_and_adamw_trains_it():
    _, params = make_model(CONFIG)
    assert ["gate" in params[f"h_{layer}"]["attn"] for layer in range(3)] == [True, False, True]
    assert params["value_1"]["embedding"].shape == (CONFIG.vocab_size, 4) and "value_2" not in params
    labels = label_parameters(params, CONFIG.label_parameter)
    assert labels["value_0"]["embedding"] == "table" and labels["h_0"]["attn"]["gate"]["kernel"] == "matrix"
    for refused in (dict(scan_layers=True), dict(norm_position="post"), dict(parallel_residual=True)):
        with pytest.raises(UserError, match="separate layers"):
            dataclasses.replace(CONFIG, **refused)


def test_each_token_reads_the_row_of_its_own_and_remat_changes_nothing():
    model, params = make_model(CONFIG)
    tokens = jnp.array([[3, 1, 4, 1]])

    def loss(params, model):
        return jnp.sum(jnp.sin(model.apply({"params": params}, tokens)))

    grads = jax.jit(jax.grad(loss), static_argnums=1)(params, model)
    read = np.abs(grads["value_0"]["embedding"]).sum(axis=-1) > 0
    np.testing.assert_array_equal(np.flatnonzero(read), [1, 3, 4])
    kept = dataclasses.replace(CONFIG, remat="full").make_model()
    again = jax.jit(jax.grad(loss), static_argnums=1)(params, kept)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **FLOAT32_REORDERED), grads, again)
