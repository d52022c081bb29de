"""The lessons: valid notebooks, the same code in both languages, and each one runs.

They are stored with their outputs, which the site shows. After a change, store them again; numbers depend on the
processor, and times on what else it does:

    JAXGPT_STORE_LESSONS=1 python -m pytest tests/test_lessons.py -m slow -n 0
"""

import ast
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

nbformat = pytest.importorskip("nbformat")

LESSONS = REPOSITORY / "experiments" / "lessons"
NAMES = (
    "1_tokens 2_layer_norm 3_attention 4_mlp 5_block 6_training 7_generation 8_induction 9_policy_gradient "
    "10_encoder_decoder"
).split()
LANGUAGES = ["en", "es"]
DEADLINE = 240  # seconds of one lesson, which shall take less than half of it on an idle machine of two cores
TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/\w+/")  # what `tempfile.mkdtemp()` returns

every_lesson = pytest.mark.parametrize("name", NAMES)
in_every_language = pytest.mark.parametrize("language", LANGUAGES)


def read(language: str, name: str):
    return nbformat.read(LESSONS / language / f"{name}.ipynb", as_version=4)


def code_of(cell) -> str:
    """Python alone: a line of IPython's becomes `pass`."""
    return re.sub(r"^(\s*)%.*$", r"\1pass", cell.source, flags=re.M)


def without_words(cell) -> str:
    """The code as a tree without comments, and with every string empty."""
    tree = ast.parse(code_of(cell))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


@in_every_language
@every_lesson
def test_a_clean_notebook(language, name):
    notebook = read(language, name)
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == kinds[-1] == "markdown", "it begins with what is built, and ends with what a solution shows"
    assert (LESSONS / language / f"{name}.ipynb").read_bytes().endswith(b"}\n")


@in_every_language
@every_lesson
def test_it_is_stored_with_its_outputs(language, name):
    code = [cell for cell in read(language, name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], "run once, from top to bottom"
    assert not any("execution" in cell.metadata for cell in code), "no times of execution"
    for cell in code:
        shown = {key for output in cell.outputs for key in output.get("data", {})}
        assert ("plt.show()" in cell.source) == ("image/png" in shown), cell.id
        assert "print(" not in cell.source or any(o.output_type == "stream" for o in cell.outputs), cell.id
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", (cell.id, output)


@every_lesson
def test_two_languages_one_lesson(name):
    spanish, english = read("es", name).cells, read("en", name).cells
    code = [code_of(cell) for cell in english if cell.cell_type == "code"]
    assert ast.dump(ast.parse(code[0])) == ast.dump(ast.parse(code_of(read("en", NAMES[0]).cells[1]))), (
        "it installs itself"
    )
    nodes = [node for text in code for node in ast.walk(ast.parse(text))]
    assert any(isinstance(node, ast.Assert) for node in nodes), "it compares with the package"
    assert [(c.id, c.cell_type) for c in spanish] == [(c.id, c.cell_type) for c in english]
    for es, en in zip(spanish, english, strict=True):
        if es.cell_type == "code":
            assert without_words(es) == without_words(en), es.id
        else:
            assert es.source != en.source, es.id


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a copy of the tree in which lessons run, so that they write nothing into ours or the user's directories.

    The code of a lesson is the same in both languages: what one has compiled the other finds there.
    """
    place = tmp_path_factory.mktemp("lessons")
    (place / "experiments").mkdir()
    for needed in ("sancho_mini.py", "post", "interpretability", "transformer_2017"):
        (place / "experiments" / needed).symlink_to(REPOSITORY / "experiments" / needed)
    for language in LANGUAGES:
        (place / "experiments" / "lessons" / language).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(place / "jupyter"))
        patch.setenv("IPYTHONDIR", str(place / "ipython"))
        patch.setenv("JAXGPT_CACHE", str(place / "cache"))
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(place / "compiled"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.delenv("XLA_FLAGS", raising=False)  # the tests' own, which make fast compilations of slow programs
        yield place


def kinds_of_outputs(cell) -> set[str]:
    return {output.output_type for output in cell.get("outputs", [])}


def clean(notebook):
    """Remove what differs from one run or machine to another: versions, times, directories, and how text was flushed."""
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        outputs = []
        for output in cell.outputs:
            data = output.get("data", {})
            if "text/html" in data:  # what rich writes, in colours; its words become a stream
                output = nbformat.v4.new_output("stream", text=TEMPORARY.sub("", data["text/plain"]))
            if output.get("name") == "stderr":
                continue
            if output.output_type == "stream" and outputs and outputs[-1].output_type == "stream":
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        cell.outputs = outputs


@pytest.mark.slow
@in_every_language
@every_lesson
def test_it_runs(language, name, place, request):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = read(language, name)
    if "sancho_mini.py" in str(notebook):
        corpora = Path(os.environ["JAXGPT_CACHE"]) / "corpora"
        corpora.mkdir(parents=True, exist_ok=True)
        shutil.copy(request.getfixturevalue("real_text") / "sancho.txt", corpora / "sancho.txt")
    here = place / "experiments" / "lessons" / language
    start = time.monotonic()
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout_func=lambda cell: max(1, int(start + DEADLINE - time.monotonic())),
        resources={"metadata": {"path": str(here)}},
    )
    stored = [kinds_of_outputs(cell) for cell in notebook.cells]
    client.execute()
    print(f"{language}/{name}: {time.monotonic() - start:.1f} s")
    clean(notebook)
    if os.environ.get("JAXGPT_STORE_LESSONS"):
        nbformat.write(notebook, LESSONS / language / f"{name}.ipynb")
    else:
        assert [kinds_of_outputs(cell) for cell in notebook.cells] == stored, "store the outputs again: see above"
