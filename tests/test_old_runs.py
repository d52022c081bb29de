"""Runs of an earlier version open: they sample, evaluate, export and go on as they did then. See golden/make_run.py."""

import json
import shutil
import tarfile
from importlib.util import find_spec

import pytest

import jaxgpt
from tests.golden.make_run import FOLDER, losses, outcome

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
    later = expected.pop("losses")
    if find_spec("safetensors") is None:
        del expected["tensors"]
    with pytest.warns(UserWarning, match="optim.skip_spikes=5.0: no spike is skipped from now on, but by"):
        found = outcome(run, tmp_path / "out" if "tensors" in expected else None)
    for name in ("loss", "val_loss"):
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=ROUNDING)
    assert found == expected  # numbers that are only read and written are the same everywhere

    with pytest.warns(UserWarning, match="skip_spikes"):
        jaxgpt.fit(jaxgpt.load(run).experiment, run, progress=False)
    resumed = losses(run)
    assert list(resumed) == list(range(1, 41))
    assert {str(step): resumed[step] for step in resumed if str(step) in later} == pytest.approx(later, rel=ROUNDING)
