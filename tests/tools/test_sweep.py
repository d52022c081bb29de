"""Sweeps: what --over means, who is kept, who wins, and that an interrupted one ends as any other."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxgpt.cli import on_experiments
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.config import Experiment, OptimConfig, TrainConfig
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import Diverged, Preempted, UserError
from jaxgpt.runs.directory import write_metadata
from jaxgpt.runs.metrics import MetricsFile
from jaxgpt.tools.space import Axis, draw_points, parse_axes, parse_axis, with_values
from jaxgpt.tools.sweep import (
    Round,
    Sweep,
    format_cost,
    format_sweep,
    gap,
    plan_rounds,
    run_sweep,
    shorten,
    write_report,
)
from tests.helpers import tiny_experiment

RATE = "optim.learning-rate=1e-4..1e-1"
EXPERIMENT = Experiment(name="fake", optim=OptimConfig(warmup_steps=50), train=TrainConfig(steps=600, seed=7))


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        (RATE, Axis(field="optim.learning_rate", low=1e-4, high=1e-1)),
        ("optim.learning_rate=.5..1", Axis(field="optim.learning_rate", low=0.5, high=1.0)),
        ("model.dropout=0..0.3", Axis(field="model.dropout", high=0.3)),
        ("model.n-layer=1..8", Axis(field="model.n_layer", low=1, high=8)),
        ("optim.warmup-steps=1e1..1e3", Axis(field="optim.warmup_steps", low=10, high=1000)),
        ("optim.warmup-steps=None,10,100", Axis(field="optim.warmup_steps", choices=(None, 10, 100))),
        ("optim.grad-clip=0.5,1", Axis(field="optim.grad_clip", choices=(0.5, 1.0))),
        ("model.activation=relu, gelu,swiglu", Axis(field="model.activation", choices=("relu", "gelu", "swiglu"))),
        ("model.qk-norm=true,False", Axis(field="model.qk_norm", choices=(True, False))),
        ("model.position=none,rope", Axis(field="model.position", choices=("none", "rope"))),
    ],
)
def test_what_is_given_for_over(text, axis):
    assert repr(parse_axis(text)) == repr(axis)
    assert repr(parse_axis(str(axis))) == repr(axis)  # as `sweep.json` has it


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim.learning-rate", "needs FIELD=LOW..HIGH or FIELD=A,B,C"),
        ("=1..2", "needs FIELD=LOW..HIGH"),
        ("learning-rate=1..2", "there is no field 'learning_rate' (did you mean optim.learning_rate?)"),
        ("train.batch-size=1..8", "train.batch_size cannot vary: it changes the data, the tokens or the steps"),
        ("parallel.fsdp=1,2", "Fields of model, optim, lora can vary, except model.block_size and model.vocab_size"),
        ("model.block-size=8..16", "model.block_size cannot vary"),
        ("lora.targets=q,v", "lora.targets cannot vary: it is a list"),
        ("optim.learning-rate=1e-1..1e-4", "needs LOW below HIGH"),
        ("optim.warmup-steps=None..3", "needs LOW below HIGH"),
        ("optim.learning-rate=a..b", "optim.learning_rate='a': needs a number"),
        ("optim.learning-rate=0..1", "optim.learning_rate=0.0: needs more than 0"),
        ("optim.learning-rate=1..inf", "optim.learning_rate=inf: needs a finite number"),
        ("model.n-layer=1.5..2", "model.n_layer='1.5': needs a whole number"),
        ("model.n-layer=0..2", "model.n_layer=0: needs at least 1"),
        ("model.activation=relu..gelu", "model.activation='relu..gelu': needs one of relu, gelu"),
        ("model.activation=relu,relu", "needs two or more different choices"),
        ("model.n-layer=2", "needs two or more different choices"),
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
    def values(over, trials):
        return [value for point in draw_points(parse_axes([over]), trials, 0) for value in point.values()]

    assert np.diff(np.log10(values(RATE, 20))) == pytest.approx(3 / 20, abs=1e-3)
    assert values(RATE, 20)[0] == pytest.approx(10 ** (-4 + 3 / 40), rel=1e-3)
    assert values("model.dropout=0..0.4", 4) == pytest.approx([0.05, 0.15, 0.25, 0.35])
    assert values("model.n-layer=1..3", 20) == [1, 2, 3]  # repetitions are one trial
    assert values("model.activation=relu,gelu,swiglu", 3) == ["relu", "gelu", "swiglu"]
    assert values(RATE, 1) == [0.003162], "a value is readable"
    narrow = parse_axis("optim.beta2=0.99..0.99996")
    assert narrow.at(0.9999) == 0.99996 and narrow.at(0.0) == 0.99, "and within the range"


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


def test_fields_that_depend_on_each_other_change_together():
    e = with_values(Experiment(name="x"), {"model.n_head": 5, "model.n_embd": 20, "optim.beta1": 0.5})
    assert (e.model.n_head, e.model.n_embd, e.optim.beta1, e.name) == (5, 20, 0.5, "x")


def make(over=RATE, experiment=EXPERIMENT, **given):
    return Sweep(experiment=experiment, axes=tuple(parse_axes([over])), **given)


class Fake:
    """Writes what training would: a loss that is lowest at `best`, for short runs at a higher rate, with noise by seed."""

    def __init__(self, best=1e-2, largest=math.inf, stop_after=math.inf):
        self.best, self.largest, self.stop_after, self.runs = best, largest, stop_after, []

    def __call__(self, experiment, directory, *, progress, extend):
        if len(self.runs) >= self.stop_after:
            raise Preempted("SIGINT: step 1 is saved. To continue: jaxgpt train --run-dir x")
        self.runs.append((directory, experiment))
        directory.mkdir(parents=True)
        rate, steps, seed = experiment.optim.learning_rate, experiment.train.steps, experiment.train.seed
        if rate > self.largest:
            raise Diverged("10 steps skipped")
        write_metadata(directory, experiment, ByteTokenizer(), data={}, vocab_size=256)
        noise = np.random.default_rng([seed, int(rate * 1e9)]).normal(0, 0.003)
        shift = math.log10(600 / steps) / 4
        loss = 2 + (math.log10(rate / self.best) - shift) ** 2 / 9 + 10 / steps + noise
        file = MetricsFile(directory / "metrics.jsonl")
        file.write(step=steps, val_loss=loss)
        file.close()


def test_a_third_survives_to_three_times_the_steps():
    rounds = plan_rounds(make())
    assert rounds == [
        Round(trials=20, steps=66, seeds=(7,)),
        Round(trials=7, steps=200, seeds=(7,)),
        Round(trials=3, steps=600, seeds=(8, 9, 10)),
    ]
    assert format_cost(make(), rounds) == (
        "36 runs of 20 x 66 + 7 x 200 + 3 x 3 seeds x 600 = 8,120 steps, 13.5 times those of one full run"
    )
    assert plan_rounds(make(trials=3)) == [Round(trials=3, steps=600, seeds=(8, 9, 10))]
    assert [r.trials for r in plan_rounds(make(trials=28))] == [28, 10, 4, 2]
    few = dataclasses.replace(EXPERIMENT, train=TrainConfig(steps=8), optim=OptimConfig())
    with pytest.raises(UserError, match=r"train\.steps=8: 20 trials begin with runs of 1/9 of the steps"):
        plan_rounds(make(experiment=few))


def test_a_short_run_has_a_complete_schedule():
    short = shorten(EXPERIMENT, 66, 3)
    assert (short.train.steps, short.train.seed, short.optim.warmup_steps) == (66, 3, 6)
    assert shorten(EXPERIMENT, 600, 7) == dataclasses.replace(
        EXPERIMENT, train=dataclasses.replace(EXPERIMENT.train, sample_tokens=0)
    )
    assert shorten(Experiment(name="x"), 10, 0).optim.warmup_steps is None


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep that was not interrupted: (its runs, what it said, what it found)."""
    fake, said = Fake(), []
    return fake.runs, said, run_sweep(make(), tmp_path_factory.mktemp("swept"), say=said.append, fit_one=fake)


