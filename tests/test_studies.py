"""Programs in experiments/ that measure: each runs, shrunken, and what it keeps it does not compute again."""

import dataclasses
import json
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.config.serialize import from_dict
from jaxgpt.experiment import Experiment
from jaxgpt.files import sha256
from jaxgpt.tools.grid import Curve
from tests.conftest import REPOSITORY, TEXT
from tests.helpers import check_command, import_pages, replace_fields, script, tiny_experiment
from tests.test_experiments import list_experiments


def test_there_is_a_band_for_every_experiment_that_runs_on_a_cpu():
    """Its configuration is still the experiment's, and at least five seeds made it."""
    bands = script("bands")
    ours = {e.name: e for e in map(load_experiment, list_experiments())}
    elsewhere = {"finetune-quijote", "gpt2-124m", "shakespeare-char-wide"}  # weights, or a GPU
    kept = {path.stem: json.loads(path.read_text()) for path in bands.BANDS.glob("*.json")}
    assert kept.keys() == ours.keys() - elsewhere
    for name, held in kept.items():
        assert bands.differing_fields(ours[name], from_dict(Experiment, held["experiment"], "")) == [], name
        band = bands.Band(**held["band"])
        assert band.seeds >= 5 and band.steps[-1] == ours[name].train.steps, name


@pytest.mark.slow
def test_bands_are_made_of_runs(text_file, tmp_path, monkeypatch, capsys):
    bands, tiny = script("bands"), tiny_experiment(text_file, steps=4, eval_every=2)
    monkeypatch.setattr(bands, "load_experiment", lambda named: tiny)
    monkeypatch.setattr(bands, "BANDS", tmp_path / "bands")
    arguments = ["it", "--seeds", "2", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "bands")]
    (path,) = bands.main(arguments)
    held, places = json.loads(path.read_text()), [tmp_path / f"runs/tiny/seed-{seed}" for seed in range(2)]
    losses = [[loss for _, loss in bands.read_curve(place)] for place in places]
    assert held["band"]["mean"] == pytest.approx(np.mean(losses, axis=0).tolist())
    monkeypatch.setattr(bands, "fit", lambda *args, **how: pytest.fail("they are there"))
    bands.main(arguments)
    bands.main(["--compare", str(places[0])])
    assert "inside the reference interval of 2 seeds" in capsys.readouterr().out


def test_baselines_of_noise(tmp_path):
    """There is nothing to be learnt: three bits, whatever one does."""
    path = tmp_path / "noise.txt"
    path.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh"), 20_000)))
    found = script("baselines").main([str(path)])["noise"]
    assert found["uniform over the alphabet"] == 3.0
    assert found["unigram"] == pytest.approx(3.0, abs=0.01) and 3.0 < found["5-gram with back-off"] < 3.6
    assert all(3.0 < bits < 4.2 for name, bits in found.items() if "gzip" in name or "xz" in name)


@pytest.mark.slow
def test_induction_heads(monkeypatch):
    (study,) = import_pages("", "induction_heads")
    monkeypatch.setattr(study, "MODELS", {"small": (2, False)})
    found = study.main(["--seeds", "2", "--steps", "2"])
    assert found["small"].shape == (2, 4, 2) and (found["small"] > 3).all()


def test_the_laptops_study_runs_nothing_twice_and_what_diverged_has_no_loss(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "experiments/laptop")
    run = script("laptop/run")
    curves = [Curve(tokens=[1], losses=[2.5]), Curve(failure="diverged")]
    train_grid = mock.Mock(side_effect=[curves, []])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "train_grid", train_grid)
    experiment = run.experiment_of(run.optimizers()["adamw"], 176, 100, "text.txt")
    for left in (2, 0):
        run.run_all([("ideas", ["baseline"], experiment, seed) for seed in (0, 1)], None)
        assert len(train_grid.call_args.args[0]) == left
    assert [loss for loss, _ in run.read("ideas")["baseline"].values()] == [2.5, None]


@pytest.mark.slow
def test_learning_rates_over_widths(monkeypatch, text_file, tmp_path):
    study = script("learning_rate_transfer")
    monkeypatch.setattr(study, "RATES", (1e-3, 2e-3))
    argv = ["--data.path", str(text_file), "--widths", "64", "--steps", "2", "--out", str(tmp_path), "--seeds"]
    study.main([*argv, "1"])
    first = (tmp_path / "runs.jsonl").read_text()
    found = study.main([*argv, "2"])
    both = (tmp_path / "runs.jsonl").read_text()
    assert both.startswith(first) and both.count("\n") == 2 * first.count("\n") == 8
    assert found["muP", 64].shape == (2, 2) and (found["muP", 64] != found["standard", 64]).all()


@pytest.mark.slow
def test_memorisation_is_of_what_it_writes(tiny_run):
    pytest.importorskip("pydivsufsort")
    run = dataclasses.replace(
        tiny_run, experiment=replace_fields(tiny_run.experiment, train={"sample_prompt": "In a "})
    )
    found = script("memorisation").measure(run, samples=2, tokens=30)
    train = TEXT[: int(len(TEXT) * 0.9)]
    texts = [run.sample("In a ", max_new_tokens=30, seed=seed) for seed in range(2)]
    grams = [text[i : i + 5] for text in texts for i in range(26)]
    assert found["generated"]["novel"]["5"] == pytest.approx(np.mean([gram not in train for gram in grams]))
    # The same line again and again: what is held out is in the training text, all of it.
    assert found["held out"]["novel"] == {"5": 0.0, "10": 0.0, "20": 0.0, "50": None}


