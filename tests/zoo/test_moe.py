"""experiments/zoo/moe.py: against a loop over tokens, both grouped products and their gradients, what it sows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.layers.block import Compute
from tests.helpers import FLOAT32_REORDERED, TINY, import_pages

(moe,) = import_pages("zoo", "moe")

CONFIG = moe.MoEConfig(**dataclasses.asdict(TINY) | dict(bias=False, activation="swiglu"), n_expert=5, expert_dim=12)
INPUT = jax.random.normal(jax.random.key(0), (3, 7, 8))


def make(config):
    module = config.make_mlp(config.n_layer - 1, Compute())
    params = module.init(jax.random.key(1), INPUT)["params"]
    return module, jax.tree.map(lambda p: p + 0.5 * jax.random.normal(jax.random.key(p.size), p.shape), params)


def by_loop(config, params, x_UD):
    """Return the output in float64, one token and one expert at a time, and the probabilities of all experts."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    out_UD, scores_UE = np.zeros_like(x_UD), np.zeros((len(x_UD), config.n_expert))
    for u, x_D in enumerate(x_UD):
        logits_E = x_D @ p["router"]["kernel"]
        scores_UE[u] = np.exp(logits_E - logits_E.max()) / np.exp(logits_E - logits_E.max()).sum()
        chosen = np.argsort(-scores_UE[u])[: config.top_k]
        total = scores_UE[u, chosen].sum() if config.normalise_top_k else 1.0
        for e in chosen:
            gate_F, fc_F = x_D @ p["c_gate"][e], x_D @ p["c_fc"][e]
            out_D = (gate_F / (1 + np.exp(-gate_F)) * fc_F) @ p["c_proj"][e]
            out_UD[u] += config.expert_scale * scores_UE[u, e] / total * out_D
        if config.shared_dim:
            gate_F, fc_F = x_D @ p["shared"]["c_gate"]["kernel"], x_D @ p["shared"]["c_fc"]["kernel"]
            shared_D = (gate_F / (1 + np.exp(-gate_F)) * fc_F) @ p["shared"]["c_proj"]["kernel"]
            out_UD[u] += shared_D / (1 + np.exp(-x_D @ p["shared_gate"]["kernel"])) if config.shared_gate else shared_D
    return out_UD, scores_UE


@pytest.mark.parametrize("grouped", ["ragged_dot", "blocks"])
@pytest.mark.parametrize(
    "options",
    [{}, {"normalise_top_k": False, "expert_scale": 2.5, "shared_dim": 6}, {"shared_dim": 4, "shared_gate": True}],
    ids=["qwen3", "shared", "gated"],
)
def test_each_token_has_its_experts(grouped, options):
    config = dataclasses.replace(CONFIG, grouped=grouped, **options)
    module, params = make(config)
    out_BTD, sown = module.apply({"params": params}, INPUT, mutable=["losses", "metrics"])
    expected_UD, scores_UE = by_loop(config, params, np.asarray(INPUT, np.float64).reshape(-1, 8))
    np.testing.assert_allclose(out_BTD.reshape(-1, 8), expected_UD, rtol=1e-4, atol=1e-4)
    share_E = np.bincount(np.argsort(-scores_UE, axis=1)[:, :2].ravel(), minlength=5) / (2 * len(scores_UE))
    np.testing.assert_allclose([sown["metrics"][f"expert_{e}"][0] for e in range(5)], share_E, rtol=1e-6)
    balance = 0.01 * 5 * (share_E * scores_UE.mean(axis=0)).sum()
    np.testing.assert_allclose(sown["losses"]["balance"][0], balance, rtol=1e-5)


@pytest.mark.parametrize("grouped", ["ragged_dot", "blocks"])
def test_gradients_of_the_grouped_products(grouped):
    """Against one product for each row, with an expert that no token chose. ragged_dot's gradient is checked, not believed."""
    experts_UC = jnp.array([[4, 0], [4, 1], [4, 3], [0, 4], [3, 1], [1, 0]])
    keys = jax.random.split(jax.random.key(1), 5)
    x_UD, weights_UC = jax.random.normal(keys[0], (6, 5)), jax.random.uniform(keys[1], (6, 2))
    shapes = {"c_fc": (5, 5, 3), "c_gate": (5, 5, 3), "c_proj": (5, 3, 5)}
    kernels = {name: jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys[2:], strict=True)}

    def by_row(x_UD, weights_UC, kernels):
        fc, gate, proj = (kernels[name][experts_UC] for name in ("c_fc", "c_gate", "c_proj"))
        h_UCF = jax.nn.silu(jnp.einsum("UD,UCDF->UCF", x_UD, gate)) * jnp.einsum("UD,UCDF->UCF", x_UD, fc)
        return jnp.sum(jnp.sin(jnp.einsum("UCF,UCFD,UC->UD", h_UCF, proj, weights_UC)))

    def by_group(x_UD, weights_UC, kernels):
        return jnp.sum(jnp.sin(moe.run_experts(x_UD, weights_UC, experts_UC, kernels, "swiglu", grouped)))

    found, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(x_UD, weights_UC, kernels) for f in (by_group, by_row)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32_REORDERED), found, expected)
    assert not found[1][2]["c_fc"][2].any()
