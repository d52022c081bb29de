"""Invariants of the whole model, over a grid of architectures."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.experiment import ParallelConfig
from jaxgpt.model import GPT, GPTConfig
from jaxgpt.parallel.device import find_kernel
from jaxgpt.parallel.limits import count_parameters, train_flops_per_token
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.presets import gpt2
from tests.helpers import FLOAT32_REORDERED, TINY, apply, make_model, stack_layers, tokens_BT

ARCHITECTURES = {
    "gpt2": {},
    "2017": dict(norm_position="post", activation="relu", position="sinusoidal", scale_embeddings=True),
    "llama": dict(norm="rmsnorm", activation="swiglu", position="rope", bias=False, n_kv_head=1, tie_embeddings=False),
    "gemma 2": dict(
        norm="rmsnorm",
        norm_position="sandwich",
        norm_offset=True,
        activation="geglu_tanh",
        position="rope",
        head_dim=6,
        n_kv_head=1,
        bias=False,
        query_scale=5.0,
        attention_softcap=1.5,
        sliding_window=3,
        global_every=2,
        rope_local_theta=100.0,
        scale_embeddings=True,
    ),
    "neox": dict(parallel_residual=True, activation="gelu", position="rope", rope_fraction=0.5, tie_embeddings=False),
    "olmo 2": dict(
        norm="rmsnorm",
        norm_position="output",
        position="rope",
        rope_scaling="llama3",
        rope_original_context=16,
        qk_norm=True,
        qk_norm_over="heads",
        out_bias=False,
    ),
}
# The rest by `-m slow`.
QUICK = ("gemma 2",)
every_architecture = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, kind in ARCHITECTURES.items()
    ],
)


def tiny(**kwargs) -> GPTConfig:
    return dataclasses.replace(TINY, **kwargs)


@every_architecture
def test_causal_by_gradient(kind):
    """Logits at t move with the embeddings of tokens 0..t and with no later one, and are float32 whatever computes."""
    config = tiny(**kind)
    model, params = make_model(config)
    low = jax.eval_shape(make_model(config, dtype=jnp.bfloat16)[0].apply, {"params": params}, tokens_BT(config))
    assert low == jax.ShapeDtypeStruct((2, config.block_size, config.vocab_size), jnp.float32)
    inputs_BT = jnp.arange(config.block_size)[None]  # every token once, so that a row of wte is a place

    def logit(params, t):
        # Read out along a fixed direction, not wte: the tied output matrix would move with every token.
        features_BTD = apply(model, params, inputs_BT, method="hidden_states")
        return jnp.sum(features_BTD[0, t] * jnp.arange(1.0, 1 + config.n_embd))

    gradient = jax.jit(jax.grad(logit))
    for t in (0, 3, config.block_size - 1):
        reach = np.abs(gradient(params, t)["wte"]["embedding"]).sum(-1)[: config.block_size]
        np.testing.assert_array_equal(reach[t + 1 :], 0.0)
        assert (reach[: t + 1] > 0).all()


@every_architecture
def test_scan_equals_loop(kind):
    config = tiny(**kind | {"global_every": None})  # scanned layers are alike
    model, params = make_model(config)
    scanned = GPT(dataclasses.replace(config, scan_layers=True))
    inputs = tokens_BT(config)
    stacked = stack_layers(params, config.n_layer)
    chex.assert_trees_all_equal_shapes(stacked, jax.eval_shape(scanned.init, jax.random.key(0), inputs)["params"])
    np.testing.assert_allclose(apply(scanned, stacked, inputs), apply(model, params, inputs), **FLOAT32_REORDERED)


@pytest.mark.parametrize(
    ("remat", "scan_layers"), [("dots", True), pytest.param("full", False, marks=pytest.mark.slow)]
)
def test_remat_changes_nothing(remat, scan_layers):
    """Same loss and gradients, dropout included; and it does recompute: the jaxpr says so."""
    plain = tiny(dropout=0.3, scan_layers=scan_layers, n_layer=1 + scan_layers)
    model, params = make_model(plain)
    inputs = tokens_BT(plain)

    def loss(params, model):
        logits = apply(model, params, inputs, train=True, key=jax.random.key(0))
        return jnp.sum(jnp.sin(logits))

    rematted = GPT(dataclasses.replace(plain, remat=remat))
    expected, actual = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, m) for m in (model, rematted))
    chex.assert_trees_all_close(actual, expected, **FLOAT32_REORDERED)
    jaxprs = [str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(params, m)) for m in (model, rematted)]
    assert ["checkpoint" in text or "remat" in text for text in jaxprs] == [False, True]


@pytest.mark.parametrize("kind", ["gemma 2", "2017"])
def test_parameters_in_16_bits_are_computed_with_as_their_numbers_in_32(kind):
    """As an imported model has them: what is added to embeddings, or multiplies them, is not rounded.

    Embeddings are made op by op, since a compiler may leave out the rounding.
    """
    model, params = make_model(tiny(**ARCHITECTURES[kind], n_layer=1))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    tokens = tokens_BT(TINY)
    how = dict(positions_BT=jnp.arange(tokens.shape[1])[None], train=False, method="embed")
    found, expected = (model.apply({"params": p}, tokens, **how) for p in (low, widened))
    np.testing.assert_array_equal(found, expected, strict=True)
    if kind == "gemma 2":
        np.testing.assert_array_equal(apply(model, low, tokens), apply(model, widened, tokens))


def calls(jaxpr, counted) -> int:
    """Equations of a jaxpr, and of those inside it, that are counted."""
    inner = [x for eqn in jaxpr.eqns for value in eqn.params.values() for x in jax.tree.leaves(value, is_leaf=is_jaxpr)]
    return sum(map(counted, jaxpr.eqns)) + sum(calls(getattr(x, "jaxpr", x), counted) for x in inner if is_jaxpr(x))


def is_jaxpr(x) -> bool:
    return hasattr(x, "eqns")


def gradient(attention_fn, remat: str, dtype=jnp.float32, **hardware):
    config = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, remat=remat)
    model = GPT(config, attention_fn=attention_fn, dtype=dtype, **hardware)
    return jax.make_jaxpr(jax.grad(lambda params: model.apply({"params": params}, tokens_BT(config)).sum()))(
        model.shapes()
    ).jaxpr


@pytest.mark.parametrize("meshed", [False, True])
def test_remat_of_all_but_dots_keeps_what_attention_made(meshed):
    """Of its six products a layer one is run anew, the scores', for weights that nothing keeps; with "full" both."""
    attention_fn, hardware = find_kernel("plain"), {}
    if meshed:
        strategy = make_mesh(jax.devices()[:1], ParallelConfig(), GPTConfig())
        attention_fn, hardware = strategy.shard_attention(attention_fn), {"sharding": strategy.sharding_hooks}

    def batched(eqn) -> bool:
        return eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][1][0])

    found = {remat: calls(gradient(attention_fn, remat, **hardware), batched) for remat in ("none", "dots", "full")}
    assert found == {"none": 2 * 6, "dots": 2 * 7, "full": 2 * 8}


