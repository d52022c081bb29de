"""A run's report: every number again by hand, the page in a browser, and a band where one is shipped."""

import dataclasses
import json
import math
import re
import sys

import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.run import load
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import read_metadata
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.session import fit
from jaxgpt.tools.report import reference_band
from jaxgpt.tools.report.memorization import SuffixArray
from jaxgpt.tools.report.reference_band import find_band, fit_band, render_band
from jaxgpt.tools.report.report import make_report
from tests.browser import unreadable
from tests.helpers import run_command, script, tiny_experiment

pytest.importorskip("pydivsufsort")
TEXT = "In a village <script>pwned=1</script> of La Mancha there lived not long since a gentleman.\n" * 30


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    (directory / "text.txt").write_text(TEXT)
    e = tiny_experiment(directory / "text.txt", steps=12, eval_every=4, keep_last=3, sample_prompt="In a ")
    return fit(dataclasses.replace(e, name="reported"), directory / "run", progress=False)


@pytest.fixture(scope="module")
def found(run):
    return make_report(run, samples=2, tokens=30)


def test_counts_that_no_report_takes(run):
    for how, said in (({"samples": 0}, "samples=0: needs at least 1"), ({"tokens": 2.5}, "tokens=2.5: needs a whole")):
        with pytest.raises(UserError, match=said):
            make_report(run, **how)


def test_the_summary_is_what_was_logged(run, found):
    summary, _ = found
    lines = read_metrics(run.directory / "metrics.jsonl")
    val = [(line["val_loss"], line["step"]) for line in lines if "val_loss" in line]
    assert (summary["validation_loss"]["best"], summary["validation_loss"]["at"]) == min(val)
    assert summary["validation_loss"]["last"] == val[-1][0] and summary["steps"] == {"planned": 12, "logged": 12}
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    assert summary["throughput"]["tokens_per_second"] == np.median(rates) and summary["throughput"]["least"] == min(
        rates
    )
    assert summary["verdict"] == "learning" and summary["band"] is None
    assert summary["why_no_band"] == "No reference band is shipped for reported."
    assert summary["configuration"]["train"]["steps"] == 12 and json.loads(json.dumps(summary)) is not None


def test_samples_are_those_of_each_checkpoint(run, found):
    steps = Checkpoints(run.directory / "checkpoints").steps()
    assert len(steps) >= 3 and [one["step"] for one in found[0]["samples"]] == steps
    for one in found[0]["samples"]:
        assert one["text"] == load(run.directory, which=one["step"]).sample("In a ", max_new_tokens=30, seed=0)
    with pytest.raises(UserError, match="which=5: .* needs a good checkpoint of that step"):
        load(run.directory, which=5)


def test_memorisation_is_of_what_it_writes(run, found):
    memory = found[0]["memorisation"]
    train = TEXT[: int(len(TEXT) * 0.9)]
    texts = [run.sample("In a ", max_new_tokens=30, seed=seed) for seed in range(2)]
    assert memory["written"]["characters"] == sum(map(len, texts)) == 60
    grams = [text[i : i + 5] for text in texts for i in range(26)]
    assert memory["written"]["novel"]["5"] == pytest.approx(np.mean([gram not in train for gram in grams]))
    longest = max(int(SuffixArray(train).match_lengths(text).max()) for text in texts)
    assert len(memory["written"]["overlaps"][0]["text"]) == longest
    # The same line again and again: what is held out is in the training text, all of it.
    assert memory["held_out"]["novel"] == {"5": 0.0, "10": 0.0, "20": 0.0, "50": None}
    assert len(memory["held_out"]["overlaps"][0]["text"]) == 30


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """(record, curves) -> ships their band."""
    monkeypatch.setattr(reference_band, "BANDS", tmp_path)

    def ship(record, curves):
        text = render_band(record, fit_band(curves), {"date": "today"})
        (tmp_path / f"{record.experiment.name}.json").write_text(text)

    return ship


def test_beside_its_band(run, shipped):
    record = read_metadata(run.directory)
    lines = read_metrics(run.directory / "metrics.jsonl")
    curve = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    for shift, place in ((0.0, "inside"), (-0.5, "above"), (0.5, "below")):
        shipped(record, [[(step, loss + shift + noise) for step, loss in curve] for noise in (-0.01, 0.0, 0.01)])
        summary, page = make_report(run, samples=1, tokens=8)
        assert summary["judged"]["band"] == place and place in summary["verdict"] and summary["band"]["seeds"] == 3
        assert "why-no-band" in page


def test_a_band_is_for_one_experiment_on_one_text(run, shipped):
    record = read_metadata(run.directory)
    shipped(record, [[(1, 2.0)], [(1, 2.1)]])
    e = record.experiment
    assert find_band(record)[0].seeds == 2

    def changed(**parts):
        return dataclasses.replace(record, experiment=dataclasses.replace(e, **parts))

    # Another seed, another place of the same text, other checkpoints: the same curve is expected.
    assert find_band(changed(train=dataclasses.replace(e.train, seed=7, checkpoint_every=99)))[0] is not None
    assert find_band(changed(data=dataclasses.replace(e.data, path="elsewhere.txt")))[0] is not None
    other, why = find_band(changed(optim=dataclasses.replace(e.optim, learning_rate=0.5)))
    assert other is None and why.endswith("has another configuration: optim.learning_rate.")
    other, why = find_band(
        dataclasses.replace(record, data=record.data | {"tokens_sha256": "other", "val_sha256": "x"})
    )
    assert other is None and "another text" in why


