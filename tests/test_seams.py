"""Architectures of a user's own: a subclass of GPTConfig that overrides one `make_` method."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxgpt
from jaxgpt import plain_generate
from jaxgpt.batch import Batch
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment, TrainConfig
from jaxgpt.interventions.model import place_shapes
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.kernels.plain import plain_attention
from jaxgpt.lora import LoraConfig
from jaxgpt.loss import chunked_next_token_loss, make_loss
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig, make_optimizer
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.train import init_state
from tests.helpers import FLOAT32_REORDERED, TINY, apply, make_model, stack_layers, tokens_BT
from tests.own.pieces import DistanceConfig, ExpertConfig

EXPERTS = ExpertConfig(**dataclasses.asdict(TINY))


def test_a_piece_of_ones_own_is_scanned_and_recomputed_as_others_are():
    """The same loss and gradients, of parameters that are its own; and what it initialises is trained."""
    config, how = EXPERTS, {"scan_layers": True, "remat": "dots"}
    model, params = make_model(config)
    assert "up" in params["h_1"]["mlp"] and "q" in params["h_1"]["attn"]
    tokens = tokens_BT(config)
    batch = Batch(inputs_BT=tokens, targets_BT=jnp.roll(tokens, -1, axis=1))
    other = dataclasses.replace(config, **how).make_model()

    def stacked(params):
        return stack_layers(params, config.n_layer)

    def loss(params, model):
        return make_loss(model)(params, batch, None)[0]

    expected, grads = jax.jit(jax.value_and_grad(lambda params: loss(params, model)))(params)
    found, found_grads = jax.jit(jax.value_and_grad(lambda params: loss(params, other)))(stacked(params))
    np.testing.assert_allclose(found, expected, **FLOAT32_REORDERED)
    chex.assert_trees_all_close(found_grads, stacked(grads), **FLOAT32_REORDERED)
    state = jax.eval_shape(lambda: init_state(other, make_optimizer(OptimConfig(), 10), jax.random.key(0)))
    chex.assert_trees_all_equal_shapes(state.params, stacked(params))


def test_a_class_that_claims_no_cache_is_sampled_by_computing_again(caplog):
    """The engine then draws what the plain `generate` does, on which the whole forward pass is the judge."""
    model, params = make_model(dataclasses.replace(DistanceConfig(**dataclasses.asdict(TINY)), n_layer=1))
    found = plain_generate.generate(
        model, params, jnp.asarray([[1, 2, 3]]), jax.random.key(0), max_new_tokens=5, temperature=0.0
    )
    whole_1TV = apply(model, params, found)
    assert found[0, 3:].tolist() == whole_1TV[0, 2:-1].argmax(axis=-1).tolist()
    greedy = jaxgpt.Sampling(greedy=True)
    prompts = [[1, 2, 3], [4, 4]]
    drawn = jaxgpt.generate(model, params, prompts, key=jax.random.key(0), max_new_tokens=5, sampling=greedy)
    assert drawn.tokens[0] == found[0, 3:].tolist()
    assert "DistanceConfig: each token computes its context again" in caplog.text


class Shift(nn.Module):
    """An MLP that also reads the token before, which a cache of keys and values does not hold."""

    @nn.compact
    def __call__(self, x_BTD, *, train=False):
        self.sow("losses", "size", jnp.square(x_BTD).mean())
        self.sow("metrics", "mean", x_BTD.mean())
        return nn.Dense(x_BTD.shape[-1])(jnp.pad(x_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1] + x_BTD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShiftConfig(GPTConfig):
    def make_mlp(self, layer, compute):
        return Shift()


class Halved(Attention):
    """An attention that jaxgpt's cache would compute as its own."""

    def attend(self, q_BTNH, k_BSKH, v_BSKH, **more):
        return 0.5 * super().attend(q_BTNH, k_BSKH, v_BSKH, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalvedConfig(GPTConfig):
    def make_attention(self, layer, compute):
        return Halved(n_embd=self.n_embd, n_head=self.n_head)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelConfig(GPTConfig):
    def make_attention(self, layer, compute):
        return super().make_attention(layer, compute._replace(attention_fn=_halved))


def _halved(*args, **more):
    return 0.5 * plain_attention(*args, **more)


@pytest.mark.parametrize("kind", [HalvedConfig, KernelConfig])
def test_an_attention_with_another_attend_has_no_pattern(kind):
    """The pattern is that of jaxgpt's own kernel."""
    model, _ = make_model(kind(**dataclasses.asdict(TINY)))
    assert "h_0/heads" in place_shapes(model.config) and "h_0/pattern" not in place_shapes(model.config)


def test_what_is_sown_counts_in_training_alone():
    """Losses are summed over the modules that sow them, and metrics averaged; scanned or not, with a head loss or not."""
    config = ShiftConfig(**dataclasses.asdict(TINY))
    model, params = make_model(config)
    tokens, key = tokens_BT(config), jax.random.key(0)
    batch = Batch(inputs_BT=tokens, targets_BT=jnp.roll(tokens, -1, axis=1))
    plain, count, nothing = jax.jit(lambda p: make_loss(model)(p, batch, None))(params)
    nats, _, metrics = jax.jit(lambda p: make_loss(model)(p, batch, key))(params)
    _, sown = jax.jit(lambda p: model.apply({"params": p}, tokens, mutable=["losses", "metrics"]))(params)
    sizes, means = (
        [sown[kind][f"h_{i}"]["mlp"][name][0] for i in range(2)]
        for kind, name in (("losses", "size"), ("metrics", "mean"))
    )
    assert not nothing and metrics.keys() == {"size", "mean"}
    np.testing.assert_allclose(nats, plain + count * sum(sizes), **FLOAT32_REORDERED)
    np.testing.assert_allclose(metrics["size"], count * sum(sizes), **FLOAT32_REORDERED)
    np.testing.assert_allclose(metrics["mean"], count * sum(means) / 2, **FLOAT32_REORDERED)
    stacked = dataclasses.replace(config, scan_layers=True).make_model()
    loss = make_loss(stacked, head_loss=functools.partial(chunked_next_token_loss, chunk=4))
    found, _, more = jax.jit(lambda p: loss(p, batch, key))(stack_layers(params, 2))
    np.testing.assert_allclose(found, nats, **FLOAT32_REORDERED)
    chex.assert_trees_all_close(more, metrics, **FLOAT32_REORDERED)


def test_muon_takes_matrices_in_blocks_by_their_label():
    """Of any name and rank, with or without scan; and a configuration may know better."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Labelled(ExpertConfig):
        def label_parameter(self, path, shape):
            return "vector" if path[-1] == "up" else super().label_parameter(path, shape)

    for kind, scan_layers in itertools.product((ExpertConfig, Labelled), (False, True)):
        config = kind(**dataclasses.asdict(dataclasses.replace(TINY, scan_layers=scan_layers)))
        params = config.make_model().shapes()
        state = jax.eval_shape(OptimConfig(name="muon").make_optimizer(10, model=config).init, params)
        moments = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state) if "'adamw'" in str(path)}
        ends = {"up": "['up']", "router": "['router']['kernel']", "wte": "['embedding']", "ln_f": "['ln_f']['scale']"}
        by_adam = {name for name, end in ends.items() if any(moment.endswith(end) for moment in moments)}
        assert by_adam == {"wte", "ln_f"} | ({"up"} if kind is Labelled else set())


def test_an_adapter_that_nothing_adds_is_refused():
    """A linen Dense of the user's own has a kernel, but only jaxgpt's own multiplies by an adapter."""
    config = ShiftConfig(**dataclasses.asdict(TINY))
    lora, train = LoraConfig(rank=1, targets=("Dense_0",)), TrainConfig(init_from="x")
    with pytest.raises(UserError, match="lora.targets has h_0/mlp/Dense_0: only jaxgpt.layers.linear.Dense adds"):
        make_trainer(Experiment(name="x", model=config, lora=lora, train=train))