def test_the_records_keep_their_rules_and_no_forecast_is_edited():
    assert not any(script("records").check_page(str(REPOSITORY / "experiments/RECORDS.md")).values())
    signed = import_pages("laptop", "forecasts")[0].signed()
    assert all(text in (REPOSITORY / "docs/findings/forecasts.md").read_text() for text in signed)


EXPERIMENTS = """
import dataclasses
from jaxgpt import Experiment, GPTConfig, OptimConfig, TrainConfig

model = GPTConfig(block_size=8, n_layer=1, n_head=2, n_embd=8)
experiment = Experiment(name="a", model=model, train=TrainConfig(batch_size=4))
faster = dataclasses.replace(experiment, optim=OptimConfig(learning_rate=0.02))
"""


def test_nights_without_a_better_edit_accept_none_in_95_of_100():
    """Wherever an edit is stopped. What is accepted costs no level."""
    night = script("autoresearch/night")
    evidence = night.weigh(np.random.default_rng(0).normal(-night.LEAST, 0.01, (4000, 22, night.PAIRS)))
    assert evidence[..., :2].mean((0, 1)) == pytest.approx(1.0, abs=0.02)  # a martingale's
    assert 0.01 < (evidence >= 22 / night.ERROR).any((1, 2)).mean() <= night.ERROR
    history = [{"level": 0.01, "verdict": "accepted"}, {"level": 0.02, "verdict": "given up"}]
    assert night.level_of(history, 5) == pytest.approx(0.03 / 3)


def test_a_night_that_is_killed_goes_on_and_keeps_what_can_be_repeated(tmp_path, monkeypatch):
    night = script("autoresearch/night")
    edits = ["train=TrainConfig(seed=1)", *(f"optim=OptimConfig(beta2=0.{digit})" for digit in (7, 8, 9))]
    (tmp_path / "tiny.py").write_text(EXPERIMENTS)
    same, good, bad = (Curve(losses=[loss]) for loss in (2.0, 1.0, 3.0))
    pairs = [(same, good)] * 4 + [(same, bad)] * 2 + [(same, good)] * 4
    train_grid = mock.Mock(side_effect=[(same, good), KeyboardInterrupt, *pairs])
    monkeypatch.setattr(night, "train_grid", train_grid)
    monkeypatch.setattr(night, "audit", lambda run: SimpleNamespace(findings=["no"] if "/004/" in str(run) else []))

    def propose(place, number):
        edit = f"\nexperiment = dataclasses.replace(experiment, {edits.pop(0)})"
        (place / "candidate.py").write_text((place / "base.py").read_text() + edit)

    def go_on():
        return night.Night(tmp_path, tmp_path / "tiny.py", {}, proposals=4).go_on(propose, print)

    with pytest.raises(KeyboardInterrupt):
        go_on()
    assert [line["verdict"] for line in go_on()] == ["refused", "accepted", "given up", "given up"]
    grids = [call.args[0] for call in train_grid.call_args_list]
    assert len({place for grid in grids for _, _, place in grid}) == 2 * len(pairs)
    assert grids[-1][0][1].optim.beta2 == 0.7  # the base, since it was accepted


@pytest.mark.slow
def test_a_record_is_run_resumed_and_audited(tmp_path, text_file, monkeypatch):
    tool, audited = script("records"), []
    (tmp_path / "tiny.py").write_text(EXPERIMENTS)
    monkeypatch.setattr(tool, "BASE", str(tmp_path / "tiny.py"))
    monkeypatch.setattr(tool, "TEXT", sha256(text_file))
    audit = tool.audit
    monkeypatch.setattr(tool, "audit", lambda run, *, steps: audited.append(run.name) or audit(run, steps=steps))
    argv = [f"{tmp_path}/tiny.py:faster", "--data.path", str(text_file), "--steps", "2", "--seeds", "3"]
    argv += ["--out", str(tmp_path / "made/one.json"), "--runs", str(tmp_path / "runs")]
    argv += ["--against", f"{tmp_path}/tiny.py"]
    found = []
    for _ in range(2):
        tool.main(argv)
        found.append(json.loads((tmp_path / "made/one.json").read_text()))
        shutil.rmtree(tmp_path / "runs/one/2")
    losses = [[run["val_loss"] for run in record["runs"]] for record in found]
    assert losses[0] == losses[1] and audited == ["0", "1", "2", "2"]
    assert [run["audit"] for run in found[0]["runs"]] == [{"retaken": 2, "accepted": True}] * 3


@pytest.mark.slow
def test_every_part_of_the_benchmark_of_gpus(tmp_path):
    command = f"{REPOSITORY}/experiments/benchmarks/gpu.py --tiny --budget 780 --json found.json"
    done = check_command(*command.split(), cwd=tmp_path, deadline=840)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [part["ended"] for part in found.values()] == [None] * 7, done.stderr
    rows = [row for part in found.values() for row in part["rows"]]
    assert len(rows) > 40 and [row["what"] for row in rows if row["ok"] is False] == []
