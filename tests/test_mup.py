"""muP: the same at the base width, activations that do not grow with it, and a multiplier moved into the last norm."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt.batch import Batch
from jaxgpt.experiment import Experiment, TrainConfig
from jaxgpt.loss import make_loss, next_token_loss
from jaxgpt.model import GPT, GPTConfig
from jaxgpt.optim import OptimConfig, learning_rate, make_optimizer
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.train import init_state, train_step
from tests.helpers import TINY, make_model, tokens_BT

STEPS, BASE = 10, 64
RATES = {"adamw": 4e-3, "muon": 0.02}


def batch(config, rows=4):
    text_BT1 = tokens_BT(dataclasses.replace(config, block_size=config.block_size + 1), rows)
    return Batch(text_BT1[:, :-1], text_BT1[:, 1:])


def test_at_the_base_width_it_is_the_standard_parametrisation():
    """Not one operation differs, in the initial values nor in a step, so not one bit does. At another width both differ."""

    def programs(base):
        config = dataclasses.replace(TINY, n_layer=1, mup_base_width=base)
        trainer = make_trainer(Experiment(name="x", model=config, train=TrainConfig(batch_size=4)))
        return jax.jit(trainer.init_state).lower(jax.random.key(0)).as_text(), trainer.lower().as_text()

    standard = programs(None)
    assert programs(TINY.n_embd) == standard
    assert all(a != b for a, b in zip(programs(2 * TINY.n_embd), standard, strict=True))


def test_the_last_norm_is_the_output_multiplier():
    """Training equals that of logits times base / width, by Adam with a rate for each parameter (table 8 of the paper)."""
    config = dataclasses.replace(TINY, n_layer=1, mup_base_width=2)
    model, start = make_model(config)
    ratio, data = config.width_ratio, batch(config)
    # Adam's eps would tell apart gradients of a scale and of that scale times the ratio.
    fields = {"learning_rate": 0.01, "beta2": 0.99, "eps": 1e-18}
    optim = OptimConfig(schedule="constant", warmup_steps=0, weight_decay=0.0, grad_clip=None, **fields)

    def label(path, _):
        return "hidden" if path[-1].key == "kernel" else "rest"

    rates = {"hidden": optax.adam(0.01 * ratio, b2=0.99, eps=1e-18), "rest": optax.adam(0.01, b2=0.99, eps=1e-18)}
    explicit = optax.partition(rates, lambda params: jax.tree.map_with_path(label, params))

    def train(params, multiplier, optimizer):
        def loss(params):
            logits_BTV = multiplier * model.apply({"params": params}, data.inputs_BT)
            nats, count = next_token_loss(logits_BTV, data.targets_BT, None)
            return nats / count

        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), None, length=6)
        return losses, params

    def move(params):
        return params | {"ln_f": jax.tree.map(lambda x: ratio * x, params["ln_f"])}

    expected, after = jax.jit(lambda x: train(x, ratio, explicit))(start)
    found, params = jax.jit(lambda x: train(x, 1.0, make_optimizer(optim, 10, width_ratio=ratio)))(move(start))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert expected[-1] < expected[0] - 0.05
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), params, move(after))


def test_the_last_norm_starts_at_the_ratio():
    """Also where its parameter is the scale - 1. The other norms start at 1, matrices in blocks with the ratio's root."""
    config = dataclasses.replace(TINY, n_layer=1, mup_base_width=2, norm="rmsnorm", norm_offset=True)
    params = jax.jit(GPT(config).init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    np.testing.assert_array_equal(params["ln_f"]["scale"], -0.75)
    np.testing.assert_array_equal(params["h_0"]["ln_1"]["scale"], 0.0)
    assert float(params["h_0"]["mlp"]["c_fc"]["kernel"].std()) == pytest.approx(0.5 * 0.02, rel=0.2)
    plain = TINY.make_norm(first_scale=0.25).init(jax.random.key(0), jnp.ones((1, 1, 4)))
    np.testing.assert_array_equal(plain["params"]["scale"], 0.25)


def test_decay_is_not_scaled():
    """Without gradients, a step multiplies a matrix by 1 - learning_rate * weight_decay at any width."""
    params = {"h_0": {"kernel": jnp.ones((2, 3))}}
    tx = make_optimizer(OptimConfig(schedule="constant", warmup_steps=0), 10, width_ratio=0.25)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["h_0"]["kernel"], -1e-4, rtol=1e-5)


@functools.cache
def sizes(optimizer, width, base):
    """Mean absolute values after ten steps: of the residual stream after the block, its branches' outputs, the logits."""
    # Half as wide inside a block, so that Muon at width 1,024 takes a second a step; muP knows no shape but the width.
    shape = {"n_head": width // 32, "n_kv_head": width // 64, "head_dim": 16, "mlp_dim": width // 2, "n_embd": width}
    config = GPTConfig(vocab_size=32, block_size=16, n_layer=1, **shape, bias=False, mup_base_width=base)
    rates = {"learning_rate": RATES["adamw"], "muon_learning_rate": RATES["muon"]}
    optim = OptimConfig(name=optimizer, schedule="constant", warmup_steps=0, **rates)
    model, tx, data = GPT(config), make_optimizer(optim, STEPS, width_ratio=config.width_ratio), batch(config)

    def is_kept(module, method):
        return method == "__call__" and module.name in ("h_0", "attn", "mlp")

    @jax.jit
    def run(key):
        def step(state, _):
            schedule = learning_rate(optim, STEPS)
            return train_step(state, data, key, loss_fn=make_loss(model), optimizer=tx, schedule=schedule)

        state, metrics = jax.lax.scan(step, init_state(model, tx, key), None, length=STEPS)
        logits, kept = model.apply({"params": state.params}, data.inputs_BT, capture_intermediates=is_kept)
        kept = {"/".join(e.key for e in path[:-2]): x for path, x in jax.tree.leaves_with_path(kept["intermediates"])}
        return jax.tree.map(lambda x: jnp.abs(x).mean(), kept | {"logits": logits}), metrics["loss"]

    found, losses = run(jax.random.key(0))
    assert base is None or losses[-1] < 0.8 * losses[0]
    return {name: float(x) for name, x in found.items()}


def spread(each):
    """Largest / smallest size over the widths, of the activation that changes most."""
    assert each[0].keys() == {"h_0", "h_0/attn", "h_0/mlp", "logits"}
    return max(max(x[name] for x in each) / min(x[name] for x in each) for name in each[0])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", RATES)
def test_activations_keep_their_size_from_width_64_to_1024(optimizer):
    """The coordinate check (arXiv:2203.03466, appendix D.1), and the standard parametrisation, which fails it."""
    narrow = sizes(optimizer, 64, BASE)
    assert spread([narrow, sizes(optimizer, 1024, BASE)]) < 2
    assert spread([narrow, sizes(optimizer, 1024, None)]) > 4
