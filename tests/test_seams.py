"""Architectures of a user's own: a subclass of GPTConfig that overrides one `make_` method. And the plain `generate`."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxgpt
from jaxgpt import plain_generate
from jaxgpt.batch import Batch
from jaxgpt.config import GPTConfig, OptimConfig
from jaxgpt.loss import make_loss
from jaxgpt.optim import make_optimizer
from jaxgpt.train import init_state
from tests.helpers import FLOAT32_REORDERED, TINY, apply, make_model, stack_layers, tokens_BT


class Experts(nn.Module):
    """A soft mixture of experts."""

    n_expert: int
    hidden: int

    @nn.compact
    def __call__(self, x_BTD, *, train=False):
        D, init = x_BTD.shape[-1], nn.initializers.normal(0.3)
        up_EDF = self.param("up", init, (self.n_expert, D, self.hidden))
        down_EFD = self.param("down", init, (self.n_expert, self.hidden, D))
        gates_BTE = jax.nn.softmax(nn.Dense(self.n_expert, name="router")(x_BTD))
        h_BTEF = jax.nn.relu(jnp.einsum("BTD,EDF->BTEF", x_BTD, up_EDF))
        return jnp.einsum("BTEF,EFD,BTE->BTD", h_BTEF, down_EFD, gates_BTE)


class Distance(nn.Module):
    """One head whose scores fall with the distance (ALiBi), by a slope of the layer."""

    slope: float

    @nn.compact
    def __call__(self, x_BTD, positions_BT=None, *, segments_BT=None, train=False):
        q_BTD, k_BTD, v_BTD = jnp.split(nn.Dense(3 * x_BTD.shape[-1], name="qkv")(x_BTD), 3, axis=-1)
        T = jnp.arange(x_BTD.shape[1])
        distance_TS = (T[:, None] - T[None]).astype(jnp.float32)
        scores_BTS = jnp.einsum("BTD,BSD->BTS", q_BTD, k_BTD) - self.slope * distance_TS[None]
        return jnp.einsum("BTS,BSD->BTD", jax.nn.softmax(jnp.where(distance_TS[None] < 0, -jnp.inf, scores_BTS)), v_BTD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig(GPTConfig):
    n_expert: int = 3

    def make_mlp(self, layer, compute):
        return Experts(n_expert=self.n_expert, hidden=self.explicit().mlp_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceConfig(GPTConfig):
    def make_attention(self, layer, compute):
        return Distance(slope=0.5)


FOREIGN = {
    "mlp": ExpertConfig(**dataclasses.asdict(TINY)),
    "attention": DistanceConfig(**dataclasses.asdict(TINY)),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("how", [{"scan_layers": True, "remat": "dots"}])
def test_a_piece_of_ones_own_is_scanned_and_recomputed_as_others_are(kind, how):
    """The same loss and gradients, of parameters that are its own; and what it initialises is trained."""
    config = FOREIGN[kind]
    model, params = make_model(config)
    assert ("up" in params["h_1"]["mlp"]) == (kind == "mlp") and ("q" in params["h_1"]["attn"]) == (kind == "mlp")
    tokens = tokens_BT(config)
    batch = Batch(inputs_BT=tokens, targets_BT=jnp.roll(tokens, -1, axis=1))
    other = dataclasses.replace(config, **how).make_model()

    def stacked(params):
        return stack_layers(params, config.n_layer) if other.config.scan_layers else params

    def loss(params, model):
        return make_loss(model)(params, batch, None)[0]

    expected, grads = jax.jit(jax.value_and_grad(lambda params: loss(params, model)))(params)
    found, found_grads = jax.jit(jax.value_and_grad(lambda params: loss(params, other)))(stacked(params))
    np.testing.assert_allclose(found, expected, **FLOAT32_REORDERED)
    chex.assert_trees_all_close(found_grads, stacked(grads), **FLOAT32_REORDERED)
    state = jax.eval_shape(lambda: init_state(other, make_optimizer(OptimConfig(), 10), jax.random.key(0)))
    chex.assert_trees_all_equal_shapes(state.params, stacked(params))


def test_an_attention_without_keys_and_values_is_sampled_by_computing_again(caplog):
    """The engine then draws what the plain `generate` does, on which the whole forward pass is the judge."""
    model, params = make_model(FOREIGN["attention"])
    found = plain_generate.generate(
        model, params, jnp.asarray([[1, 2, 3]]), jax.random.key(0), max_new_tokens=5, temperature=0.0
    )
    for t in range(3, 8):
        assert found[0, t] == apply(model, params, found[:, :t])[0, -1].argmax()
    greedy = jaxgpt.Sampling(greedy=True)
    prompts = [[1, 2, 3], [4, 4, 10, 1, 1]]
    drawn = jaxgpt.generate(model, params, prompts, key=jax.random.key(0), max_new_tokens=5, sampling=greedy)
    assert drawn.tokens[0] == found[0, 3:].tolist()
    assert "DistanceConfig: each token computes its context again" in caplog.text


def test_the_plain_generate_is_the_engine_without_a_cache():
    model, params = make_model(dataclasses.replace(TINY, block_size=16, position="rope"))
    prompts, key = [[1, 2, 3], [4, 4, 10]], jax.random.key(0)
    sampling = jaxgpt.Sampling(greedy=True)
    expected = jaxgpt.generate(model, params, prompts, key=key, max_new_tokens=12, sampling=sampling).tokens
    found = plain_generate.generate(model, params, jnp.asarray(prompts), key, max_new_tokens=12, temperature=0.0)
    assert found[:, 3:].tolist() == expected and found[:, :3].tolist() == prompts
    top = plain_generate.generate(model, params, jnp.asarray(prompts), key, max_new_tokens=30, top_k=1)
    np.testing.assert_array_equal(top[:, :15], found)
    assert top.shape == (2, 33)  # past the context, too
