"""The study of induction heads: its text, its models without MLPs, and a run with few steps."""

import numpy as np
import pytest

from tests.helpers import import_pages


@pytest.fixture(scope="module")
def study():
    return import_pages("", "induction_heads")[0]


def test_each_row_repeats_after_its_own_period(study):
    text_BT = study.make_text(np.random.default_rng(3), 40)
    periods = [next(p for p in range(1, 49) if (row[p:] == row[:-p]).all()) for row in text_BT]
    assert text_BT.shape == (40, 49) and min(periods) >= 8 and max(periods) <= 24 and len(set(periods)) > 5
    assert (study.TEST_BT[:, 24:] == study.TEST_BT[:, :24]).all()


@pytest.mark.slow
def test_the_study_shrunken(study, monkeypatch, capsys):
    monkeypatch.setattr(study, "MODELS", {"small": (2, False)})
    found = study.main(["--seeds", "2", "--steps", "2"])
    assert found["small"].shape == (2, 4, 2) and (found["small"] > 3).all()
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 4 and len({line.count("|") for line in table}) == 1
