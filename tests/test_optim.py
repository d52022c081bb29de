import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt.config import OptimConfig
from jaxgpt.model import GPT
from jaxgpt.optim import learning_rate, make_optimizer, muon_labels
from tests.helpers import TINY, make_model, stack_layers


def rates(steps=100, **kwargs):
    schedule = learning_rate(OptimConfig(**{"learning_rate": 2.0, "warmup_steps": 10} | kwargs), steps)
    return np.array([float(schedule(step)) for step in range(steps + 1)])


def test_warm_up_is_linear_and_never_zero():
    np.testing.assert_allclose(rates()[:11], 2.0 * np.linspace(1 / 11, 1.0, 11), rtol=1e-6)


def test_cosine():
    r = rates(min_lr_ratio=0.1)
    assert r[10] == pytest.approx(2.0)
    assert r[55] == pytest.approx(1.1)  # half way between 2.0 and 0.2
    assert r[100] == pytest.approx(0.2)


def test_warmup_stable_decay():
    r = rates(schedule="wsd", decay_fraction=0.3, min_lr_ratio=0.0)
    np.testing.assert_allclose(r[10:71], 2.0, rtol=1e-6)
    np.testing.assert_allclose(r[70:], np.linspace(2.0, 0.0, 31), atol=1e-6)


def test_constant_and_no_warm_up():
    np.testing.assert_allclose(rates(schedule="constant", warmup_steps=0), 2.0)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_is_on_matrices_only(name, scan_layers):
    """With zero gradients only the decay moves anything, and scan's stacked biases are no matrices."""
    config = dataclasses.replace(TINY, scan_layers=scan_layers, tie_embeddings=False)
    _, params = make_model(config)
    optimizer = make_optimizer(OptimConfig(name=name, schedule="constant", warmup_steps=0, weight_decay=0.5), 10)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    for path, update in jax.tree.leaves_with_path(updates):
        moved = bool(np.any(update != 0.0))
        assert moved == (path[-1].key in ("kernel", "embedding", "lm_head")), jax.tree_util.keystr(path)


def test_muon_has_the_blocks_matrices_and_nothing_else():
    for scan_layers in (False, True):
        config = dataclasses.replace(TINY, scan_layers=scan_layers, tie_embeddings=False)
        params = jax.eval_shape(GPT(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        for path, label in jax.tree.leaves_with_path(muon_labels(params)):
            names = [entry.key for entry in path]
            assert (label == "muon") == (names[0].startswith("h") and names[-1] == "kernel"), names


def test_muon_orthogonalises():
    """The update's singular values are all about one, before the learning rate and the shape factor."""
    _, params = make_model(TINY)
    config = OptimConfig(
        name="muon",
        muon_learning_rate=1.0,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        grad_clip=None,
    )
    optimizer = make_optimizer(config, 10)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), params)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    singular = np.linalg.svd(updates["h_0"]["attn"]["q"]["kernel"], compute_uv=False)
    assert singular.min() > 0.5 and singular.max() < 1.5  # Newton-Schulz in five steps is that rough on purpose


def test_muon_treats_scanned_layers_one_by_one():
    """Stacked by scan or separate, the same gradients give the same updates."""
    _, params = make_model(TINY)
    optimizer = make_optimizer(OptimConfig(name="muon", warmup_steps=0), 10)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), params)

    def update(grads, params):
        return jax.jit(optimizer.update)(grads, optimizer.init(params), params)[0]

    separate = stack_layers(update(grads, params), TINY.n_layer)
    stacked = update(stack_layers(grads, TINY.n_layer), stack_layers(params, TINY.n_layer))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), separate, stacked)


def test_clipping_bounds_what_the_optimiser_sees():
    """Adam forgets scale, so look through its first moment: (1 - beta1) times the clipped gradient."""
    _, params = make_model(TINY)
    optimizer = make_optimizer(OptimConfig(grad_clip=0.5, warmup_steps=0), 10)
    huge = jax.tree.map(lambda x: jnp.full_like(x, 1e6), params)
    _, state = jax.jit(optimizer.update)(huge, optimizer.init(params), params)
    mu = next(s.mu for s in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
    norm = float(jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(mu))))
    assert norm == pytest.approx(0.1 * 0.5, rel=1e-3)


@pytest.mark.parametrize(
    "extremes",
    [
        {"learning_rate": 1e18, "weight_decay": 1e-18},
        {"learning_rate": 1e-18, "weight_decay": 1e18, "eps": 1e18, "grad_clip": None},
        {"beta1": 0.999998, "beta2": 0.999998, "eps": 1e-18, "grad_clip": 1e-18},
        {"name": "muon", "muon_learning_rate": 1e18, "weight_decay": 1e-18, "momentum": 0.999998},
    ],
)
def test_no_setting_that_is_taken_ruins_the_parameters(extremes):
    """Nor do gradients from next to nothing to next to what float32 holds, or none: two updates are finite."""
    params = {"h_0": {"kernel": jnp.full((2, 3), 0.02)}}
    optimizer = make_optimizer(OptimConfig(warmup_steps=0, schedule="constant", **extremes), 10)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for size in (0.0, 1e-38, 1e-19, 1.0, 1e18):
        grads = jax.tree.map(lambda x, size=size: jnp.full_like(x, size), params)
        found, after = params, state
        for _ in range(2):
            updates, after = update(grads, after, found)
            found = optax.apply_updates(found, updates)
        assert jnp.isfinite(found["h_0"]["kernel"]).all(), size
