"""Reference intervals of experiments: how often they hold, where a run lies, and that those kept are the experiments'."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.config.serialize import from_dict
from jaxgpt.experiment import Experiment
from tests.helpers import script, tiny_experiment
from tests.test_experiments import list_experiments


@pytest.fixture(scope="module")
def bands():
    return script("bands")


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
