"""A run's report: every number again by hand, what a curve says, what is memorised, and the page in a browser."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.fitting import fit
from jaxgpt.run import load
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.tools.grid import with_values
from jaxgpt.tools.report import LENGTHS, SHOWN, SuffixArray, judge_learning, make_report, measure_novelty, report
from tests.browser import unreadable
from tests.helpers import tiny_experiment

pytest.importorskip("pydivsufsort")
TEXT = "In a village <script>pwned=1</script> of La Mancha there lived not long since a gentleman.\n" * 30


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    (directory / "text.txt").write_text(TEXT)
    e = tiny_experiment(directory / "text.txt", steps=12, eval_every=4, keep_last=2, sample_prompt="In a ")
    return fit(dataclasses.replace(e, name="reported"), directory / "run", progress=False)


@pytest.fixture(scope="module")
def found(run):
    return make_report(run, samples=2, tokens=30)


def test_the_summary_is_what_was_logged(run, found):
    summary, _ = found
    lines = read_metrics(run.directory / "metrics.jsonl")
    val = [(line["val_loss"], line["step"]) for line in lines if "val_loss" in line]
    assert (summary["validation_loss"]["best"], summary["validation_loss"]["at"]) == min(val)
    assert summary["validation_loss"]["last"] == val[-1][0] and summary["steps"] == {"planned": 12, "logged": 12}
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    assert summary["throughput"]["tokens_per_second"] == np.median(rates)
    assert summary["verdict"] == "learning"
    assert summary["configuration"]["train"]["steps"] == 12 and json.loads(json.dumps(summary)) is not None


def test_memorisation_is_of_what_it_writes(run, found):
    memory = found[0]["memorisation"]
    train = TEXT[: int(len(TEXT) * 0.9)]
    texts = [run.sample("In a ", max_new_tokens=30, seed=seed) for seed in range(2)]
    of_last = load(run.directory, which="last").sample("In a ", max_new_tokens=30, seed=0)
    assert [found[0]["samples"][-1][key] for key in ("step", "text")] == [12, of_last]
    assert memory["written"]["characters"] == sum(map(len, texts)) == 60
    grams = [text[i : i + 5] for text in texts for i in range(26)]
    assert memory["written"]["novel"]["5"] == pytest.approx(np.mean([gram not in train for gram in grams]))
    longest = max(int(SuffixArray(train).match_lengths(text).max()) for text in texts)
    assert len(memory["written"]["overlaps"][0]["text"]) == longest
    # The same line again and again: what is held out is in the training text, all of it.
    assert memory["held_out"]["novel"] == {"5": 0.0, "10": 0.0, "20": 0.0, "50": None}
    assert len(memory["held_out"]["overlaps"][0]["text"]) == 30


def test_without_its_text_or_the_package_it_says_why(run, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "empty"))
    gone = with_values(run.experiment, {"data.path": str(tmp_path / "gone.txt")})
    summary, page = make_report(dataclasses.replace(run, experiment=gone), samples=1, tokens=8)
    assert summary["memorisation"] is None and "gone.txt" in summary["why_no_memorisation"] and "gone.txt" in page
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    summary, _ = make_report(run, samples=1, tokens=8)
    assert summary["memorisation"] is None and "pip install 'jaxgpt[report]'" in summary["why_no_memorisation"]
    assert summary["samples"] and summary["verdict"] == "learning"


def test_the_page(found, open_page, tmp_path):
    summary, html = found
    assert "<script>pwned" not in html
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    for scheme, width in (("light", 1280), ("dark", 390)):
        page = open_page(path, scheme, width)
        assert page.text_content("#verdict") == "Verdict: learning."
        assert page.locator("#losses svg circle").count() == 3 and page.locator("blockquote").count() >= 2
        assert "pwned" in page.text_content("#held-out") and page.evaluate("typeof pwned") == "undefined"
        rows = page.eval_on_selector_all(
            "#losses details tbody tr", "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
        )
        assert float(rows[-1][1]) == pytest.approx(summary["validation_loss"]["last"], rel=1e-4)
        assert page.evaluate("document.documentElement.scrollWidth") <= width and page.complaints == []
        assert unreadable(page) == []
        page.close()


def test_what_is_written_is_what_is_returned(run, tmp_path):
    found = report(run.directory, samples=1, tokens=8, out=str(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(found.to_json()))
    assert found.page.read_text() == found.html
    found.page.unlink()
    with pytest.raises(UserError, match=r"summary\.json exists"):
        report(run.directory, out=str(tmp_path))


# What a curve says: on curves that say it clearly, and on those that only just do not.

STEPS = list(range(100, 1100, 100))


def falling(to=1.5):
    return [to + 2 * math.exp(-step / 200) for step in STEPS]


TRAINING = [(step, 1.4 + 2 * math.exp(-step / 200)) for step in range(10, 1010, 10)]


def rising(since, by):
    """The validation loss turns at a step, and has risen by a share of its best at the end."""
    best = falling()[STEPS.index(since)]
    after = np.linspace(best, best * (1 + by), len(STEPS) - STEPS.index(since))
    return falling()[: STEPS.index(since)] + after.tolist()


RISEN = [(step, loss if step < 500 else loss + (step - 500) / 500) for step, loss in TRAINING]
SWINGING = [*falling()[:5], 1.65, 1.6, 1.664, 1.6]


@pytest.mark.parametrize(
    ("losses", "training", "learning", "since"),
    [
        (falling(), TRAINING, "yes", None),
        (rising(500, 0.05), TRAINING, "over-fitting", 500),
        (rising(500, 0.05), RISEN, "diverging", 500),
        (rising(500, 0.009), RISEN, "yes", None),  # within one per cent: noise
        # A rise of 4% is nothing new to a curve that has recovered from as much in its second half.
        ([*SWINGING, 1.66], TRAINING, "yes", None),
        ([*SWINGING, 1.7], TRAINING, "over-fitting", 700),
        ([2.0, 5.0, *rising(300, 0.05)[2:]], TRAINING, "over-fitting", 300),  # a swing long ago
        ([*falling()[:-1], math.inf], TRAINING, "diverging", 900),
        ([2.0], TRAINING, "unknown", None),
    ],
)
def test_what_a_curve_says(losses, training, learning, since):
    assert judge_learning(list(zip(STEPS, losses, strict=False)), training) == (learning, since)


# What is word for word from a corpus: against every stretch tried by hand.


@pytest.mark.parametrize("alphabet", ["ab", "aé漢🐎"])
def test_match_lengths_are_those_of_every_stretch(alphabet):
    rng = np.random.default_rng(len(alphabet))
    corpus, text = ("".join(rng.choice(list(alphabet), n)) for n in (400, 120))
    text = text + corpus[50:90] + text[:10]
    expected = [max(n for n in range(len(text) - i + 1) if text[i : i + n] in corpus) for i in range(len(text))]
    assert SuffixArray(corpus).match_lengths(text).tolist() == expected


def test_novel_n_grams_and_the_longest_overlaps():
    rng = np.random.default_rng(0)
    corpus = "".join(rng.choice(list("abcdé"), 3000))
    texts = [corpus[100:160] + "zzzz" + corpus[1000:1030], "".join(rng.choice(list("abcdé"), 80))]
    found = measure_novelty(SuffixArray(corpus), texts)
    assert found["characters"] == 94 + 80
    for n in LENGTHS:
        grams = [text[i : i + n] for text in texts for i in range(len(text) - n + 1)]
        assert found["novel"][str(n)] == pytest.approx(np.mean([gram not in corpus for gram in grams]))
    first, second, *_ = found["overlaps"]
    assert first["text"] == corpus[100:160] and corpus[first["at"] : first["at"] + 60] == first["text"]
    assert second["text"] == corpus[1000:1030]
    assert len(found["overlaps"]) == SHOWN
    assert measure_novelty(SuffixArray("abcabc"), [""])["novel"]["5"] is None
    assert SuffixArray("").match_lengths("ab").tolist() == [0, 0]
