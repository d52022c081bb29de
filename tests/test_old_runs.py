"""Runs of an earlier version open: they sample, evaluate, export and go on as they did then.

golden/run-before has two of them, packed, with ten steps to go, their text, and what came of them. They are of the code
of commit f97c505, by tests/golden/make_run.py of commit 1b6c37bf. What later versions write is no old run: when formats
change, make another folder, and keep this one.
"""

import json
import shutil
import tarfile
from importlib.util import find_spec

import pytest

import jaxgpt
from tests.conftest import REPOSITORY
from tests.golden.record import digest, evaluate_text, export_run, tensors_of

FOLDER = REPOSITORY / "tests/golden/run-before"
ROUNDING = 1e-4  # of losses, relative: other processors differ in the last bits, and later steps by more


@pytest.fixture(params=[pytest.param("adamw", marks=pytest.mark.slow), "muon"])
def old_run(request, tmp_path, monkeypatch):
    """(the directory of a run in a copy, what it said when it was made). Its text is where experiment.json says: here."""
    shutil.copy(FOLDER / "text.txt", tmp_path)
    with tarfile.open(FOLDER / f"{request.param}.tar.xz") as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        packed.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / request.param, json.loads((FOLDER / "expected.json").read_text())[request.param]


def test_samples_evaluates_exports_and_goes_on(old_run, tmp_path):
    run, expected = old_run
    later, tensors = expected.pop("losses"), expected.pop("tensors")
    with pytest.warns(UserWarning, match="optim.skip_spikes=5.0: no spike is skipped from now on, but by"):
        loaded = jaxgpt.load(run)
        found = {"step": loaded.step, "val_loss": loaded.val_loss, "loss": evaluate_text(loaded)["loss"]}
        # By a margin of 0.001 nats each character is likelier than the next: rounding is far below.
        assert loaded.sample("the old ", greedy=True, max_new_tokens=24) == expected.pop("text")
        assert found == pytest.approx(expected, rel=ROUNDING)
        if find_spec("safetensors") is not None:  # numbers that are only read and written are the same everywhere
            export_run(run, tmp_path / "out")
            assert digest(tensors_of(tmp_path / "out")) == tensors

    with pytest.warns(UserWarning, match="skip_spikes"):
        jaxgpt.fit(loaded.experiment, run, progress=False)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    resumed = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(resumed) == list(range(1, 41))
    assert {str(step): resumed[step] for step in resumed if str(step) in later} == pytest.approx(later, rel=ROUNDING)