def test_over_fitting_is_said(run, tmp_path):
    """Lines of a run whose validation loss turns while training goes on."""
    lines = []
    for step in range(1, 41):
        lines.append({"step": step, "tokens": step, "loss": 3 - step / 20, "tokens_per_second": 9.0, "seconds": 1.0})
        if step % 5 == 0:
            lines.append({"step": step, "val_loss": 2.0 + abs(step - 20) / 20})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("experiment.json", "tokenizer.json", "checkpoints"):
        (tmp_path / name).symlink_to(run.directory / name)
    summary, _ = make_report(dataclasses.replace(run, directory=tmp_path), samples=1, tokens=8)
    assert summary["verdict"] == "over-fitting since step 20"


def test_without_its_text_it_says_why(run, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "empty"))
    gone = dataclasses.replace(run.experiment.data, path=str(tmp_path / "gone.txt"))
    moved = dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, data=gone))
    summary, page = make_report(moved, samples=1, tokens=8)
    assert summary["memorisation"] is None and "gone.txt" in summary["why_no_memorisation"]
    assert "gone.txt" in page and math.isfinite(summary["validation_loss"]["best"])


def test_without_the_package_the_rest_is_there(run, monkeypatch):
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
        assert page.locator("#losses svg circle").count() == 3 and page.locator("blockquote").count() >= 3
        assert "pwned" in page.text_content("#held-out") and page.evaluate("typeof pwned") == "undefined"
        rows = page.eval_on_selector_all(
            "#losses details tbody tr", "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
        )
        assert float(rows[-1][1]) == pytest.approx(summary["validation_loss"]["last"], rel=1e-4)
        assert page.evaluate("document.documentElement.scrollWidth") <= width and page.complaints == []
        assert unreadable(page) == []
        page.close()


@pytest.mark.parametrize("steps", [(4, 12), (12,)])
def test_the_band_is_drawn(run, shipped, open_page, tmp_path, steps):
    shipped(read_metadata(run.directory), [[(step, loss - step / 40) for step in steps] for loss in (3.0, 3.1)])
    path = tmp_path / "report.html"
    path.write_text(make_report(run, samples=1, tokens=8)[1], encoding="utf-8")
    page = open_page(path)
    box = page.locator("#losses path.band").bounding_box()
    assert box["width"] > 5 and box["height"] > 5 and page.locator("#why-no-band").count() == 0
    text = page.text_content("#losses svg")
    assert "from 2 seeds" in text and page.complaints == []
    # The axes' numbers are round: of the steps, 2 apart.
    labels = page.eval_on_selector_all("#losses svg text", "all => all.map(text => text.textContent)")
    assert labels[-11:-4] == ["0", "2", "4", "6", "8", "10", "12"]
    assert all(len(label) <= 4 for label in labels[:-4]), labels
    page.close()


@pytest.mark.slow
def test_the_command(run, tmp_path):
    options = ["--samples", "1", "--tokens", "8", "--out", str(tmp_path)]
    done = run_command("-m", "jaxgpt", "report", str(run.directory), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reported: learning\n") and re.search(r"report.html: \d", done.stdout)
    kept = json.loads((tmp_path / "summary.json").read_text())
    again = run_command("-m", "jaxgpt", "report", str(run.directory), *options, "--json", cwd=tmp_path)
    assert json.loads(again.stdout) == kept
    (tmp_path / "report.html").unlink()
    refused = run_command("-m", "jaxgpt", "report", str(run.directory), *options, cwd=tmp_path)
    assert refused.returncode == 2 and "summary.json exists" in refused.stderr


@pytest.mark.slow
def test_bands_are_made_of_runs(run, tmp_path, monkeypatch):
    bands = script("bands")
    monkeypatch.setattr(bands, "load_experiment", lambda named: run.experiment)
    (path,) = bands.main(["it", "--seeds", "2", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "bands")])
    held = json.loads(path.read_text())
    curves = [bands.curve(tmp_path / f"runs/reported/seed-{seed}") for seed in range(2)]
    assert held["band"]["mean"] == pytest.approx(np.mean([[loss for _, loss in c] for c in curves], axis=0).tolist())
    assert held["band"]["steps"] == [4, 8, 12] and held["made"]["last"] == [c[-1][1] for c in curves]
    monkeypatch.setattr(bands, "fit", lambda *args, **how: pytest.fail("they are there"))
    again = tmp_path / "again"
    bands.main(["it", "--seeds", "2", "--runs", str(tmp_path / "runs"), "--out", str(again)])
    assert json.loads((again / "reported.json").read_text())["band"] == held["band"]
    monkeypatch.setattr(reference_band, "BANDS", again)
    assert "inside" in make_report(run, samples=1, tokens=8)[0]["verdict"]
