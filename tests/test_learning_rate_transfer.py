"""The study of learning rates over widths: its fit, its table, and a run of two steps that is continued."""

import json

import numpy as np
import pytest

from tests.helpers import script


@pytest.fixture(scope="module")
def study():
    return script("learning_rate_transfer")


def losses(study, best, seeds=5, noise=0.0):
    """Return losses [R, S] that are a parabola over log2 of the rate, plus noise."""
    powers_R1 = np.log2(study.RATES)[:, None]
    return 2 + 0.1 * (powers_R1 - best) ** 2 + noise * np.random.default_rng(0).normal(size=(len(powers_R1), seeds))


def test_the_best_rate_is_that_of_the_parabola(study):
    assert study.best_rate(losses(study, -9.3)) == pytest.approx(-9.3)
    assert 2.0 ** study.best_rate(losses(study, -30.0)) == study.RATES[0]  # beyond the grid
    spread = study.bootstrap(losses(study, -9.3, noise=0.02))
    assert spread.min() < -9.3 < spread.max() and 0 < spread.std() < 0.5


@pytest.mark.slow
def test_the_study_shrunken(study, monkeypatch, text_file, tmp_path, capsys):
    monkeypatch.setattr(study, "RATES", (1e-3, 2e-3))
    argv = ["--data.path", str(text_file), "--widths", "64", "--steps", "2", "--out", str(tmp_path), "--seeds"]
    study.main([*argv, "1"])
    first = (tmp_path / "runs.jsonl").read_text()
    found = study.main([*argv, "2"])
    assert (tmp_path / "runs.jsonl").read_text().startswith(first)  # kept, and not run again
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2 * len(first.splitlines()) == 8
    assert found["muP", 64].shape == (2, 2) and (found["muP", 64] != found["standard", 64]).all()
    assert (tmp_path / "learning-rate-transfer-adamw.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(first.splitlines()[0])[:3] == ["adamw", "standard", 64]
