"""Sweeps: what --over means, who is kept, who wins, and that an interrupted one ends as any other."""

import contextlib
import json
import math
from unittest import mock

import numpy as np
import pytest

from jaxgpt.config.words import replace_fields
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import Diverged, Preempted, UserError
from jaxgpt.experiment import Experiment, TrainConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.runs.directory import write_metadata
from jaxgpt.runs.metrics import MetricsFile
from jaxgpt.tools import grid
from jaxgpt.tools.sweep import Axis, Round, draw_points, parse_axes, plan_rounds, shorten, sweep

RATE = "optim.learning-rate=1e-4..1e-1"
EXPERIMENT = Experiment(name="fake", optim=OptimConfig(warmup_steps=50), train=TrainConfig(steps=600, seed=7))


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        (RATE, Axis(field="optim.learning_rate", low=1e-4, high=1e-1)),
        ("model.dropout=0..0.3", Axis(field="model.dropout", high=0.3)),
        ("optim.warmup-steps=None,10,100", Axis(field="optim.warmup_steps", choices=(None, 10, 100))),
        ("model.activation=relu, gelu,swiglu", Axis(field="model.activation", choices=("relu", "gelu", "swiglu"))),
    ],
)
def test_what_is_given_for_over(text, axis):
    assert repr(parse_axes([text], EXPERIMENT)) == repr([axis])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim.learning-rate", "give FIELD=LOW..HIGH or FIELD=A,B,C"),
        ("learning-rate=1..2", "there is no such field to vary (did you mean optim.learning_rate?)"),
        ("train.batch-size=1..8", "Fields of model, optim, lora can vary"),
        ("optim.learning-rate=1e-1..1e-4", "give LOW below HIGH"),
    ],
)
def test_what_cannot_be_swept(text, said):
    with pytest.raises(UserError) as caught:
        parse_axes([text], EXPERIMENT)
    assert str(caught.value).startswith(f"--over {text}: ") and said in str(caught.value)


def test_one_field_is_spread_evenly():
    def values(over, trials):
        return [value for point in draw_points(parse_axes([over], EXPERIMENT), trials) for value in point.values()]

    assert np.diff(np.log10(values(RATE, 20))) == pytest.approx(3 / 20, abs=1e-3)
    assert values("model.dropout=0..0.4", 4) == pytest.approx([0.05, 0.15, 0.25, 0.35])
    assert values("model.n-layer=1..3", 20) == [1, 2, 3]  # repetitions are one trial


def test_several_fields_are_each_covered():
    """The first 16 points have one in each sixteenth of the first field, and 27 have three in each ninth of the second."""
    axes = parse_axes([RATE, "model.dropout=0..0.9", "model.activation=relu,gelu"], EXPERIMENT)
    points = draw_points(axes, 27)
    assert len(points) == 27 and points == draw_points(axes, 27)
    first = [(np.log10(p["optim.learning_rate"]) + 4) / 3 * 16 for p in points[:16]]
    second = [p["model.dropout"] * 10 for p in points]
    assert sorted(map(int, first)) == list(range(16))
    assert sorted(map(int, second)) == sorted([*range(9)] * 3)


def run_sweep(directory, fit=None, **given):
    given = {"experiment": EXPERIMENT, "over": (RATE,)} | given
    with mock.patch.object(grid, "fit", fit or Fake()):
        return sweep(run_dir=str(directory), **given)


class Fake:
    """Writes what training would: a loss that is lowest at `best`, for short runs at a higher rate, with noise by seed."""

    def __init__(self, best=1e-2, largest=math.inf, stop_after=math.inf):
        self.best, self.largest, self.stop_after, self.runs = best, largest, stop_after, []

    def __call__(self, experiment, directory, **how):
        if len(self.runs) >= self.stop_after:
            raise Preempted("SIGINT: step 1 is saved. To continue: jaxgpt train --run-dir x")
        self.runs.append((directory, experiment))
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
    assert plan_rounds(EXPERIMENT, 20, 3) == [
        Round(trials=20, steps=66, seeds=(7,)),
        Round(trials=7, steps=200, seeds=(7,)),
        Round(trials=3, steps=600, seeds=(8, 9, 10)),
    ]
    assert [r.trials for r in plan_rounds(EXPERIMENT, 28, 3)] == [28, 10, 4, 2]
    with pytest.raises(UserError, match=r"train\.steps=60: 200 trials begin with runs of 1/81 of the steps"):
        plan_rounds(replace_fields(EXPERIMENT, {"train.steps": 60}), 200, 3)


