"""The fault harness and the soak in their short forms. The long ones are commands of their own."""

import pytest

from tests.faults.kills import OPTIONS, harass
from tests.faults.soak import soak

SLACK = 3  # files or threads by which two halves with 4 saves each may differ; one kept per save made it 5


@pytest.mark.slow
def test_killed_anywhere_and_inside_a_save_nothing_is_lost(tmp_path, text_file):
    options = [*OPTIONS.split(), "--data.path", str(text_file), "--train.steps", "60"]
    report = harass(tmp_path, options, kills=4, every=3.0, inside=0.75, seed=2)
    assert report.good and report.kills == 4 and report.inside, report


@pytest.mark.slow
def test_a_long_run_opens_nothing_and_compiles_nothing(tmp_path):
    found = soak(tmp_path / "run", 1200)  # enough between two saves to see the files of one closed
    assert found.compiled == 0
    assert found.files[1] <= found.files[0] + SLACK and found.threads[1] <= found.threads[0] + SLACK, found
