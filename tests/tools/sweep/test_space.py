"""The space of a sweep: what --over means, and how evenly the points cover it."""

import numpy as np
import pytest

from jaxgpt.config import Experiment
from jaxgpt.errors import UserError
from jaxgpt.tools.sweep.space import Axis, describe_point, draw_points, parse_axes, parse_axis, with_values

RATE = "optim.learning-rate=1e-4..1e-1"


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        (RATE, Axis(field="optim.learning_rate", low=1e-4, high=1e-1)),
        ("optim.learning_rate=.5..1", Axis(field="optim.learning_rate", low=0.5, high=1.0)),
        ("model.dropout=0..0.3", Axis(field="model.dropout", high=0.3)),
        ("model.n-layer=1..8", Axis(field="model.n_layer", low=1, high=8, is_whole=True)),
        ("optim.warmup-steps=None,10,100", Axis(field="optim.warmup_steps", choices=(None, 10, 100))),
        ("optim.grad-clip=0.5,1", Axis(field="optim.grad_clip", choices=(0.5, 1.0))),
        ("model.activation=relu, gelu,swiglu", Axis(field="model.activation", choices=("relu", "gelu", "swiglu"))),
        ("model.qk-norm=true,False", Axis(field="model.qk_norm", choices=(True, False))),
        ("model.position=none,rope", Axis(field="model.position", choices=("none", "rope"))),
    ],
)
def test_what_is_given_for_over(text, axis):
    assert parse_axis(text) == axis
    assert parse_axis(str(axis)) == axis  # as `sweep.json` has it


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim.learning-rate", "needs FIELD=LOW..HIGH or FIELD=A,B,C"),
        ("=1..2", "needs FIELD=LOW..HIGH"),
        ("learning-rate=1..2", "there is no field 'learning_rate' (did you mean optim.learning_rate?)"),
        ("optim=1..2", "there is no field 'optim'"),
        ("train.seed=1,2", "train.seed cannot vary"),
        ("train.steps=10..20", "train.steps cannot vary"),
        ("train.batch-size=1..8", "train.batch_size cannot vary: it changes the data, the tokens or the steps"),
        ("data.tokenizer=char,byte", "data.tokenizer cannot vary"),
        ("model.block-size=8..16", "model.block_size cannot vary"),
        ("parallel.fsdp=1,2", "Fields of model, optim, lora can vary, except model.block_size and model.vocab_size"),
        ("lora.targets=q,v", "lora.targets cannot vary: it is a list"),
        ("optim.learning-rate=1e-1..1e-4", "needs LOW below HIGH"),
        ("optim.learning-rate=1..1", "needs LOW below HIGH"),
        ("optim.learning-rate=nan..1", "needs LOW below HIGH"),
        ("optim.learning-rate=a..b", "needs two numbers"),
        ("optim.learning-rate=0..1", "optim.learning_rate=0.0: needs more than 0"),
        ("optim.learning-rate=1..inf", "optim.learning_rate=inf: needs a finite number"),
        ("optim.beta2=0.9..1", "optim.beta2=1.0: needs at least 0 and less than 0.999999"),
        ("model.n-layer=1.5..2", "needs whole numbers"),
        ("model.n-layer=1..inf", "needs whole numbers"),
        ("model.n-layer=0..2", "model.n_layer=0: needs at least 1"),
        ("model.activation=relu..gelu", "not a number: give choices"),
        ("model.activation=relu,foo", "model.activation='foo': needs one of relu, gelu"),
        ("model.activation=relu,relu", "needs two or more different choices"),
        ("model.n-layer=2", "needs two or more different choices"),
        ("model.n-layer=2,three", "model.n_layer='three': needs a whole number"),
        ("model.bias=1,0", "model.bias='1': needs true or false"),
    ],
)
def test_what_cannot_be_swept(text, said):
    with pytest.raises(UserError) as caught:
        parse_axes([text])
    assert str(caught.value).startswith(f"--over {text}: ") and said in str(caught.value)


def test_a_sweep_has_fields_and_each_once():
    with pytest.raises(UserError, match=r"--over has optim\.learning_rate twice"):
        parse_axes([RATE, "model.n-layer=1..2", "optim.learning_rate=1,2"])
    with pytest.raises(UserError, match="a sweep needs a field: --over"):
        parse_axes([])


def test_one_field_is_spread_evenly():
    rates = [point["optim.learning_rate"] for point in draw_points(parse_axes([RATE]), 20, 0)]
    assert np.diff(np.log10(rates)) == pytest.approx(3 / 20, abs=1e-3)
    assert rates[0] == pytest.approx(10 ** (-4 + 3 / 40), rel=1e-3)
    linear = [point["model.dropout"] for point in draw_points(parse_axes(["model.dropout=0..0.4"]), 4, 0)]
    assert linear == pytest.approx([0.05, 0.15, 0.25, 0.35])
    layers = [point["model.n_layer"] for point in draw_points(parse_axes(["model.n-layer=1..3"]), 20, 0)]
    assert layers == [1, 2, 3]  # repetitions are one trial
    choices = draw_points(parse_axes(["model.activation=relu,gelu,swiglu"]), 3, 0)
    assert [point["model.activation"] for point in choices] == ["relu", "gelu", "swiglu"]


@pytest.mark.parametrize("seed", range(3))
def test_several_fields_are_each_covered(seed):
    """The first 16 points have one in each sixteenth of the first field, and 27 have three in each ninth of the second."""
    axes = parse_axes([RATE, "model.dropout=0..0.9", "model.activation=relu,gelu"])
    points = draw_points(axes, 27, seed)
    assert len(points) == 27 and points == draw_points(axes, 27, seed) != draw_points(axes, 27, seed + 1)
    first = [(np.log10(p["optim.learning_rate"]) + 4) / 3 * 16 for p in points[:16]]
    second = [p["model.dropout"] * 10 for p in points]
    assert sorted(map(int, first)) == list(range(16))
    assert sorted(map(int, second)) == sorted([*range(9)] * 3)


def test_values_stay_within_the_range_and_are_readable():
    axis = parse_axis("optim.beta2=0.99..0.99996")
    assert axis.at(0.9999) == 0.99996 and axis.at(0.0) == 0.99
    assert parse_axis("optim.learning-rate=1e-4..1e-1").at(0.5) == 0.003162


def test_fields_that_depend_on_each_other_change_together():
    e = with_values(Experiment(name="x"), {"model.n_head": 5, "model.n_embd": 20, "optim.beta1": 0.5})
    assert (e.model.n_head, e.model.n_embd, e.optim.beta1, e.name) == (5, 20, 0.5, "x")
    assert describe_point({"model.n_head": 5, "optim.beta1": 0.5}) == "model.n_head=5, optim.beta1=0.5"