def test_a_short_run_has_a_complete_schedule():
    short = shorten(EXPERIMENT, 66, 3)
    assert (short.train.steps, short.train.seed, short.optim.warmup_steps) == (66, 3, 6)
    assert shorten(EXPERIMENT, 600, 7) == replace_fields(EXPERIMENT, {"train.sample_tokens": 0})
    assert shorten(Experiment(name="x"), 10, 0).optim.warmup_steps is None


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep that was not interrupted: (its runs, what it said, what it found)."""
    fake, said = Fake(), []
    return fake.runs, said, run_sweep(tmp_path_factory.mktemp("swept"), say=said.append, fit=fake)


def test_the_best_point_wins_with_seeds_that_chose_nothing(swept):
    runs, said, found = swept
    first = found.trials[0]
    assert first.point["optim.learning_rate"] == pytest.approx(1e-2, rel=0.5)
    assert [len(losses) for losses in first.losses] == [1, 1, 3]
    assert [sum(len(t.losses) > r for t in found.trials) for r in range(3)] == [20, 7, 3]
    for r in range(3):  # who reached a round is above who did not, and then comes who has the lower mean
        means = [np.mean(t.losses[r]) for t in found.trials if len(t.losses) == r + 1]
        assert means == sorted(means)
    full = [experiment.train.seed for _, experiment in runs if experiment.train.steps == 600]
    assert sorted(full) == [8, 8, 8, 9, 9, 9, 10, 10, 10]
    assert len({directory for directory, _ in runs}) == len(runs) == 36 and len(said) == 37
    assert said[0] == "8,120 steps, 13.5 times the steps of one full run"


def test_an_interrupted_sweep_ends_as_another(swept, tmp_path):
    runs, _, expected = swept
    done, said = 0, r"^SIGINT: step 1 is saved\. Run the same command to resume\.$"
    for stop_after in (0, 5, 16, 7, 3, math.inf):
        fake = Fake(stop_after=stop_after)
        with contextlib.nullcontext() if stop_after == math.inf else pytest.raises(Preempted, match=said):
            found = run_sweep(tmp_path, fit=fake)
        done += len(fake.runs)
    assert found.to_json() == expected.to_json() and done == len(runs)


def test_a_diverged_run_is_last(tmp_path):
    found = run_sweep(tmp_path / "some", trials=9, fit=Fake(largest=1e-3))
    assert [None in t.losses[-1] for t in found.trials] == [False] * 3 + [True] * 6
    # In the last round: the first trial had won with its other seeds.
    best = run_sweep(tmp_path / "two", trials=2, seeds=2).trials[0].trial
    fake = Fake()

    def lose_one(experiment, directory, **how):
        if directory.parts[-2:] == (f"trial-{best:02}", "steps-600-seed-9"):
            raise Diverged("10 steps skipped")
        fake(experiment, directory, **how)

    found = run_sweep(tmp_path / "lost", trials=2, seeds=2, fit=lose_one)
    assert found.trials[1].trial == best and "1 of 2 diverged" in str(found) and "is worse" not in str(found)
    with pytest.raises(UserError, match="all trials of 200 steps diverged"):
        run_sweep(tmp_path / "all", trials=9, fit=Fake(largest=0))


ONE = {"trials": 1, "seeds": 1}


def test_another_sweep_is_not_mixed_with_it(tmp_path):
    run_sweep(tmp_path, **ONE)
    with pytest.raises(UserError, match=r"another configuration: optim\.learning_rate 0\.003162 -> 0\.01\. "):
        run_sweep(tmp_path, **ONE, over=("optim.learning-rate=1e-4..1",))
    with pytest.raises(UserError, match="is a run and not a sweep"):
        run_sweep(tmp_path / "trial-01/steps-600-seed-8", **ONE)
    logged = replace_fields(EXPERIMENT, {"train.log_every": 1})  # which is no other sweep
    run_sweep(tmp_path, **ONE, experiment=logged, fit=lambda *a, **b: pytest.fail("a run"))


def test_the_report(tmp_path):
    over = (RATE, "model.activation=relu,gelu")
    found = run_sweep(tmp_path, over=over, trials=9, fit=Fake(largest=5e-2, best=1e-4))
    kept = json.loads((tmp_path / "sweep.json").read_text())
    assert kept["result"] == json.loads(json.dumps(found.to_json())) and kept["definition"]["trials"] == 9
    first = found.trials[0]
    head, _, line, *_ = str(found).splitlines()
    assert head == "| trial | optim.learning_rate | model.activation | 200 steps | 600 steps, new seeds (95%) |"
    assert line.startswith(f"| {first.trial} | {first.point['optim.learning_rate']} | ") and " ± " in line
    assert "| 1 of 1 diverged |  |" in str(
        found
    ) and "is an end of the values tried: better ones may lie outside" in str(found)
