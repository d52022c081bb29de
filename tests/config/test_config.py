"""Configuration: every field is validated, with both numbers in the message, and survives JSON."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from jaxgpt.config.serialize import from_dict
from jaxgpt.config.validate import check_count
from jaxgpt.data.dataset import DataConfig
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment, ParallelConfig, TrainConfig
from jaxgpt.lora import LoraConfig
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.presets import finetune, quickstart


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (GPTConfig, dict(n_embd=770, n_head=12), "n_embd=770 is not divisible by n_head=12"),
        (GPTConfig, dict(n_layer=0), "n_layer=0: needs at least 1"),
        (GPTConfig, dict(norm="batchnorm"), "norm='batchnorm': needs one of layernorm, rmsnorm"),
        (GPTConfig, dict(bias=1), "bias=1: needs true or false"),
        (GPTConfig, dict(n_embd=np.float64(72)), "n_embd=72.0: needs a whole number"),
        # float32 rounds it to 1, and the optimiser divides by 1 - beta
        (OptimConfig, dict(beta1=1 - 1e-8), "beta1=0.99999999: needs less than 0.999999"),
        (OptimConfig, dict(weight_decay=2e3), "weight_decay=2000.0 times learning_rate=0.001 is 2: needs at most 1"),
        (ParallelConfig, dict(data=-1, fsdp=-1), "data, fsdp, tensor = (-1, -1, 1): need counts of devices"),
        (Experiment, dict(name="a/b"), "name='a/b'"),
    ],
)
def test_a_wrong_value_is_told_with_what_it_is_and_what_it_must_be(kind, values, said):
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        kind(**values)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", [np.int32(-2), np.float32(2), True, "2", 11, 10**4000])
def test_what_is_no_count_is_told(value):
    with pytest.raises(UserError, match="needs (a whole number|at least 1|at most 10|a number that fits in 64 bits)"):
        check_count("n", value, high=10)


FLOATS = [
    (config, field.name)
    for config in (GPTConfig, DataConfig, OptimConfig, LoraConfig, TrainConfig, ParallelConfig)
    for field in dataclasses.fields(config)
    if "Float" in field.type or "float" in field.type or field.type in ("Fraction", "Decay")
]


@pytest.mark.parametrize(("config", "name"), FLOATS)
def test_every_number_and_products_of_two_are_float32s(config, name):
    for value in (math.nan, math.inf, 1e300, 1e19, 1e-19, 1e-300):
        with pytest.raises(UserError, match=re.escape(f"{name}={value}: needs ")):
            config(**{name: value})


def test_derived_sizes():
    c = GPTConfig(n_embd=96, n_head=6, n_kv_head=2).shape
    assert (c.head_dim, c.n_kv_head, c.mlp_dim) == (16, 2, 384)
    assert GPTConfig(n_embd=96, n_head=6, activation="swiglu").shape.mlp_dim == 256  # 8/3 of 96
    assert GPTConfig(n_embd=96, n_head=6, mlp_dim=100).shape.mlp_dim == 100


EXPERIMENTS = (
    quickstart(chat=True),
    finetune(),
    Experiment(
        name="ñ",
        model=GPTConfig(
            n_head=2,
            n_embd=8,
            position="rope",
            rope_scaling="longrope",
            rope_original_context=16,
            rope_short_factors=(1.0, 2.5),
            rope_long_factors=(3.0, 1e-9),
        ),
        optim=OptimConfig(grad_clip=None, horizons=(4, 50)),
        train=TrainConfig(init_from="runs/a"),
        lora=LoraConfig(rank=2, targets=("q",)),
    ),
)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_json_and_back_is_the_identity(experiment):
    assert from_dict(Experiment, json.loads(json.dumps(dataclasses.asdict(experiment)))) == experiment


def test_what_earlier_versions_wrote_is_read():
    with pytest.warns(
        UserWarning, match="train.log_layers=True: the norms of layers are logged by an OptimConfig.metrics"
    ):
        assert from_dict(Experiment, {"name": "x", "train": {"log_layers": True}}) == Experiment(name="x")
    read = from_dict(Experiment, {"name": "x", "train": {"attention": "xla"}})
    assert read.train.attention == "plain"


def test_unknown_and_missing_fields_are_errors():
    with pytest.raises(UserError, match=r"unknown field model.n_layr \(did you mean n_layer\?\)"):
        from_dict(Experiment, {"name": "x", "model": {"n_layr": 3}})
    with pytest.raises(UserError, match="missing name"):
        from_dict(Experiment, {})
    with pytest.raises(UserError, match="needs an object"):
        from_dict(Experiment, {"name": "x", "model": 3})
