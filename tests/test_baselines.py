"""The baselines that are not networks, compared with sums by hand."""

import json

import numpy as np
import pytest

from tests.helpers import script


@pytest.fixture(scope="module")
def baselines():
    return script("baselines")


def test_n_grams_are_probabilities(baselines):
    """Of every context, seen or not, those of all characters add up to one: 2 ** -bits of each, as the only one held out."""
    train, alphabet = "abracadabra abracadabra", "abrcd x"
    for order in (1, 2, 3, 5):
        for context in ("abra", "xxxx", "dabr"):
            p = [2 ** -baselines.n_gram(train + context, c, order, len(alphabet)) for c in alphabet]
            assert sum(p) == pytest.approx(1.0) and min(p) > 0


def test_the_table(baselines, tmp_path, capsys):
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("abcdefgh"), 20_000))  # nothing to be learnt: three bits, whatever one does
    path = tmp_path / "noise.txt"
    path.write_text(text)
    found = baselines.main([str(path), "--json", str(tmp_path / "found.json")])["noise"]
    assert found["uniform over the alphabet"] == 3.0
    assert found["unigram"] == pytest.approx(3.0, abs=0.01) and 3.0 < found["5-gram with back-off"] < 3.6
    assert all(3.0 < bits < 4.2 for name, bits in found.items() if "gzip" in name or "xz" in name)
    assert (
        "| noise |" in capsys.readouterr().out and json.loads((tmp_path / "found.json").read_text())["texts"]["noise"]
    )