def test_the_best_point_wins_with_seeds_that_chose_nothing(swept):
    runs, said, found = swept
    first, *_ = found["trials"]
    assert first["point"]["optim.learning_rate"] == pytest.approx(1e-2, rel=0.5)
    assert [len(losses) for losses in first["losses"]] == [1, 1, 3]
    assert [sum(len(t["losses"]) > r for t in found["trials"]) for r in range(3)] == [20, 7, 3]
    for r in range(3):  # who reached a round is above who did not, and then comes who has the lower mean
        means = [np.mean(t["losses"][r]) for t in found["trials"] if len(t["losses"]) == r + 1]
        assert means == sorted(means)
    full = [experiment.train.seed for _, experiment in runs if experiment.train.steps == 600]
    assert sorted(full) == [8, 8, 8, 9, 9, 9, 10, 10, 10]
    assert len({directory for directory, _ in runs}) == len(runs) == 36 and len(said) == 37


def test_an_interrupted_sweep_ends_as_another(swept, tmp_path):
    runs, _, expected = swept
    done = 0
    for stop_after in (0, 5, 16, 7, 3, math.inf):
        fake = Fake(stop_after=stop_after)
        try:
            found = run_sweep(make(), tmp_path, fit_one=fake)
        except Preempted:
            assert len(fake.runs) == stop_after
        done += len(fake.runs)
    assert found == expected and done == len(runs)


