"""The forms for GPUs: what the modules say, of 16-bit inputs, and no further from float32."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.batch import Batch
from jaxgpt.experiment import Experiment
from jaxgpt.layers import MLP, LayerNorm, RMSNorm, gpu
from jaxgpt.layers.linear import Head
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.trainer import make_losses
from tests.helpers import make_model, tokens_BT

WIDTH = 96


def distances(function: Callable, params, *arrays, dtype) -> np.ndarray:
    """The errors of a value and of its gradients, computed in `dtype`: norms, over those in float32 of the same inputs."""
    arrays = [x.astype(jnp.bfloat16) for x in arrays]
    out_gradient = jax.random.normal(jax.random.key(9), jax.eval_shape(function, params, *arrays).shape)

    def compute(dtype):
        out, pull_back = jax.vjp(function, params, *(x.astype(dtype) for x in arrays))
        found = out, pull_back(out_gradient.astype(jnp.bfloat16).astype(out.dtype))
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(found)]

    pairs = zip(compute(dtype), compute(jnp.float32), strict=True)
    return np.array([np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-9) for a, b in pairs])


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


MODULES = {
    "layer norm": LayerNorm(),
    "layer norm, no bias": LayerNorm(use_bias=False),
    "rms norm": RMSNorm(),
    "rms norm, offset": RMSNorm(offset=True),
    "gelu": MLP(hidden=WIDTH, activation="gelu"),
    "gelu_tanh": MLP(hidden=WIDTH),
    "swiglu": MLP(hidden=WIDTH, activation="swiglu"),
    "head": Head(vocab_size=300),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_forms_are_no_further_from_float32(name):
    module = MODULES[name]
    x = 2.0 * normal(0, 2, 16, WIDTH) + 1.0
    if isinstance(module, LayerNorm | RMSNorm):
        x = x.at[0, 3, 5].set(3000.0)  # a massive activation
    if isinstance(module, MLP):
        arrays, function = [x, *([x[::-1]] if "glu" in name else [])], lambda _, *x: module.apply({}, *x, method="act")
        params = {}
    else:
        arrays, function = [x.reshape(-1, WIDTH)], lambda params, x: module.apply({"params": params}, x)
        params = jax.tree.map(
            lambda p: p + 0.3 * normal(1, *p.shape), module.init(jax.random.key(0), *arrays)["params"]
        )
    plain = distances(function, params, *arrays, dtype=jnp.bfloat16)
    found = distances(gpu.with_gpu_forms(function), params, *arrays, dtype=jnp.bfloat16)
    assert (found < 1.05 * plain + 1e-5).all(), (found, plain)
    for dtype, is_same in ((jnp.bfloat16, False), (jnp.float32, True)):
        own, form = (
            str(jax.make_jaxpr(f)(params, *(x.astype(dtype) for x in arrays)))
            for f in (function, gpu.with_gpu_forms(function))
        )
        assert (own == form) == is_same


def test_largest_and_sum_in_one_pass():
    logits = jnp.concatenate([jnp.full((4, 3), 300.0), jnp.full((4, 1), -jnp.inf), 100.0 * normal(0, 4, 60)], axis=1)
    np.testing.assert_allclose(gpu.log_sum_exp(logits), jax.nn.logsumexp(logits, axis=-1), rtol=1e-6)


CONFIG = GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=32, activation="gelu", norm="rmsnorm")


def losses_of(config: GPTConfig, dtype, *, on_gpu: bool) -> tuple:
    experiment = Experiment(name="x", model=config)
    model, params = make_model(config, dtype=dtype)
    text = tokens_BT(dataclasses.replace(config, block_size=config.block_size + 1))
    loss, evaluate = make_losses(experiment, model, on_gpu=on_gpu)
    return loss, evaluate, params, Batch(text[:, :-1], text[:, 1:])


def test_the_loss_of_a_model_and_its_gradient():
    found = []
    for dtype, on_gpu in ((jnp.float32, False), (jnp.bfloat16, False), (jnp.bfloat16, True)):
        loss, evaluate, params, batch = losses_of(CONFIG, dtype, on_gpu=on_gpu)
        nats, grads = jax.jit(jax.value_and_grad(lambda params, f, batch: f(params, batch, None)[0]), static_argnums=1)(
            params, loss, batch
        )
        np.testing.assert_allclose(nats, jax.jit(evaluate)(params, batch, None)[0], rtol=1e-5)
        found.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves((nats, grads))]).astype(np.float64))
    exact, plain, form = found
    assert np.linalg.norm(form - exact) < 1.05 * np.linalg.norm(plain - exact)


@pytest.mark.parametrize(
    ("config", "dtype"), [(CONFIG, jnp.float32), (dataclasses.replace(CONFIG, logit_softcap=30.0), jnp.bfloat16)]
)
def test_products_of_float16_are_for_16_bits_and_logits_without_a_cap(config, dtype):
    loss, _, params, batch = losses_of(config, dtype, on_gpu=True)
    assert "f16" not in str(jax.make_jaxpr(lambda params: loss(params, batch, None))(params)).replace("bf16", "")
