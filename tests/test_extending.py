"""docs/extending*: each file of the pages is written as a reader would, trained, resumed, and does what they say."""

import dataclasses
import json
import re
import sys
import types

import pytest

import jaxgpt
from jaxgpt import DataConfig
from jaxgpt.cli.experiment_file import load_file, load_variants
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.tools.replay import replay
from jaxgpt.tools.study import check_comparable
from tests.conftest import REPOSITORY
from tests.helpers import replace_fields

pytestmark = pytest.mark.slow
PAGES = [REPOSITORY / "docs/extending.md", *REPOSITORY.glob("docs/extending/*.md")]
BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```", "".join(page.read_text("utf-8") for page in PAGES))
FILES = {re.match(r"# (\w+\.py)\n", code)[1]: code for code in BLOCKS}
# What a file logs that a plain experiment does not.
LOGS = {"experts.py": "balance", "distill.py": "teacher_kl", "letters.py": "reward"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A folder with the files of the pages, and a text."""
    folder = tmp_path_factory.mktemp("lab")
    for name, code in FILES.items():
        (folder / name).write_text(code)
    (folder / "text.txt").write_text("Nothing is as easy as it looks, said the owl. " * 40)
    return folder


def train(file: str, lab, steps: int, name: str, **objective) -> jaxgpt.Run:
    """Train one layer, on the folder's text unless the file has its own data."""
    experiment, callbacks = load_file(str(lab / file))
    model = dict(block_size=16, n_layer=1, n_head=2, n_embd=16)
    how = dict(steps=steps, batch_size=4, log_every=1, eval_every=2, eval_tokens=64, sample_tokens=0)
    small = replace_fields(experiment, model=model, train=how, objective=objective)
    if type(experiment.data) is DataConfig:
        small = dataclasses.replace(small, data=dataclasses.replace(experiment.data, path=str(lab / "text.txt")))
    return jaxgpt.fit(small, lab / "runs" / name, progress=False, callbacks=callbacks, extend=True)


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"compare.py", "tracked.py"}))
def test_a_file_trains_takes_its_code_along_and_is_resumed(name, lab):
    teacher = {"teacher": str(train("sharp_gelu.py", lab, 2, "teacher").directory)} if name == "distill.py" else {}
    for steps in (2, 3):
        run = train(name, lab, steps, name, **teacher)
    lines = read_metrics(run.directory / "metrics.jsonl")
    assert (run.directory / "code" / name).exists() and replay(run.directory, 3).equal
    assert all(LOGS.get(name, "loss") in line for line in lines if "loss" in line)


def test_alibi_is_sampled_from_its_cache(lab, caplog):
    run = train("alibi.py", lab, 2, "cached")
    assert len(run.sample("Nothing", max_new_tokens=24, temperature=0.0)) == 24  # past the context
    assert "computes its context again" not in caplog.text


def test_the_callback_logs_every_line(lab, monkeypatch):
    logged = []
    wandb = types.ModuleType("wandb")
    wandb.run = types.SimpleNamespace(log=logged.append)
    wandb.init = lambda **settings: wandb.run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = train("tracked.py", lab, 2, "tracked")
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in logged if "saved" not in line] == lines and {"step": 2, "saved": 2} in logged


def test_the_comparison_is_one(lab):
    check_comparable(load_variants(str(lab / "compare.py")))
