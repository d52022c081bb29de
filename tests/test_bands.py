"""Reference intervals of experiments: how often they hold, where a run lies, and that those kept are the experiments'."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.config.serialize import from_dict
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.runs.directory import read_metadata
from tests.helpers import script, tiny_experiment
from tests.test_experiments import list_experiments
from tests.tools.written_run import write_run

STEPS = list(range(100, 1100, 100))


@pytest.fixture(scope="module")
def bands():
    return script("bands")


def curve(losses):
    return list(zip(STEPS, losses, strict=True))


def falling(to=1.5):
    return [to + 2 * math.exp(-step / 200) for step in STEPS]


@pytest.mark.parametrize(
    ("losses", "place", "since"),
    [
        (falling(), "inside", None),
        (falling(1.6), "above", 100),
        (falling()[:6] + [x + 0.1 for x in falling()[6:]], "above", 700),
        ([x + 0.2 for x in falling()[:6]] + falling()[6:], "inside", None),  # out and in again: where it ends
    ],
)
def test_where_a_curve_lies(bands, losses, place, since):
    low, high = ([x + by for x in falling()] for by in (-0.05, 0.05))
    band = bands.Band(steps=STEPS, mean=falling(), low=low, high=high, seeds=5)
    assert bands.locate(curve(losses), band) == (place, since)
    assert bands.locate([(5000, 1.0)], band) == (None, None)


def test_a_band_is_a_prediction_interval(bands):
    """Of so many further runs are inside as it says."""
    rng, inside = np.random.default_rng(0), []
    for _ in range(1000):
        runs = rng.normal(2.0, 0.1, 6)
        band = bands.fit_band([[(100, float(loss))] for loss in runs[:5]])
        inside.append(band.low[0] <= runs[5] <= band.high[0])
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
    logs = np.log(runs[:5])
    margin = stats.t.ppf(0.975, 4) * np.std(logs, ddof=1) * math.sqrt(1.2)
    assert (band.low[0], band.high[0]) == pytest.approx(tuple(np.exp(np.mean(logs) + np.array([-margin, margin]))))
    assert band.mean[0] == pytest.approx(np.mean(runs[:5])) and band.seeds == 5


def test_a_band_is_for_one_experiment_on_one_text(bands, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run")
    run = read_metadata(tmp_path / "run")
    monkeypatch.setattr(bands, "BANDS", tmp_path)
    losses = [[(step, abs(step - 4) + 1.25 + noise) for step in range(2, 11, 2)] for noise in (-0.01, 0.0, 0.01)]
    kept = {"experiment": dataclasses.asdict(run.experiment), "data": run.data}
    (tmp_path / "one.json").write_text(json.dumps(kept | {"band": dataclasses.asdict(bands.fit_band(losses))}))
    bands.main(["--compare", str(tmp_path / "run")])
    assert capsys.readouterr().out == f"{tmp_path / 'run'}: inside the band of 3 seeds\n"

    def find(part, **fields):
        changed = {part: dataclasses.replace(getattr(run.experiment, part), **fields)}
        return bands.find_band(dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, **changed)))

    # With another seed, other checkpoints, or the same text in another place, the same curve is expected.
    assert find("train", seed=7, checkpoint_every=99) == find("data", path="elsewhere.txt") == bands.find_band(run)
    with pytest.raises(UserError, match=r"another configuration: optim\.learning_rate"):
        find("optim", learning_rate=0.5)
    with pytest.raises(UserError, match="another text"):
        bands.find_band(dataclasses.replace(run, data={"tokenizer_sha256": "other"}))


def test_there_is_a_band_for_every_experiment_that_runs_on_a_cpu(bands):
    """Its configuration is still the experiment's, and at least five seeds made it."""
    ours = {e.name: e for e in map(load_experiment, list_experiments())}
    elsewhere = {"finetune-quijote", "gpt2-124m", "shakespeare-char-wide"}  # weights, or a GPU
    kept = {path.stem: json.loads(path.read_text()) for path in bands.BANDS.glob("*.json")}
    assert kept.keys() == ours.keys() - elsewhere
    for name, held in kept.items():
        assert bands.differing_fields(ours[name], from_dict(Experiment, held["experiment"], "")) == [], name
        band = bands.Band(**held["band"])
        assert band.seeds >= 5 and band.steps[-1] == ours[name].train.steps, name
        assert band.steps == sorted(set(band.steps)), name
        assert {len(band.steps)} == {len(x) for x in (band.mean, band.low, band.high)}, name


@pytest.mark.slow
def test_bands_are_made_of_runs(bands, text_file, tmp_path, monkeypatch, capsys):
    tiny = tiny_experiment(text_file, steps=4, eval_every=2)
    monkeypatch.setattr(bands, "load_experiment", lambda named: tiny)
    monkeypatch.setattr(bands, "BANDS", tmp_path / "bands")
    arguments = ["it", "--seeds", "2", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "bands")]
    (path,) = bands.main(arguments)
    held, places = json.loads(path.read_text()), [tmp_path / f"runs/tiny/seed-{seed}" for seed in range(2)]
    curves = [bands.read_curve(place) for place in places]
    assert held["band"]["mean"] == pytest.approx(np.mean([[loss for _, loss in c] for c in curves], axis=0).tolist())
    assert held["band"]["steps"] == [2, 4] and held["made"]["last"] == [c[-1][1] for c in curves]
    monkeypatch.setattr(bands, "fit", lambda *args, **how: pytest.fail("they are there"))
    bands.main(arguments)
    assert json.loads(path.read_text())["band"] == held["band"]
    bands.main(["--compare", str(places[0])])
    assert "inside the band of 2 seeds" in capsys.readouterr().out
