"""What a run writes word for word from its text, and the index that finds it."""

import dataclasses
import shutil

import numpy as np
import pytest

from tests.conftest import TEXT
from tests.helpers import edit_record, replace_fields, script

pytest.importorskip("pydivsufsort")


@pytest.fixture(scope="module")
def memorisation():
    return script("memorisation")


@pytest.mark.slow
def test_memorisation_is_of_what_it_writes(memorisation, tiny_run, tmp_path, capsys):
    run = dataclasses.replace(
        tiny_run, experiment=replace_fields(tiny_run.experiment, train={"sample_prompt": "In a "})
    )
    found = memorisation.measure(run, samples=2, tokens=30)
    train = TEXT[: int(len(TEXT) * 0.9)]
    texts = [run.sample("In a ", max_new_tokens=30, seed=seed) for seed in range(2)]
    assert found["generated"]["characters"] == sum(map(len, texts)) == 60
    grams = [text[i : i + 5] for text in texts for i in range(26)]
    assert found["generated"]["novel"]["5"] == pytest.approx(np.mean([gram not in train for gram in grams]))
    longest = max(int(memorisation.SuffixArray(train).match_lengths(text).max()) for text in texts)
    assert len(found["generated"]["overlaps"][0]["text"]) == longest
    # The same line again and again: what is held out is in the training text, all of it.
    assert found["held out"]["novel"] == {"5": 0.0, "10": 0.0, "20": 0.0, "50": None}
    assert len(found["held out"]["overlaps"][0]["text"]) == 30
    memorisation.main([str(run.directory), "--samples", "1", "--tokens", "8"])
    assert "| n | generated | held out |" in capsys.readouterr().out
    copy = shutil.copytree(run.directory, tmp_path / "run")
    (tmp_path / "text.txt").write_text("another")
    edit_record(copy, lambda record: record["experiment"]["data"].update(path=str(tmp_path / "text.txt")))
    with pytest.raises(SystemExit, match="2"):
        memorisation.main([str(copy)])


# What is word for word from a corpus: against every stretch tried by hand.


@pytest.mark.parametrize("alphabet", ["ab", "aé漢🐎"])
def test_match_lengths_are_those_of_every_stretch(memorisation, alphabet):
    rng = np.random.default_rng(len(alphabet))
    corpus, text = ("".join(rng.choice(list(alphabet), n)) for n in (400, 120))
    text = text + corpus[50:90] + text[:10]
    expected = [max(n for n in range(len(text) - i + 1) if text[i : i + n] in corpus) for i in range(len(text))]
    assert memorisation.SuffixArray(corpus).match_lengths(text).tolist() == expected
