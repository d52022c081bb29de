"""Scaling laws: the fit of known laws, what a plan holds, and a prediction made before the run that tests it."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from scipy.optimize import minimize

from jaxgpt.errors import Preempted, UserError
from jaxgpt.runs.directory import write_metadata
from tests.conftest import TEXT
from tests.helpers import replace_fields, script, tiny_experiment

tool = script("scaling_laws")
Law, Point, fit_law, resample_laws, make_plan = tool.Law, tool.Point, tool.fit_law, tool.resample_laws, tool.make_plan
TRUE = Law(E=0.9, A=30.0, alpha=0.36, B=60.0, beta=0.34)
N, D = (30e3, 110e3, 240e3, 416e3), (0.25e6, 0.5e6, 1e6, 2e6)
NOISE = 0.002  # relative, of a run: about that of seeds


@pytest.mark.parametrize(("seed", "spread"), [(1, NOISE), (11, 7 * NOISE)])
def test_the_fit_reaches_the_minimum_of_lbfgs(seed, spread):
    """The sum of Huber losses of log L, from the truth and from the fit on, by scipy."""
    rng = np.random.default_rng(seed)
    losses = {(n, d): float(TRUE.loss(n, d) * np.exp(spread * rng.normal())) for n in N for d in D}
    points = [Point(parameters=int(n), tokens=int(d), flops=6 * n * d, loss=x) for (n, d), x in losses.items()]
    n_P, d_P, y_P = (np.log([getattr(p, name) for p in points]) for name in ("parameters", "tokens", "loss"))

    def objective(x):
        errors = np.log(np.exp(x[0] - x[3] * n_P) + np.exp(x[1] - x[4] * d_P) + np.exp(x[2])) - y_P
        size = np.abs(errors)
        return 1e6 * np.where(size <= 1e-3, errors**2 / 2, 1e-3 * (size - 5e-4)).sum()

    def unknowns(law):
        return np.array([*np.log([law.A, law.B, law.E]), law.alpha, law.beta])

    found = fit_law(points)
    least = min(minimize(objective, unknowns(law), method="L-BFGS-B").fun for law in (TRUE, found))
    assert objective(unknowns(found)) <= least * (1 + 1e-6)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT * 72)
    return replace_fields(tiny_experiment(text), model={"n_layer": 2})


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch):
    """To trace a model takes a tenth of a second: each size is made once. Runs may be shorter than in earnest."""
    monkeypatch.setattr(tool, "make_size", make_size)
    monkeypatch.setattr(tool, "LEAST_TOKENS", 5000)
    monkeypatch.setattr(tool, "RESAMPLES", 20)


make_size = functools.cache(tool.make_size)


class Machine:
    """Trains nothing: writes the losses of a known law, at a known speed."""

    law = Law(E=1.0, A=5.0, alpha=0.4, B=20.0, beta=0.3)
    flops = 3e8  # per second

    def __init__(self, off=0.0):
        self.trained, self.off = [], off

    def measure(self, size):
        return tool.Speed(overhead=4.0, per_token=size.flops_per_token / self.flops)

    def fit(self, experiment, directory, *, progress, extend):
        if directory.name == "test":
            assert (directory.parent / "prediction.json").exists(), "the prediction is made before the run"
        size = make_size(experiment, experiment.model.n_head, experiment.model.vocab_size)
        tokens = experiment.train.steps * size.tokens_per_step
        loss = self.law.loss(size.parameters, tokens) * (1 + self.off * (directory.name == "test"))
        dataset = experiment.data.open_dataset(experiment.model)
        directory.mkdir(parents=True)
        recorded = {"data": dataset.fingerprint, "vocab_size": experiment.model.vocab_size, "tokenizer_config": None}
        write_metadata(directory, experiment, dataset.tokenizer, **recorded)
        lines = [
            {"step": experiment.train.steps, "tokens": tokens, "tokens_per_second": 1e3},
            {"step": experiment.train.steps, "val_loss": loss},
        ]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.trained.append(directory)


def scale(experiment, directory, machine, **options):
    return tool.run_scale(
        experiment, directory, fit_one=machine.fit, measure=machine.measure, **{"minutes": 5} | options
    )


@pytest.mark.slow
def test_a_ladder_predicts_its_test_run_and_is_not_trained_twice(experiment, tmp_path):
    machine, told = Machine(), []
    found = scale(experiment, tmp_path / "ladder", machine, say=told.append)
    assert machine.trained[-1].name == "test" and len(machine.trained) == len(found["points"]) + 1
    top, run = found["points"][-1], found["prediction"]["run"]
    assert run["flops"] == pytest.approx(tool.TEST_COMPUTE * top["flops"], rel=0.01)
    assert run["parameters"] >= top["parameters"] and run["tokens"] >= top["tokens"]
    assert max(x["epochs"] for x in found["points"]) <= 1 and run["epochs"] <= tool.MOST_EPOCHS
    assert found["law"]["alpha"] == pytest.approx(Machine.law.alpha, rel=1e-3)
    assert abs(found["result"]["relative_error"]) < 1e-4 and found["result"]["within"]
    assert "test run" in told[0] and f"| {top['width']} |" in tool.format_scale(found)
    assert {path.name for path in (tmp_path / "ladder").iterdir()} >= {"scale.json", "scale.png", "test"}
    again = Machine()
    assert scale(experiment, tmp_path / "ladder", again) == found and again.trained == []
    with pytest.raises(UserError, match="has another grid: minutes 5 -> 6"):
        scale(experiment, tmp_path / "ladder", again, minutes=6)


@pytest.mark.slow
def test_a_prediction_is_made_once(experiment, tmp_path):
    """An interrupted test run resumes with it; a ladder whose losses have changed since is refused."""
    machine = Machine(off=0.05)
    usual = machine.fit

    def interrupted(experiment, directory, *, progress, extend):
        if directory.name == "test":
            raise Preempted("Ctrl-C")
        usual(experiment, directory, progress=progress, extend=extend)

    machine.fit = interrupted
    with pytest.raises(Preempted):
        scale(experiment, tmp_path / "ladder", machine)
    prediction = (tmp_path / "ladder/prediction.json").read_bytes()
    machine.fit, machine.trained = usual, []
    found = scale(experiment, tmp_path / "ladder", machine)
    assert [path.name for path in machine.trained] == ["test"]
    assert (tmp_path / "ladder/prediction.json").read_bytes() == prediction
    assert found["result"]["relative_error"] == pytest.approx(0.05, abs=1e-3)
    assert not found["result"]["within"] and not found["result"]["inside_interval"]
    metrics = next((tmp_path / "ladder").glob("width-8/*/*/metrics.jsonl"))
    metrics.write_text(metrics.read_text().replace('"val_loss": ', '"val_loss": 1'))
    with pytest.raises(UserError, match="prediction.json was made of other losses"):
        scale(experiment, tmp_path / "ladder", machine)


def test_more_minutes_give_a_larger_ladder_that_fits_and_then_more_seeds(experiment):
    dataset = experiment.data.open_dataset(experiment.model)
    size_of, tokens = lambda n_head: make_size(experiment, n_head, dataset.tokenizer.vocab_size), len(dataset.train)
    plans = {
        minutes: make_plan(1, size_of, Machine().measure, minutes=minutes, data_tokens=tokens) for minutes in (4, 7, 20)
    }
    for minutes, plan in plans.items():
        assert sum(rung.seconds for rung in plan.rungs) + plan.test_seconds <= 60 * minutes
        assert (
            plan.rungs[0].steps >= tool.LEAST_STEPS and plan.rungs[-1].parameters * tool.RATIO <= plan.rungs[-1].tokens
        )
        assert len(plan.rungs) == tool.HORIZONS * len({(rung.width, rung.seed) for rung in plan.rungs})
    assert plans[4].test_flops < plans[7].test_flops < plans[20].test_flops
    assert [plan.rungs[-1].seed for plan in plans.values()] == [0, 0, 2]


def test_sizes_have_heads_of_one_size_and_whole_dimensions(experiment):
    model = dataclasses.replace(experiment.model, n_head=8, n_embd=32, n_kv_head=2, mlp_dim=48)
    grouped = dataclasses.replace(experiment, model=model)
    assert tool.smallest_n_head(grouped) == 4
    wider = make_size(grouped, 12, 11).experiment.model
    assert (wider.n_embd, wider.n_kv_head, wider.mlp_dim, wider.n_layer) == (48, 3, 72, 2)
    assert wider.mup_base_width == 32 and wider.width_ratio == 32 / 48, "one learning rate for all widths"
