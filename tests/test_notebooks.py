"""The notebooks for Colab and Kaggle: their TPU programs are compiled, and all else runs here with a small model."""

import json
import re
import shlex
import string

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import check_command, needs

nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = REPOSITORY / "experiments" / "notebooks"
NAMES = ["colab", "kaggle"]
DEADLINE = 180  # seconds of one notebook

every_notebook = pytest.mark.parametrize("name", NAMES)

# Appended to the experiment: two steps of a small model on a text that is there.
SMALL = """
from dataclasses import replace

experiment = replace(
    experiment,
    model=replace(experiment.model, block_size=16, n_layer=1, n_head=2, n_embd=16),
    data=DataConfig(path="text.txt"),
    optim=replace(experiment.optim, warmup_steps=1),
    train=replace(experiment.train, steps=2, batch_size=2, eval_every=2, eval_tokens=64, sample_tokens=5),
)
"""


def read(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def code_cells(notebook, start):
    return [c for c in notebook.cells if c.cell_type == "code" and c.source.startswith(start)]


@every_notebook
def test_a_clean_notebook(name):
    assert sorted(p.name for p in NOTEBOOKS.iterdir()) == [f"{name}.ipynb" for name in NAMES]
    notebook = read(name)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert (NOTEBOOKS / f"{name}.ipynb").read_bytes().endswith(b"}\n")
    install = notebook.cells[1].source
    assert install == read(NAMES[0]).cells[1].source and "%pip install" in install


@pytest.mark.slow
@every_notebook
@needs("libtpu", "tpu")
def test_its_training_step_compiles_for_the_tpu(name, tmp_path):
    notebook = read(name)
    (plan,) = code_cells(notebook, "!jaxgpt plan ")
    (file,) = code_cells(notebook, "%%writefile ")
    first, _, experiment = file.source.partition("\n")
    (tmp_path / first.split()[1]).write_text(experiment)
    # The vocabulary of the corpus, which plan would download; both have fewer than 128 characters.
    argv = [*shlex.split(plan.source)[1:], "--model.vocab-size", "128", "--json"]
    done = check_command("-m", "jaxgpt", *argv, cwd=tmp_path, ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    found = json.loads(done.stdout)
    assert found["fits"] and found["device"] == "TPU v5 lite", found


@pytest.mark.slow
@every_notebook
def test_it_runs(name, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    (tmp_path / "text.txt").write_text((string.printable + "En un lugar de la Mancha. ROMEO: ") * 20)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    notebook = read(name)
    (file,) = code_cells(notebook, "%%writefile ")
    file.source += SMALL
    (plan,) = code_cells(notebook, "!jaxgpt plan ")
    notebook.cells.remove(plan)  # which has its own test
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=DEADLINE, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert re.search(r"validation loss \d+\.\d{4}\n", "".join(output.get("text", "") for output in outputs))
