"""experiments/zoo/gated_deltanet.py: the rule token by token, chunks, documents, who gets Muon."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.optim import label_parameters
from tests.helpers import FLOAT32_REORDERED, TINY, apply, import_pages, make_model

(page,) = import_pages("zoo", "gated_deltanet")

CONFIG = page.GatedDeltaNetConfig(
    **dataclasses.asdict(TINY)
    | dict(n_key_head=1, n_value_head=2, key_size=4, value_size=6, conv_size=3, chunk=4, norm="rmsnorm")
)
B, T, N, H, F = 2, 11, 2, 4, 6
IS_FIRST = np.zeros((B, T), bool)
IS_FIRST[0, [0, 5, 6]] = True  # and row 1 goes on with the state that it was given


def draw_inputs(seed=0):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(B, T, N, H)) for _ in "qk")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = rng.normal(size=(B, T, N, F)), rng.normal(size=(B, N, H, F))
    log_decay, beta = -rng.exponential(size=(B, T, N)), rng.uniform(size=(B, T, N))
    return q, k, v, log_decay, beta, IS_FIRST, state


def rule_token_by_token(q, k, v, log_decay, beta, is_first, state):
    """The definition: S <- a (I - b k k') S + b k v'."""
    state, out = state.copy(), np.zeros(v.shape)
    for b, t, n in np.ndindex(B, T, N):
        S = 0 * state[b, n] if is_first[b, t] else state[b, n]
        key = k[b, t, n]
        erase = np.eye(H) - beta[b, t, n] * np.outer(key, key)
        state[b, n] = np.exp(log_decay[b, t, n]) * erase @ S + beta[b, t, n] * np.outer(key, v[b, t, n])
        out[b, t, n] = q[b, t, n] @ state[b, n]
    return out, state


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_rule_in_chunks_is_the_rule_token_by_token(chunk):
    inputs = draw_inputs()
    rule = jax.jit(functools.partial(page.gated_delta_rule, chunk=chunk))
    out_BTNF, state_BNHF = rule(*(jnp.asarray(x, jnp.float32 if x.dtype == float else bool) for x in inputs))
    expected_out, expected_state = rule_token_by_token(*inputs)
    np.testing.assert_allclose(out_BTNF, expected_out, **FLOAT32_REORDERED)
    np.testing.assert_allclose(state_BNHF, expected_state, **FLOAT32_REORDERED)


def make_mixer():
    model, params = make_model(CONFIG)
    return model.config.make_attention(0, model.compute), params["h_0"]["attn"]


def test_documents_in_one_row_do_not_read_each_other():
    mixer, params = make_mixer()
    x_BTD = jax.random.normal(jax.random.key(1), (1, 9, CONFIG.n_embd))
    positions_BT = jnp.array([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    run = jax.jit(mixer.apply)
    both_BTD = run({"params": params}, x_BTD, positions_BT)
    for part in (slice(0, 5), slice(5, 9)):
        alone_BTD = run({"params": params}, x_BTD[:, part], positions_BT[:, part])
        np.testing.assert_allclose(both_BTD[:, part], alone_BTD, **FLOAT32_REORDERED)


def test_every_second_layer_attends_and_all_in_one_block_if_none_does():
    model, params = make_model(dataclasses.replace(CONFIG, attend_every=2))
    assert ["conv" in params[f"h_{layer}"]["attn"] for layer in range(2)] == [True, False]
    with pytest.raises(UserError, match="without attend_every"):
        dataclasses.replace(CONFIG, attend_every=2, scan_layers=True)
    with pytest.raises(UserError, match="must divide"):
        dataclasses.replace(CONFIG, n_key_head=2, n_value_head=3)
    scanned, stacked = make_model(dataclasses.replace(CONFIG, scan_layers=True, remat="full"))
    logits = apply(scanned, stacked, jnp.arange(8)[None])
    loop = {f"h_{layer}": jax.tree.map(lambda x, layer=layer: x[layer], stacked["h"]["block"]) for layer in range(2)}
    model = CONFIG.make_model()
    looped = apply(model, {k: v for k, v in stacked.items() if k != "h"} | loop, jnp.arange(8)[None])
    np.testing.assert_allclose(logits, looped, **FLOAT32_REORDERED)


def test_muon_takes_the_matrices_but_not_the_convolution():
    _, params = make_model(CONFIG)
    labels = label_parameters(params, CONFIG.label_parameter)["h_0"]["attn"]
    assert labels["conv"] == labels["log_rate"] == "vector"
    assert labels["gate"]["kernel"] == labels["decay"]["kernel"] == "matrix"
