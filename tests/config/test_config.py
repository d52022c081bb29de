"""Configuration: every field is validated, with both numbers in the message, and survives JSON."""

import contextlib
import dataclasses
import json
import math
import re
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxgpt.config.serialize import differences, from_dict
from jaxgpt.config.validate import Interval, check_count
from jaxgpt.data.dataset import DataConfig
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment, ParallelConfig, TrainConfig
from jaxgpt.lora import LoraConfig
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (GPTConfig, dict(n_embd=770, n_head=12), "n_embd=770 is not divisible by n_head=12"),
        (GPTConfig, dict(n_head=4, n_embd=12, position="rope"), "head size 3"),
        (GPTConfig, dict(n_layer=0), "n_layer=0: needs at least 1"),
        (GPTConfig, dict(dropout=1.0), "dropout=1.0: needs at least 0 and less than 1"),
        (GPTConfig, dict(norm="batchnorm"), "norm='batchnorm': needs one of layernorm, rmsnorm"),
        (GPTConfig, dict(bias=1), "bias=1: needs true or false"),
        (GPTConfig, dict(n_embd=np.float64(72)), "n_embd=72.0: needs a whole number"),
        (OptimConfig, dict(learning_rate=0.0), "learning_rate=0.0: needs more than 0"),
        (OptimConfig, dict(learning_rate=np.float32("nan")), "learning_rate=nan: needs a finite number"),
        # float32 rounds it to 1, and the optimiser divides by 1 - beta
        (OptimConfig, dict(beta1=1 - 1e-8), "beta1=0.99999999: needs at least 0 and less than 0.999999"),
        (OptimConfig, dict(weight_decay=2e3), "weight_decay=2000.0 times learning_rate=0.001 is 2: needs at most 1"),
        (OptimConfig, dict(name="muon", weight_decay=51.0), "times muon_learning_rate=0.02 is 1.02: needs at most 1"),
        (ParallelConfig, dict(data=-1, fsdp=-1), "data=-1, fsdp=-1, tensor=1: needs counts of devices, at most one"),
        (TrainConfig, dict(seed=np.uint64(2**64 - 1)), "needs a number that fits in 64 bits"),
        (Experiment, dict(name="a/b"), "name='a/b'"),
    ],
)
def test_a_wrong_value_is_told_with_what_it_is_and_what_it_must_be(kind, values, said):
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        kind(**values)
    assert isinstance(caught.value, ValueError)


def test_scalars_of_numpy_and_jax_become_pythons():
    """So that a configuration made of them is the same, as JSON and as a key, as that of plain numbers."""
    for plain, other in (
        (GPTConfig(n_embd=72, bias=False), GPTConfig(n_embd=np.int64(72), bias=np.bool_(False))),
        (GPTConfig(n_embd=72, mlp_dim=8), GPTConfig(n_embd=jnp.int32(72), mlp_dim=np.array(8))),
        (OptimConfig(grad_clip=0.5), OptimConfig(grad_clip=jnp.float32(0.5))),
    ):
        assert plain == other and hash(plain) == hash(other) and differences(plain, other) == {}
        assert json.dumps(dataclasses.asdict(plain)) == json.dumps(dataclasses.asdict(other))


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), jnp.int32(3)], ids=repr)
def test_a_count_is_an_int_whatever_held_it(value):
    found = check_count("n", value)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [np.int32(-2), np.float32(2), True, np.array([2]), "2", 11, 10**4000])
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


def values_of(hint):
    """A strategy for the values that an annotation of a field allows."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple:
        return st.lists(st.text(max_size=3), min_size=1, max_size=3).map(tuple)
    if origin is Annotated:
        bounds = next(part for part in arguments[1:] if isinstance(part, Interval))
        low = bounds.ge if bounds.gt is None else bounds.gt
        high = bounds.le if bounds.lt is None else bounds.lt
        if arguments[0] is int:
            return st.integers(low, 2**20 if high is None else high - (bounds.lt is not None))
        return st.floats(low, 1e3 if high is None else high)
    kinds = {bool: st.booleans(), str: st.text(max_size=8), type(None): st.none(), float: st.floats(5, 9)}
    return kinds[hint]


SECTIONS = {
    section: (kind, {name: values_of(hint) for name, hint in get_type_hints(kind, include_extras=True).items()})
    for section, kind in get_type_hints(Experiment).items()
    if section != "name"
}


@st.composite
def experiments(draw):
    """An experiment with a few fields drawn in each section, where they happen to be valid together."""
    sections = {}
    for section, (kind, values) in (item for item in SECTIONS.items() if item[1][1]):
        for name in draw(st.lists(st.sampled_from(list(values)), max_size=3)):
            with contextlib.suppress(UserError):
                sections[section] = dataclasses.replace(sections.get(section, kind()), **{name: draw(values[name])})
    for section in list(sections):
        try:
            Experiment(name="x", **sections)
        except UserError:
            del sections[section]
    return Experiment(name=draw(st.sampled_from(["x", "a-b_c", "ñ"])), **sections)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50)  # other work on the machine
@given(experiments())
def test_json_and_back_is_the_identity(experiment):
    assert from_dict(Experiment, json.loads(json.dumps(dataclasses.asdict(experiment)))) == experiment


def test_unknown_and_missing_fields_are_errors():
    with pytest.raises(UserError, match=r"unknown field model.n_layr \(did you mean n_layer\?\)"):
        from_dict(Experiment, {"name": "x", "model": {"n_layr": 3}})
    with pytest.raises(UserError, match="missing name"):
        from_dict(Experiment, {})
    with pytest.raises(UserError, match="needs an object"):
        from_dict(Experiment, {"name": "x", "model": 3})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "model", "train", "steps", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # other work on the machine
@given(JSON)
def test_any_json_gives_an_experiment_or_a_user_error(values):
    try:
        assert isinstance(from_dict(Experiment, values), Experiment)
    except UserError as e:
        assert str(e)
