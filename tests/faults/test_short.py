"""The fault harness and the soak in their short forms; the long ones are commands of their own."""

from tests.faults.kills import OPTIONS, harass
from tests.faults.soak import soak


def test_killed_anywhere_and_inside_a_save_nothing_is_lost(tmp_path, text_file):
    options = [*OPTIONS.split(), "--data.path", str(text_file), "--train.steps", "60"]
    report = harass(tmp_path, options, kills=4, every=3.0, inside=0.5, seed=2)
    assert report.good and report.kills == 4 and report.inside, report


def test_a_long_run_opens_nothing_and_compiles_nothing(tmp_path):
    found = soak(tmp_path / "run", 1500)
    assert found.compiled == 0
    assert found.files[1] < 100 and found.threads[1] < 100
    assert (
        found.slope < 4096
    )  # KB per 1,000 steps: noise of a short run; a leaked batch each step would be 8 times that