def test_a_diverged_run_is_last(tmp_path):
    found = run_sweep(make(trials=9), tmp_path / "some", fit_one=Fake(largest=1e-3))
    assert [None in t["losses"][-1] for t in found["trials"]] == [False] * 3 + [True] * 6
    # In the last round: the first trial had won with its other seeds.
    two = make(trials=2, seeds=2)
    best = run_sweep(two, tmp_path / "two", fit_one=Fake())["trials"][0]["trial"]
    fake = Fake()

    def lose_one(experiment, directory, *, progress, extend):
        if directory.parts[-2:] == (f"trial-{best:02}", "steps-600-seed-9"):
            directory.mkdir(parents=True)
            raise Diverged("10 steps skipped")
        fake(experiment, directory, progress=progress, extend=extend)

    found = run_sweep(two, tmp_path / "lost", fit_one=lose_one)
    assert found["trials"][1]["trial"] == best and found["gap"] is None
    assert "1 of 2 diverged" in format_sweep(two, found, tmp_path)
    with pytest.raises(UserError, match="all trials of 200 steps diverged"):
        run_sweep(make(trials=9), tmp_path / "all", fit_one=Fake(largest=0))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A sweep of one run, and its directory."""
    sweep, directory = make(trials=1, seeds=1), tmp_path_factory.mktemp("one")
    run_sweep(sweep, directory, fit_one=Fake())
    return sweep, directory


WITH_SEED_0 = dataclasses.replace(EXPERIMENT, train=TrainConfig(steps=600))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trials": 2}, "trials 1 -> 2"),
        ({"seed": 1}, "seed 0 -> 1"),
        ({"axes": make("optim.learning-rate=1e-4..1").axes}, r"over optim\.learning_rate=0\.0001\.\.0\.1 -> optim.*1"),
        ({"experiment": WITH_SEED_0}, r"another sweep: train\.seed 7 -> 0\. Name another directory with --run-dir"),
    ],
)
def test_another_sweep_is_not_mixed_with_it(one, change, said):
    sweep, directory = one
    with pytest.raises(UserError, match=said):
        run_sweep(dataclasses.replace(sweep, **change), directory, fit_one=Fake())


def test_a_sweep_may_be_resumed_with_other_logging_and_not_from_a_damaged_file(one):
    sweep, directory = one
    logged = dataclasses.replace(EXPERIMENT, train=dataclasses.replace(EXPERIMENT.train, log_every=1))
    run_sweep(dataclasses.replace(sweep, experiment=logged), directory, fit_one=lambda *a, **b: pytest.fail("a run"))
    for text in ("{}", "[]", '{"definition": {"experiment": {"name": "x"}}}', '{"definition": 3}', "{"):
        (directory / "sweep.json").write_text(text)
        with pytest.raises(UserError, match=r"sweep\.json is damaged"):
            run_sweep(sweep, directory, fit_one=Fake())


def test_a_mistake_in_the_first_run_can_be_corrected(tmp_path):
    """Nothing was trained, so the directory is free."""

    def refuse(*args, **kwargs):
        raise UserError("there is no file at nowhere.txt")

    with pytest.raises(UserError, match=r"nowhere\.txt"):
        run_sweep(make(trials=1, seeds=1), tmp_path, fit_one=refuse)
    run_sweep(make(trials=2, seeds=1), tmp_path, fit_one=Fake())
    (tmp_path / "sweep.json").unlink()
    with pytest.raises(UserError, match=r"exists and is not a sweep \(no sweep\.json\): name another with --run-dir"):
        run_sweep(make(trials=2, seeds=1), tmp_path, fit_one=Fake())


def test_a_point_that_is_no_experiment_is_found_before_the_first_run(tmp_path):
    with pytest.raises(UserError, match=r"trial 1 of the sweep, model\.n_embd=\d+: n_embd=\d+ is not divisible"):
        run_sweep(make("model.n-embd=13..23"), tmp_path / "s", fit_one=lambda *a, **b: pytest.fail("a run"))
    assert not (tmp_path / "s").exists()
    late = dataclasses.replace(EXPERIMENT, train=dataclasses.replace(EXPERIMENT.train, seed=2**32 - 2))
    with pytest.raises(UserError, match="seed=4294967296: needs"):
        run_sweep(make(experiment=late), tmp_path / "s", fit_one=Fake())


def test_equal_finalists_seldom_differ():
    """The two best of three that are equal, of 2,000 sweeps: more than noise in at most 5%."""
    rng = np.random.default_rng(0)
    found = [gap(*sorted(x, key=np.mean)[:2]) for x in rng.normal(2, 0.01, (2000, 3, 3)).tolist()]
    assert np.mean([g["mean"] > g["margin"] for g in found]) <= 0.05
    assert gap([1.0, 2.0], [1.5, 2.5]) == pytest.approx({"mean": 0.5, "margin": 0.0})
    assert gap([1.0], [1.5]) == {"mean": 0.5, "margin": None} and gap([1.0]) is None


def test_the_report(tmp_path):
    both = Sweep(experiment=EXPERIMENT, axes=tuple(parse_axes([RATE, "model.activation=relu,gelu"])), trials=9)
    found = run_sweep(both, tmp_path, fit_one=Fake(largest=5e-2, best=1e-4))
    write_report(both, found, tmp_path)
    kept = json.loads((tmp_path / "sweep.json").read_text())
    assert kept["result"] == json.loads(json.dumps(found)) and kept["definition"]["trials"] == 9
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    winner = load_experiment(str(tmp_path / "winner.py"))
    best = found["trials"][0]["point"]
    assert winner.optim.learning_rate == best["optim.learning_rate"] and winner.name == "fake-winner"
    assert winner.train == EXPERIMENT.train and winner.model.activation == best["model.activation"]
    table = format_sweep(both, found, tmp_path)
    head, _, first, *_ = table.splitlines()
    assert head == "| trial | optim.learning_rate | model.activation | 200 steps | 600 steps, new seeds (95%) |"
    assert first.startswith(f"| {found['trials'][0]['trial']} | {best['optim.learning_rate']} | ") and " ± " in first
    assert "| diverged |  |" in table and "is the lowest value tried: better ones may lie outside" in table


@pytest.mark.slow
def test_the_command(tmp_path, text_file, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = tiny_experiment(text_file, eval_every=6)
    tiny = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, n_layer=1))
    given = dict(over=("optim.learning-rate=1e-3..1e-1",), trials=4, seeds=1, experiment=tiny)
    on_experiments.sweep(**given)
    shown = capsys.readouterr()
    assert "6 runs of 4 x 2 + 2 x 6 = 20 steps" in shown.err and "jaxgpt train runs/sweeps/tiny/winner.py" in shown.out
    on_experiments.sweep(**given, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "runs/sweeps/tiny/sweep.json").read_text())["result"]
    assert [len(trial["losses"]) for trial in found["trials"]] == [2, 2, 1, 1]
