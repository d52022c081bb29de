"""The loss: against its definition, masked, and in chunks."""

import dataclasses
import functools
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt.batch import Batch
from jaxgpt.layers.linear import float32_logits
from jaxgpt.loss import ObjectiveConfig, chunked_next_token_loss, next_token_loss
from tests.helpers import FLOAT32_REORDERED, TINY, import_pages, make_model, tokens_BT

(fused_loss,) = import_pages("benchmarks", "fused_loss")


def test_masked_targets_do_not_count_whatever_they_are():
    logits = jax.random.normal(jax.random.key(0), (1, 4, 5))
    mask = jnp.array([[True, False, True, False]])
    totals = [
        next_token_loss(logits, jnp.array([[0, poison, 2, poison]]), mask) for poison in (0, -1, 5, 2**30)
    ]  # -1 would be the last class, 5 a NaN
    assert len({(float(t), float(n)) for t, n in totals}) == 1
    alone, two = next_token_loss(logits[:, ::2], jnp.array([[0, 2]]))
    np.testing.assert_allclose(totals[0], (alone, two), rtol=1e-6)


# The logits of each chunk by a product of its own, and the head's gradient summed chunk by chunk.
CHUNKED = dict(rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("chunk", "tie"), [(2, False), pytest.param("fused", True, marks=pytest.mark.slow)])
def test_in_chunks_it_is_the_same_loss_and_the_same_gradient(chunk, tie):
    config = dataclasses.replace(TINY, n_layer=1, tie_embeddings=tie, logit_softcap=5.0)
    model, params = make_model(config)
    text = tokens_BT(dataclasses.replace(config, block_size=9))
    mask = jnp.ones((2, 8), bool).at[0, 3:].set(False)
    batch = Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:], mask_BT=mask)

    def loss(params, chunk):
        head_loss = None if chunk is None else functools.partial(chunked_next_token_loss, chunk=chunk)
        objective = fused_loss.FusedLossConfig(interpret=True) if chunk == "fused" else ObjectiveConfig()
        nats, count, _ = objective.make_loss(model, head_loss=head_loss, label_smoothing=0.1)(params, batch, None)
        return 3.0 * nats / count, count  # scaled, as by a mean

    graded = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (expected, count), expected_grads = graded(params, None)
    (found, found_count), grads = graded(params, chunk)
    assert float(count) == float(found_count) == 11
    np.testing.assert_allclose(found, expected, **CHUNKED)
    chex.assert_trees_all_close(grads, expected_grads, **CHUNKED)


def test_in_chunks_the_logits_are_never_whole():
    """Peak memory of the gradient: without chunks it holds [B, T, V] in float32, with them a sixteenth."""
    B, T, D, V = 4, 64, 8, 4096
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((V, D), "float32"), ((B, T, D), "float32"), ((B, T), "int32"))]

    def unembed(head_VD, x_BTD):
        return jnp.einsum("BTD,VD->BTV", x_BTD, head_VD)

    model: Any = types.SimpleNamespace(apply=lambda variables, x_BTD, method: unembed(variables["params"], x_BTD))

    def temporaries(loss):
        grad = jax.jit(jax.grad(lambda *args: loss(*args)[0], argnums=(0, 1)))
        return grad.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    whole = temporaries(lambda head, x, targets: next_token_loss(unembed(head, x), targets))
    chunked = temporaries(functools.partial(chunked_next_token_loss, model, chunk=4))
    assert whole > 4 * B * T * V
    assert chunked < whole / 8


# A tile of the kernel after another, and the gradient of the logits rounded to 8 bits before the products.
FUSED = {jnp.float32: dict(rtol=1e-5, atol=1e-5), jnp.bfloat16: dict(rtol=1e-2, atol=1e-2)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_fused_kernel_has_the_loss_and_the_gradients_of_the_logits(dtype, monkeypatch):
    """Over several tiles of rows and columns, the last of each partly empty."""
    U, V, smoothing, softcap = 300, 300, 0.1, 3.0
    monkeypatch.setattr(fused_loss, "TILE_V", 128)
    monkeypatch.setattr(fused_loss, "TILE_ELEMENTS", 256 * 32)
    keys = jax.random.split(jax.random.key(0), 3)
    x_UD, head_VD = jax.random.normal(keys[0], (U, 32)).astype(dtype), 0.3 * jax.random.normal(keys[1], (V, 32))
    targets_U, mask_U = jax.random.randint(keys[2], (U,), 0, V), jnp.arange(U) % 5 != 0

    def from_logits(x_UD, head_VD):
        logits_UV = jnp.dot(x_UD, head_VD.T.astype(dtype), preferred_element_type=jnp.float32)
        logits_UV = softcap * jnp.tanh(logits_UV / softcap)
        return next_token_loss(logits_UV, targets_U, mask_U, smoothing=smoothing)[0] / U

    def fused(x_UD, head_VD):
        options = {"smoothing": smoothing, "softcap": softcap, "interpret": True}
        return jnp.sum(fused_loss.fused_nats(x_UD, head_VD, targets_U, **options), where=mask_U) / U

    expected, expected_grads = jax.value_and_grad(from_logits, argnums=(0, 1))(x_UD, head_VD)
    found, grads = jax.value_and_grad(fused, argnums=(0, 1))(x_UD, head_VD)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for expected, found in zip(expected_grads, grads, strict=True):
        scale = jnp.abs(expected).max().astype(jnp.float32)
        np.testing.assert_allclose(found.astype(jnp.float32) / scale, expected / scale, **FUSED[dtype])


def test_the_gradient_of_bfloat16_logits_is_that_of_products_in_bfloat16():
    """One product for each gradient, both of bfloat16: with a float32 operand a GPU computes at half the speed."""
    x_UD, head_VD = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((16, 4))

    def nats(x_UD, head_VD):
        return jax.nn.logsumexp(float32_logits(x_UD, head_VD.T)).sum()

    text = jax.jit(jax.grad(nats, argnums=(0, 1))).lower(x_UD, head_VD).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3
    for line in products:
        assert line.count("xbf16>") >= 2 and "xf32>," not in line, line


def test_label_smoothing_is_optaxs():
    rng = np.random.default_rng(0)
    logits_BTV = jnp.asarray(rng.normal(size=(2, 6, 11)), jnp.float32)
    targets_BT, mask_BT = jnp.asarray(rng.integers(0, 11, (2, 6))), jnp.asarray(rng.random((2, 6)) < 0.7)
    nats, count = next_token_loss(logits_BTV, targets_BT, mask_BT, smoothing=0.1)
    smooth_BTV = optax.smooth_labels(jax.nn.one_hot(targets_BT, 11), 0.1)
    expected = jnp.sum(optax.softmax_cross_entropy(logits_BTV, smooth_BTV), where=mask_BT)
    np.testing.assert_allclose(nats, expected, **FLOAT32_REORDERED)
    assert count == mask_BT.sum()
