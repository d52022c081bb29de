import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt.layers.gpu import orthogonalize
from jaxgpt.optim import OptimConfig, learning_rate, make_optimizer
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


def test_the_default_warm_up_is_a_tenth_of_a_short_run():
    for steps, expected in ((1, 0), (50, 5), (999, 99), (1000, 100), (600_000, 100)):
        assert OptimConfig().warmup(steps) == expected
        assert OptimConfig(warmup_steps=steps + 1).warmup(steps) == expected  # one that does not fit is not taken
    assert OptimConfig(warmup_steps=50).warmup(50) == 50
    assert OptimConfig(warmup_steps=60, horizons=(50,)).warmup(99) == 5  # nor does it grow in a run that goes on
    found, given = (learning_rate(OptimConfig(warmup_steps=n), 50) for n in (None, 5))
    assert [float(found(step)) for step in range(50)] == [float(given(step)) for step in range(50)]


def test_warmup_stable_decay():
    r = rates(schedule="wsd", decay_fraction=0.3, min_lr_ratio=0.0)
    np.testing.assert_allclose(r[10:71], 2.0, rtol=1e-6)
    np.testing.assert_allclose(r[70:], np.linspace(2.0, 0.0, 31), atol=1e-6)
    assert rates(schedule="wsd", min_lr_ratio=0.25)[100] == pytest.approx(0.5)


@pytest.mark.parametrize(("name", "scan_layers"), [("adamw", True), ("muon", False)])
def test_weight_decay_is_on_matrices_only(name, scan_layers):
    """With zero gradients only the decay moves anything, and scan's stacked biases are no matrices."""
    config = dataclasses.replace(TINY, n_layer=1, scan_layers=scan_layers, tie_embeddings=False)
    _, params = make_model(config)
    params["h_9"] = {"q": {"lora_a": jnp.ones((4, 2)), "lora_b": jnp.ones((2, 4))}}
    optimizer = make_optimizer(OptimConfig(name=name, schedule="constant", warmup_steps=0, weight_decay=0.5), 10)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    for path, update in jax.tree.leaves_with_path(updates):
        moved = bool(np.any(update != 0.0))
        assert moved == (path[-1].key in ("kernel", "embedding", "lora_a", "lora_b")), jax.tree_util.keystr(path)


def test_muon_treats_scanned_layers_one_by_one():
    """Stacked by scan or separate, the same gradients give the same updates."""
    _, params = make_model(TINY)
    params = {name: {"mlp": params[name]["mlp"]} for name in ("h_0", "h_1")}
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


def steps_of(config, grads, params):
    """The parameters after each of some gradients."""
    optimizer = make_optimizer(config, 10)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for each in grads:
        updates, state = update(each, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        yield jax.device_get(params)


def normal(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_adamw_is_its_formula():
    """Three steps of two parameters, of which one decays, at the rates of the schedule (arXiv:1711.05101, algorithm 2)."""
    config = OptimConfig(
        learning_rate=0.1, warmup_steps=2, beta1=0.8, beta2=0.5, eps=1.0, weight_decay=0.3, grad_clip=None
    )
    params = {"h_0": {"kernel": normal(3, 4, seed=0), "bias": normal(4, seed=1)}}
    grads = [jax.tree.map(lambda x, t=t: normal(*x.shape, seed=10 + t), params) for t in range(3)]
    expected = {"h_0": dict(params["h_0"])}
    m = v = jax.tree.map(np.zeros_like, params)
    rate = learning_rate(config, 10)
    for t, found in enumerate(steps_of(config, grads, params)):
        m = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, m, grads[t])
        v = jax.tree.map(lambda v, g: 0.5 * v + 0.5 * g * g, v, grads[t])
        for name, x in expected["h_0"].items():
            step = m["h_0"][name] / (1 - 0.8 ** (t + 1)) / (np.sqrt(v["h_0"][name] / (1 - 0.5 ** (t + 1))) + 1.0)
            expected["h_0"][name] = x - float(rate(t)) * (step + 0.3 * x * (name == "kernel"))
            np.testing.assert_allclose(
                found["h_0"][name], expected["h_0"][name], rtol=1e-5, err_msg=f"{name}, step {t}"
            )


def newton_schulz(x):
    """Five steps towards the orthogonal matrix next to x, by the post's coefficients."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_muon_is_its_formula():
    """Three steps of a wide and a tall matrix: Nesterov's momentum with Adam's correction, the schedule, the decay; an
    update of [D, F] is sqrt(F / D) long where that is above one."""
    config = OptimConfig(
        name="muon", muon_learning_rate=0.1, warmup_steps=2, momentum=0.9, weight_decay=0.3, grad_clip=None
    )
    params = {"h_0": {"wide": {"kernel": normal(3, 12, seed=0)}, "tall": {"kernel": normal(12, 3, seed=1)}}}
    grads = [jax.tree.map(lambda x, t=t: normal(*x.shape, seed=10 + t), params) for t in range(3)]
    rate = learning_rate(dataclasses.replace(config, learning_rate=0.1), 10)
    found = list(steps_of(config, grads, params))
    for name, length in (("wide", 2.0), ("tall", 1.0)):
        x, m = params["h_0"][name]["kernel"], 0.0
        for t in range(3):
            g = grads[t]["h_0"][name]["kernel"]
            m = 0.9 * m + 0.1 * g
            ahead = 0.9 * m / (1 - 0.9 ** (t + 2)) + 0.1 * g / (1 - 0.9 ** (t + 1))
            step = newton_schulz(ahead) if name == "wide" else newton_schulz(ahead.T).T
            x = x - float(rate(t)) * (length * step + 0.3 * x)
            np.testing.assert_allclose(found[t]["h_0"][name]["kernel"], x, rtol=1e-3, atol=1e-5, err_msg=f"{name}, {t}")


def test_muon_in_bfloat16_multiplies_all_matrices_of_one_shape_at_once():
    """Each becomes what it becomes alone, near to what float32 makes of it."""
    shapes = {"h_0": (16, 48), "h_1": (48, 16), "h_2": (16, 48), "h": (2, 16, 48)}
    x = {name: {"kernel": normal(*shape, seed=n)} for n, (name, shape) in enumerate(shapes.items())}
    program = str(jax.make_jaxpr(orthogonalize)(x))
    assert program.count("dot_general") == 3 * 15
    assert "bf16[2,16,16]" in program and " f32[2,16,16]" not in program
    chex.assert_trees_all_equal(orthogonalize(x), {name: orthogonalize(each) for name, each in x.items()})
    steps = (OptimConfig(name="muon", muon_dtype=dtype, grad_clip=None) for dtype in ("float32", "bfloat16"))
    exact, near = (list(steps_of(config, [x] * 3, x)) for config in steps)
    chex.assert_trees_all_close(near, exact, atol=5e-3)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_an_extended_run_keeps_the_schedule_up_to_each_earlier_end(schedule):
    """Of 50 steps, extended to 80 and to 200: the steps up to 50 have the warm-up and the rates of a run of 50."""
    config = OptimConfig(learning_rate=2.0, schedule=schedule)
    extended = learning_rate(dataclasses.replace(config, horizons=(50, 80)), 200)
    first, second, last = (
        learning_rate(dataclasses.replace(config, warmup_steps=config.warmup(50)), steps) for steps in (50, 80, 200)
    )
    expected = [first(n) if n < 50 else second(n) if n < 80 else last(n) for n in range(200)]
    np.testing.assert_array_equal([extended(n) for n in range(200)], expected)
    np.testing.assert_array_equal(first(49), learning_rate(config, 50)(49))
