"""Adapters: how they begin, and that a layer adds them as if they were merged. How they train: runs/test_pretrained.py."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.batch import Batch
from jaxgpt.config import DataConfig, Experiment, GPTConfig, LoraConfig, TrainConfig
from jaxgpt.lora import init_adapters, join_adapters, merge_adapters
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.train import batch_loss
from tests.helpers import TINY, make_model, stack_layers, tokens_BT

ALL = LoraConfig(rank=2, targets=("q", "k", "v", "c_fc", "c_proj"))
FAMILIES = {
    "gpt2": {},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False},
    "gemma2": {"norm": "rmsnorm", "norm_position": "sandwich", "attention_softcap": 5.0, "sliding_window": 4},
    "olmo2": {"norm": "rmsnorm", "norm_position": "output", "qk_norm": True, "qk_norm_over": "heads"},
    "neox": {"parallel_residual": True, "position": "rope", "rope_fraction": 0.5},
    "2017": {"norm_position": "post", "activation": "relu", "position": "sinusoidal", "remat": "full"},
    "scanned": {"scan_layers": True, "remat": "dots"},
}


def test_a_is_drawn_for_each_matrix_and_b_is_zero():
    """Two matrices of one shape: each a is normal with a variance of 1 / D."""
    params = {"h_0": {"attn": {name: {"kernel": np.zeros((400, 100))} for name in ("q", "k", "v")}}}
    adapters = init_adapters(LoraConfig(rank=50, targets=("q", "v")), jax.random.key(0), params)["h_0"]["attn"]
    assert set(adapters) == {"q", "v"}
    for adapter in adapters.values():
        assert adapter["lora_a"].shape == (400, 50) and adapter["lora_b"].shape == (50, 100)
        np.testing.assert_allclose(np.std(adapter["lora_a"]) * 400**0.5, 1.0, atol=0.03)  # 6 standard errors of 20,000
        assert not adapter["lora_b"].any()
    assert abs(np.corrcoef(*(adapter["lora_a"].ravel() for adapter in adapters.values()))[0, 1]) < 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_adds_an_adapter_as_if_it_were_merged(name):
    """Losses and the adapters' gradients, for all matrices of all families."""
    config = dataclasses.replace(TINY, **FAMILIES[name])
    model, params = make_model(config)
    if config.scan_layers:
        params = stack_layers(make_model(dataclasses.replace(config, scan_layers=False))[1], config.n_layer)
    draw = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda x: jnp.asarray(0.3 * draw.normal(size=x.shape), jnp.float32),
        init_adapters(ALL, jax.random.key(0), params),
    )
    tokens = tokens_BT(config)
    batch = Batch(inputs_BT=tokens, targets_BT=jnp.roll(tokens, -1, axis=1))

    def loss(adapters, combine):
        nats, count = batch_loss(combine(ALL, adapters, params), batch, None, model=model)
        return nats / count

    joined, merged = (
        jax.jit(jax.value_and_grad(lambda x, combine=combine: loss(x, combine)))(adapters)
        for combine in (join_adapters, merge_adapters)
    )
    np.testing.assert_allclose(joined[0], merged[0], rtol=1e-5)
    chex.assert_trees_all_close(joined[1], merged[1], rtol=1e-4, atol=1e-5)  # sums in another order, of numbers up to 1
    plain = loss(jax.tree.map(jnp.zeros_like, adapters), join_adapters)
    assert abs(float(plain - joined[0])) > 1e-3


def temporaries(lora: LoraConfig) -> int:
    """Bytes that XLA needs for a step besides its arguments."""
    experiment = Experiment(
        name="memory",
        model=GPTConfig(vocab_size=64, block_size=16, n_layer=3, n_head=4, n_embd=128),
        data=DataConfig(),
        train=TrainConfig(batch_size=1, init_from=None if lora.rank is None else "x"),
        lora=lora,
    )
    return make_trainer(experiment).lower().compile().memory_analysis().temp_size_in_bytes


def test_adapters_need_no_gradient_of_the_matrices():
    """With few tokens nearly all temporaries are such gradients."""
    full = temporaries(LoraConfig())
    assert full > 3 * 12 * 128**2 * 4  # one gradient of all matrices
    assert temporaries(LoraConfig(rank=4)) < 0.3 * full
