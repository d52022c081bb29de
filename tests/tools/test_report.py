"""A run's report: every number again by hand, and the page in a browser."""

import json
import re
import shutil

import numpy as np
import pytest
from flax import linen as nn

from jaxgpt import Generated
from jaxgpt.cli.main import main
from jaxgpt.config.validate import short_repr
from jaxgpt.errors import UserError
from jaxgpt.interventions import Ablations, Forward
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.run import Run, load
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.tools.report import make_report, report
from tests.browser import unreadable
from tests.conftest import REPOSITORY
from tests.helpers import import_pages


@pytest.fixture(scope="module")
def found(shown_run):
    return make_report(shown_run, tokens=30)


def test_the_summary_is_what_was_logged(shown_run, found):
    summary, _ = found
    lines = read_metrics(shown_run.directory / "metrics.jsonl")
    val = [(line["val_loss"], line["step"]) for line in lines if "val_loss" in line]
    assert (summary["validation_loss"]["best"], summary["validation_loss"]["at"]) == min(val)
    assert summary["validation_loss"]["last"] == val[-1][0] and summary["steps"] == {"planned": 12, "logged": 12}
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    assert summary["throughput"]["tokens_per_second"] == np.median(rates)
    assert summary["configuration"]["train"]["steps"] == 12 and json.loads(json.dumps(summary)) is not None


def test_each_checkpoint_has_its_sample(shown_run, found):
    of_last = load(shown_run.directory, which="last").sample("In a ", max_new_tokens=30, seed=0)
    assert [found[0]["samples"][-1][key] for key in ("step", "text")] == [12, of_last]


def test_the_page(found, open_page, tmp_path):
    summary, html = found
    assert "<script>pwned" not in html
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    page = open_page(path, "dark", 390)
    assert page.locator("#losses svg circle").count() == 3 and page.locator("blockquote").count() >= 2
    assert page.evaluate("typeof pwned") == "undefined"
    rows = page.eval_on_selector_all(
        "#losses details tbody tr", "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert float(rows[-1][1]) == pytest.approx(summary["validation_loss"]["last"], rel=1e-4)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390 and page.complaints == []
    assert unreadable(page) == []
    page.close()


def test_what_is_not_a_page_is_not_replaced(shown_run, tmp_path):
    page = tmp_path / "report.html"
    found = report(shown_run.directory, tokens=8, out=str(page))
    assert json.loads(json.dumps(found.to_json()))["steps"]["logged"] == 12 and f"{page}: " in str(found)
    page.write_text("a thesis")
    with pytest.raises(UserError, match=r"report\.html exists"):
        report(shown_run.directory, out=str(page))


def test_the_newest_run_is_reported_where_none_is_named(shown_run, tmp_path, monkeypatch, capsys):
    shutil.copytree(shown_run.directory, tmp_path / "runs/shown")
    monkeypatch.chdir(tmp_path)
    main(["report", "--tokens", "4"])
    assert "runs/shown/report.html: " in capsys.readouterr().out


def test_what_a_notebook_shows_is_a_line(shown_run):
    """All documented classes that hold arrays, and what the functions of `jaxgpt` return."""
    pages = "".join(page.read_text() for page in (REPOSITORY / "docs/api").glob("*.md"))
    for module, name in re.findall(r"autoclass:: (\S+)\.(\w+)", pages):
        cls = getattr(*import_pages("post", module), name)
        hints = [str(hint) for hint in vars(cls).get("__annotations__", {}).values() if "Callable" not in str(hint)]
        if re.search(r"rray\b|Params", " ".join(hints)) and not issubclass(cls, nn.Module | Run):
            assert cls.__repr__ is short_repr, name

    many = np.zeros((50, 60))
    shown = [shown_run, shown_run.metadata, Generated(tokens=[[0] * 1000] * 100), Ablations(1.0, many, many)]
    for value in [*shown, Forward(many, {f"h_{layer}/heads": many for layer in range(99)})]:
        assert len(repr(value)) < 1500 and "\n" not in repr(value), repr(value)
    size = count_parameters(shown_run.model.shapes())
    said = f"Run(shown, {size:,} parameters, step {shown_run.step}, validation loss {shown_run.val_loss:.4f} nats per token, in "
    assert repr(shown_run).startswith(said)
