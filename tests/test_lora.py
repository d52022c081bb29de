"""Adapters: how they begin, and that a layer adds them as if they were merged. How they train: runs/test_pretrained.py."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.batch import Batch
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment, TrainConfig
from jaxgpt.lora import (
    LoraConfig,
    freeze,
    from_int4,
    init_adapters,
    join_adapters,
    merge_adapters,
    to_int4,
    with_adapters,
)
from jaxgpt.loss import make_loss
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.trainer import make_trainer
from tests.helpers import TINY, make_model, stack_layers, tokens_BT

ALL = LoraConfig(rank=2, targets=("q", "k", "v", "c_fc", "c_proj"))
FAMILIES = {
    "gpt2": {},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False},
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


# An adapter sees its dense layer alone, whatever is around it, and layers that are stacked.
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("gpt2", "int8"),
        ("llama", "int4"),
        *(pytest.param("scanned", how, marks=pytest.mark.slow) for how in ("float32", "bfloat16", "int8", "int4")),
    ],
)
def test_a_layer_adds_an_adapter_as_if_it_were_merged(name, frozen):
    """Losses and the adapters' gradients, for all matrices."""
    config, lora = dataclasses.replace(TINY, **FAMILIES[name]), dataclasses.replace(ALL, frozen=frozen)
    model, params = make_model(config)
    if config.scan_layers:
        params = stack_layers(make_model(dataclasses.replace(config, scan_layers=False))[1], config.n_layer)
    draw = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda x: jnp.asarray(0.3 * draw.normal(size=x.shape), jnp.float32),
        init_adapters(lora, jax.random.key(0), params),
    )
    tokens = tokens_BT(config)
    batch = Batch(inputs_BT=tokens, targets_BT=jnp.roll(tokens, -1, axis=1))

    def loss(adapters, combine):
        nats, count, _ = with_adapters(make_loss(model))(combine(lora, adapters, params), batch, None)
        return nats / count

    def join(lora, adapters, params):
        return join_adapters(lora, adapters, freeze(lora, params))

    joined, merged = (
        jax.jit(jax.value_and_grad(lambda x, combine=combine: loss(x, combine)))(adapters)
        for combine in (join, merge_adapters)
    )
    np.testing.assert_allclose(joined[0], merged[0], rtol=1e-5)
    chex.assert_trees_all_close(joined[1], merged[1], rtol=1e-4, atol=1e-5)  # sums in another order, of numbers up to 1
    assert max(jnp.abs(x).max() for x in jax.tree.leaves(joined[1])) > 1e-3


def small(rank, frozen="float32"):
    """A trainer of one layer. rank: None trains all parameters."""
    lora = LoraConfig() if rank is None else LoraConfig(rank=rank, frozen=frozen)
    shape = dict(vocab_size=8, block_size=16, n_layer=1, n_head=4, n_embd=128, position="rope", bias=False)
    train = TrainConfig(batch_size=1, init_from=None if rank is None else "x")
    return make_trainer(Experiment(name="memory", model=GPTConfig(**shape), train=train, lora=lora))


def test_adapters_need_no_gradient_of_the_matrices():
    """With few tokens nearly all of a step's temporaries are such gradients."""
    full, adapters = (small(rank).lower().compile().memory_analysis().temp_size_in_bytes for rank in (None, 4))
    assert full > 12 * 128**2 * 4  # one gradient of all matrices
    assert adapters < 0.3 * full


def test_rounded_matrices_take_a_quarter_or_an_eighth_of_the_memory():
    def held(frozen):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(small(4, frozen).abstract_state.frozen_params))

    whole = held("float32")
    assert held("int8") < 0.27 * whole and held("int4") < 0.17 * whole  # 5 bits a weight


def test_four_bits_are_the_nearest_of_16_values_and_are_rounded_once():
    """Groups have 32 inputs, or the largest number that divides both; each layer of a stack is rounded by itself."""
    kernel_DF = jax.random.normal(jax.random.key(0), (48, 6))
    codes, scale = to_int4(kernel_DF)
    assert codes.shape == (24, 6) and scale.shape == (2, 3, 6)  # groups of 16
    step, low = np.repeat(np.asarray(scale, np.float32), 16, axis=1)
    nearest = np.clip(np.round((kernel_DF - low) / step), 0, 15)
    np.testing.assert_allclose(from_int4(codes, scale), nearest * step + low, rtol=0, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, to_int4(from_int4(codes, scale)), (codes, scale))
    stacked = to_int4(jnp.stack([kernel_DF, 3 * kernel_DF]))
    np.testing.assert_array_equal(stacked[0], [codes, codes])
    with pytest.raises(UserError, match="needs an even number of inputs, and a matrix has 5"):
        to_int4(jnp.ones((5, 4)))
