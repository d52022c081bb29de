"""The table of shardings, slices, and what a trainer chooses: sizes, strategies, losses."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment, ParallelConfig, TrainConfig
from jaxgpt.hf.families import FAMILIES
from jaxgpt.lora import LoraConfig, freeze, init_adapters
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.parallel.mesh import (
    MESH_AXES,
    PARAMETER_SPECS,
    _state_shardings,
    check_divisible,
    count_slices,
    find_spec,
    make_mesh,
    split_slices,
)
from jaxgpt.parallel.strategy import split_batch
from jaxgpt.parallel.trainer import choose_strategy
from jaxgpt.train import TrainState
from tests.helpers import TINY
from tests.hf.test_families import MODELS
from tests.test_model import ARCHITECTURES

CONFIGS = {name: dataclasses.replace(TINY, **kind) for name, kind in ARCHITECTURES.items()}
CONFIGS |= {f"{kind} of hf": FAMILIES[kind].read(MODELS[kind]) for kind in ("qwen3", "gemma3_text")}


MESH = AbstractMesh((2, 2, 2), MESH_AXES)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_parameter_has_exactly_one_rule(config):
    if config.global_every is None:
        config = dataclasses.replace(config, scan_layers=config.bias, tie_embeddings=not config.tie_embeddings)
    params, lora = config.make_model().shapes(), LoraConfig(rank=1, targets=("q", "k", "v", "c_proj"), frozen="int8")
    for names, x in flatten_dict(params).items():
        matches = [s for rule, s in PARAMETER_SPECS.items() if re.fullmatch(f"(.*/)?({rule})", "/".join(names))]
        assert len(matches) == 1 and x.ndim - len(matches[0]) == (names[0] == "h"), names
    adapters = jax.eval_shape(functools.partial(init_adapters, lora), jax.random.key(0), params)
    frozen = jax.eval_shape(functools.partial(freeze, lora), params)
    for tree in (params, adapters, frozen):
        for names, x in flatten_dict(tree).items():
            assert len(find_spec(names, x.ndim, config)) == x.ndim, names


def test_the_axes_of_a_model():
    config = GPTConfig(vocab_size=8, n_layer=1, n_head=2, n_embd=8, qk_norm=True, norm="rmsnorm", activation="swiglu")
    config = dataclasses.replace(config, bias=False, qkv_bias=True, tie_embeddings=False, scan_layers=True)
    attn, both = "h/block/attn", ("tensor", "fsdp")
    for name, ndim, spec in (
        ("wte/embedding", 2, P("tensor", "fsdp")),
        (f"{attn}/q/kernel", 3, P(None, "fsdp", "tensor")),
        (f"{attn}/v/bias", 2, P(None, both)),
        (f"{attn}/c_proj/kernel", 3, P(None, "tensor", "fsdp")),
        (f"{attn}/q_norm/scale", 2, P(None, None)),
        ("h_0/mlp/c_fc/lora_a", 2, P("fsdp", None)),
        ("h_0/mlp/c_fc/lora_b", 2, P(None, "tensor")),
        ("h_0/mlp/c_proj/kernel_scale", 1, P("fsdp")),
        ("h_0/router/kernel", 2, None),
        ("h_0/mlp/c_fc/bias", 0, None),
    ):
        assert find_spec(tuple(name.split("/")), ndim, config) == spec, name
    over_heads = dataclasses.replace(config, qk_norm_over="heads")
    assert find_spec(("h", "block", "attn", "q_norm", "scale"), 2, over_heads) == P(None, both)


def keep_rows(params):
    """Keep each matrix and its first row, by name, and one number."""
    return {"rows": jax.tree.map(lambda x: {"all": x, "row": x[0]} if x.ndim == 2 else (), params), "n": jnp.zeros(())}


def test_what_an_optimiser_keeps_is_sharded_like_its_parameters():
    config = dataclasses.replace(TINY, vocab_size=16)
    params = config.make_model().shapes()
    rows = optax.GradientTransformation(keep_rows, lambda updates, state, params=None: (updates, state))
    own = optax.chain(rows, optax.masked(optax.trace(0.9), {name: name == "wte" for name in params}))
    adamw, own = (
        _state_shardings(MESH, TrainState(0, params, jax.eval_shape(x.init, params), 0, 0), config, x)
        for x in (OptimConfig().make_optimizer(10, model=config), own)
    )
    assert optax.tree.get(adamw, "mu") == optax.tree.get(adamw, "nu") == adamw.params == own.params
    place, replicated = own.params["wte"]["embedding"], NamedSharding(MESH, P())
    kept, masked = own.opt_state
    assert kept["n"] == replicated and kept["rows"]["wte"]["embedding"] == {"all": place, "row": replicated}
    assert jax.tree.leaves(masked) == [place] and place.spec == P("tensor", "fsdp")


# Slices


def tpus(*slices: int):
    return [types.SimpleNamespace(platform="tpu", slice_index=index) for index in slices]


def test_tpus_state_their_slice():
    mixed = tpus(1, 0, 1, 0)
    assert count_slices(mixed) == 2
    assert split_slices(mixed, 2) == [[mixed[1], mixed[3]], [mixed[0], mixed[2]]]
    described = [types.SimpleNamespace(platform="tpu")] * 4  # by the compiler, without a TPU
    assert count_slices(described) == 1 and split_slices(described, 1) == [described]
    for devices, slices, message in (
        (tpus(0, 0, 1, 1), 1, "slices=1, but these TPUs are of 2"),
        (tpus(0, 0), 2, "slices=2, but these TPUs are of 1"),
    ):
        with pytest.raises(UserError, match=message):
            split_slices(devices, slices)


def test_other_devices_are_in_blocks():
    gpus = [types.SimpleNamespace(platform="gpu", slice_index=0, process_index=i // 2) for i in range(8)]
    assert count_slices(gpus) == 1
    assert split_slices(gpus, 4) == [gpus[0:2], gpus[2:4], gpus[4:6], gpus[6:8]]


# Sizes and strategies, on the one device of this process

GPT2 = GPTConfig()


def divide(*, config=GPT2, **sizes):
    return check_divisible(config, {"data": 1, "fsdp": 1, "tensor": 1} | sizes)


def arrange(**sizes):
    return make_mesh([None] * 8, ParallelConfig(**sizes), GPT2)


def choose(is_resumed=False, **parallel):
    experiment = Experiment(name="e", train=TrainConfig(batch_size=64), parallel=ParallelConfig(**parallel))
    return choose_strategy(experiment, is_resumed=is_resumed)


def split(batch_size):
    return split_batch(batch_size, 8, ParallelConfig())


def in_chunks(n):
    return Experiment(name="chunks", parallel=ParallelConfig(loss_chunk=n))


@pytest.mark.parametrize(
    ("call", "how", "message"),
    [
        (arrange, dict(fsdp=4, slices=4), "slices=4 does not divide parallel.data=2"),
        (choose, dict(strategy="single", slices=2), "slices need --parallel.strategy mesh, not single"),
        (choose, dict(fsdp=2), "need --parallel.strategy mesh, not auto"),
        (choose, dict(strategy="mesh", fsdp=2), "does not make the 1 devices .* Or take --parallel.strategy auto"),
        (divide, dict(tensor=8), r"n_head=12 does not divide over parallel.tensor=8: take a multiple of 8"),
        (divide, dict(config=GPTConfig(n_kv_head=2), tensor=4), "n_kv_head=2 does not divide over parallel.tensor=4"),
        (divide, dict(config=GPTConfig(vocab_size=103), tensor=2), "vocab_size=103 .* take a multiple"),
        (divide, dict(fsdp=512), r"n_embd=768 does not divide over parallel.fsdp=512"),
        (split, dict(batch_size=12), "batch_size=12 does not divide over 8 devices: take a multiple"),
        (in_chunks, dict(n=48), "loss_chunk=48 does not divide model.block_size=1024: take a divisor"),
        (ParallelConfig, dict(tensor=0), "need counts of devices"),
        (ParallelConfig, dict(coordinator="a:1"), "give all three"),
        (ParallelConfig, dict(coordinator="a:1", processes=2, process_id=2), "process_id=2: needs less than"),
    ],
)
def test_bad_sizes_are_told(call, how, message):
    with pytest.raises(UserError, match=message):
        call(**how)


def test_auto_takes_one_device_whatever_mesh_is_recorded():
    strategy, divided = choose(is_resumed=True, micro_batch_size=4, data=2, fsdp=4)
    assert (strategy.name, divided.micro_batch_size) == ("one device", 4)


@pytest.mark.parametrize(
    ("batch", "shards", "micro", "expected"),
    [(480, 8, 12, (12, 5)), (480, 16, 12, (10, 3)), (480, 8, None, (60, 1)), (8, 8, 4, (1, 1))],
)
def test_accumulation_follows_from_the_batch_and_the_devices(batch, shards, micro, expected):
    found = split_batch(batch, shards, ParallelConfig(micro_batch_size=micro))
    assert (found.micro_batch_size, found.grad_accum_steps) == expected
    assert found.micro_batch_size * shards * found.grad_accum_steps == batch