def test_remat_of_all_but_dots_keeps_the_statistics_of_norms():
    """A mean and a variance of each of four norms are computed once, with "full" twice."""

    def is_mean(eqn) -> bool:
        return eqn.primitive.name == "reduce_sum" and eqn.params["axes"] == (2,)

    found = {remat: calls(gradient(find_kernel("plain"), remat), is_mean) for remat in ("none", "dots", "full")}
    assert found["none"] == found["dots"] == found["full"] - 2 * 4


def test_remat_of_all_but_dots_keeps_what_cudnn_made(monkeypatch):
    """Also the logarithms of its sums. The primitives' names are JAX's own, as of 0.10."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    for remat, forward in (("dots", 2), ("full", 4)):
        jaxpr = gradient(find_kernel("cudnn"), remat, jnp.bfloat16)
        found = [
            calls(jaxpr, lambda eqn, way=way: eqn.primitive.name.startswith(f"dot_product_attention_{way}"))
            for way in ("fwd", "bwd")
        ]
        assert found == [forward, 2], remat


def test_every_dropout_draws_its_own():
    """Embeddings, and what attention and MLP of each layer write: half of each, whatever becomes of the others.

    The layers write constants, powers of two that each number of the sum still shows; the last norm hardly divides.
    """
    model, params = make_model(tiny(dropout=0.5, norm="rmsnorm", norm_eps=1e12, position="none", scan_layers=True))
    params = jax.tree.map(np.zeros_like, params)
    for branch, constants in (("attn", [1.0, 2.0]), ("mlp", [4.0, 8.0])):
        params["h"]["block"][branch]["c_proj"]["bias"] += np.array(constants, np.float32)[:, None]
    params["wte"]["embedding"] += 16.0
    params["ln_f"]["scale"] += 1e6

    @jax.jit
    def features(key):
        inputs = jnp.zeros((8, TINY.block_size), jnp.int32)
        return model.apply({"params": params}, inputs, train=True, rngs={"dropout": key}, method="hidden_states")

    written = np.round(np.asarray(features(jax.random.key(0))) / 2.0).astype(int)
    kept = written.reshape(-1, 1) & [1, 2, 4, 8, 16] > 0
    np.testing.assert_allclose(kept.mean(axis=0), 0.5, atol=0.1)  # 5 standard errors of 512
    alike = [np.mean(kept[:, i] == kept[:, j]) for i in range(5) for j in range(i)]
    np.testing.assert_allclose(alike, 0.5, atol=0.1)


def test_initialisation_is_gpt2s():
    config = GPTConfig(vocab_size=500, block_size=16, n_layer=8, n_head=4, n_embd=128, scan_layers=True)
    params = jax.jit(GPT(config).init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    block = params["h"]["block"]
    for x in (params["wte"]["embedding"], block["attn"]["q"]["kernel"], block["mlp"]["c_fc"]["kernel"]):
        assert float(np.std(x)) == pytest.approx(0.02, rel=0.05)
    for branch in ("attn", "mlp"):
        assert float(np.std(block[branch]["c_proj"]["kernel"])) == pytest.approx(0.02 / math.sqrt(16), rel=0.05)


def test_the_largest_gpt2_has_its_size():
    """The published parameter count, without allocating one; layers that are scanned are traced once."""
    params = GPT(dataclasses.replace(gpt2("1558M"), scan_layers=True)).shapes()
    assert count_parameters(params) / 1e6 == pytest.approx(1557.61, abs=0.01)


FLOPS = GPTConfig(vocab_size=100, block_size=32, n_layer=3, n_head=4, n_embd=8, position="none")


@pytest.mark.parametrize(
    ("config", "adapters", "expected"),
    [
        # 1,000 parameters, 6 each; two products of 4 heads of 2 numbers over 32 tokens in 3 layers, 2 each, three times.
        (FLOPS, 0, 6 * 1000 + 12 * 3 * 8 * 32),
        (dataclasses.replace(FLOPS, tie_embeddings=False), 0, 6 * (1000 - 100 * 8) + 12 * 3 * 8 * 32),
        (FLOPS, 50, 4 * 1000 + 6 * 50 + 12 * 3 * 8 * 32),  # no gradient of what is not trained
        (dataclasses.replace(FLOPS, sliding_window=5, global_every=3), 0, 6 * 1000 + 12 * 8 * (5 + 5 + 32)),
        (dataclasses.replace(FLOPS, sliding_window=50), 0, 6 * 1000 + 12 * 3 * 8 * 32),
        (gpt2(), 0, 6 * (1000 - 1024 * 768) + 12 * 12 * 768 * 1024),  # positions are not multiplied
    ],
)
def test_flops_by_hand(config, adapters, expected):
    assert train_flops_per_token(config, 1000, adapters) == expected


def test_misuse_is_told():
    with pytest.raises(UserError, match="vocab_size=None"):
        GPT(GPTConfig()).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    model, params = make_model(TINY)
    with pytest.raises(UserError, match="9 tokens exceed block_size=8"):
        apply(model, params, jnp.zeros((1, 9), jnp.int32))
