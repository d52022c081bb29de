"""README and docs: every command and every piece of Python runs, links resolve, and the site builds without a warning."""

import contextlib
import doctest
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys

import pytest

import jaxgpt
from tests.conftest import REPOSITORY
from tests.helpers import check_command, import_pages, needs, run_command, script
from tests.zygote import Zygote

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
INDEX = (DOCS / "index.md").read_text(encoding="utf-8")
# In reading order, so that a page may use what an earlier one has trained.
PAGES = [README, *(DOCS / f"{name}.md" for name in re.findall(r"^([a-z-]+)$", INDEX, flags=re.MULTILINE))]
WRITTEN = [*PAGES, DOCS / "index.md", DOCS / "step.md", *DOCS.glob("*/*.md"), REPOSITORY / "CONTRIBUTING.md"]
TRAIN = "python -m pip install -e . && jaxgpt train"
TEST = 'python -m pip install -e ".[test]" && python -m pytest'

SMALL = """
    --model.n-layer 1 --model.n-head 2 --model.n-embd 16 --model.block-size 16 --optim.warmup-steps 1 --train.steps 2
    --train.batch-size 2 --train.eval-every 2 --train.eval-tokens 64 --train.sample-tokens 5
"""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(page):
    lines = "".join(blocks(page, "bash")).splitlines()
    return [re.split("  +#", line)[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def test_the_two_lines_are_there_and_ci_runs_the_second():
    """And the site's home has README's table of tasks."""
    table = README.read_text("utf-8").partition("| task |")[2].partition("\n\n")[0]
    assert table.replace("(docs/", "(") in INDEX
    assert TRAIN in commands(README) and TEST in commands(README)
    assert TEST in (REPOSITORY / ".ci" / "run").read_text().splitlines()


@pytest.fixture(scope="module")
def directory(tmp_path_factory, text_file):
    """The working directory of a reader: a text of their own, and the experiments."""
    directory = tmp_path_factory.mktemp("reader")
    (directory / "mytext.txt").write_text("The text of the user. " + text_file.read_text() * 3)
    (directory / "experiments").symlink_to(REPOSITORY / "experiments")
    return directory


@pytest.mark.slow
def test_every_command_in_order(directory):
    """In forks of one process that has imported everything; programs of their own in processes of their own."""
    with contextlib.closing(Zygote()) as zygote:
        for page in PAGES:
            if (newest := directory / "runs" / "laptop" / "experiment.json").exists():
                newest.touch()  # "the newest run" of a page is one of text, whatever the page before has trained
            for command in commands(page):
                if command == TEST or (command.startswith("python -m pip install") and command != TRAIN):
                    continue  # CI itself, an accelerator's wheels, or the build of the site, which has its own test
                verb, *argv = shlex.split(command.removeprefix("python -m pip install -e . && "))
                words = argv + smaller(verb, argv)
                in_fork = verb == "jaxgpt"
                done = zygote.run(words, directory, deadline=240) if in_fork else run_command(*words, cwd=directory)
                assert done.returncode == 0, (page.name, command, done.stderr)
                assert done.stdout.strip() or "2017/train.py" in command, (page.name, command)
            written = ["xray.html", "page.html", "exported", "adapted"]  # a later page may write them, too
            subprocess.run(["rm", "-rf", *written], cwd=directory, check=True, timeout=60)


def smaller(verb, argv):
    """Return options that make a training small and give it a text that is there."""
    if "sweep" in argv:
        return [*SMALL.split(), "--data.path", "mytext.txt", "--trials", "2", "--seeds", "1"]
    if "translate.py" in argv[0] or "check" in argv or ("train" not in argv and verb != "python"):
        return []
    if {"--data.path", "--run-dir"} & set(argv):
        return SMALL.split()
    if "transformer_2017" in argv[0]:
        return f"{SMALL} --train.sample-tokens 0".split()
    return [*SMALL.split(), "--data.path", "mytext.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page.stem != "extending"],  # see test_extending.py
    ids=lambda page: page.stem,
)
def test_the_python_runs(page, directory):
    pieces = blocks(page, "python")
    for code in ["\n".join(pieces)] if page.stem == "from-pytorch" else pieces:  # that page is one program
        done = run_command("-c", code, cwd=directory)
        assert done.returncode == 0, (code, done.stderr)


# What the API reference lists, with its kind: ("class", "jaxgpt.layers.Block") and so on.
LISTED = re.findall(
    r"^\.\. auto(class|function|data|exception):: (\S+)",
    "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md"))),
    flags=re.MULTILINE,
)
MOST_ENTRIES = 250  # of the reference, methods included
# The classes that a user builds.
BUILT = "Experiment GPTConfig DataConfig OptimConfig ObjectiveConfig TrainConfig LoraConfig ParallelConfig".split()
BUILT += "GPT Decoding Sampling layers.Attention layers.Block".split()


def find(name):
    """Return what a dotted name stands for: in a module, or in the package, which loads it."""
    module, _, attribute = name.rpartition(".")
    return getattr(*import_pages("post", module), attribute)  # where modules are that are not in the package


def imported_by_readers():
    """Return the names of jaxgpt that the pages and the lessons import: "jaxgpt.layers.Block" and so on."""
    code = [line for page in PAGES for block in blocks(page, "python") for line in block.splitlines()]
    for notebook in DOCS.glob("lessons/*/*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        code += [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    matches = [re.match(r"\s*from (jaxgpt[\w.]*) import ([\w, ]+)", line) for line in code]
    return {f"{m[1]}.{name.split(' as ')[0].strip()}" for m in matches if m for name in m[2].split(",")}


def test_the_reference_lists_each_public_name_once():
    """What `import jaxgpt` gives, and what the pages and lessons import. A table of the page has the types of numbers."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: the reference lists what needs it")
    listed = {id(find(name)) for _, name in LISTED}  # first: this imports the modules among the public names
    public = {n: find(n) for n in imported_by_readers() | {f"jaxgpt.{name}" for name in jaxgpt._HOME}}
    assert len(public) > 50 and len(listed) == len(LISTED) <= MOST_ENTRIES
    lost = [n for n, x in public.items() if id(x) not in listed and not inspect.ismodule(x)]
    assert [n for n in lost if not hasattr(public[n], "__metadata__")] == []


@pytest.mark.parametrize("name", [name for kind, name in LISTED if kind == "class"])
def test_every_field_of_a_public_class_has_a_meaning(name):
    """The comment that `--help` reads, which is no fragment."""
    fields, cls = script("../docs/api/fields"), find(name)
    names = [field.name for field in fields.find_fields(cls)]
    assert [n for n in names if re.match("of |$", fields.find_meaning(cls, n))] == []


@pytest.mark.parametrize("name", BUILT)
def test_the_example_of_a_class_runs(name):
    assert ("class", f"jaxgpt.{name}") in LISTED
    cls = find(f"jaxgpt.{name}")
    (example,) = doctest.DocTestFinder(recurse=False).find(cls, globs=dict(vars(sys.modules[cls.__module__])))
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_examples_of_the_functions_that_a_user_calls_first_run(tmp_path, monkeypatch):
    """They are one program, of a block for each function."""
    parts = blocks(DOCS / "api/first.md", "pycon")
    assert len(parts) == 12
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest("\n".join(parts), {}, "first.md", None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0


# Pages that are looked things up in, and not read from their beginning to their end.
REFERENCES = set("changes design extending from-pytorch glossary laptop-and-pod troubleshooting weights zoo".split())


def test_guides_are_plain_and_flow():
    """Sentences are neither chopped nor endless, long cells of tables included, and a guide has one task."""
    script, faults = runpy.run_path(str(DOCS / "sentences.py")), []
    for page in {*DOCS.glob("*.md"), *WRITTEN}:
        found = list(script["sentences"](page.read_text(encoding="utf-8")))
        words = sum(len(said.split()) for _, said in found)
        is_reference = page.stem in REFERENCES or page.parent.name in ("extending", "results")
        if (len(found) > 5 and not 11 <= words / len(found) <= 18) or (words > 1200 and not is_reference):
            faults.append((page.name, f"{words} words in {len(found)} sentences"))
        fine = {"", "slot", "slots"} if page.stem in ("glossary", "serving") else {""}  # those two define it
        faults += [
            (page.name, line, *bad) for line, said in found if (bad := {*script["STUMBLES"].findall(said)} - fine)
        ]
    assert not faults


def test_links_within_the_repository_resolve():
    for page in WRITTEN:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
            link = "".join(target)
            assert "://" in link or (page.parent / link).exists() or link.startswith("lessons/"), (page.name, link)


@pytest.mark.slow
@needs("myst_nb", "docs")
def test_the_site_builds_without_a_warning(tmp_path):
    check_command("-m", "sphinx", "-W", "-q", str(DOCS), str(tmp_path / "site"), cwd=REPOSITORY)
    lesson = (tmp_path / "site" / "lessons" / "es" / "3_attention.html").read_text(encoding="utf-8")
    assert '<img alt="' in lesson, "the plots that the lesson is stored with"
    reference = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "site" / "api").glob("*.html"))
    assert 'id="jaxgpt.GPT.unembed"' in reference and 'id="jaxgpt.GPT.attention_fn"' not in reference
    assert reference.count('<dt class="sig sig-object py"') <= MOST_ENTRIES
    text = re.sub("<[^>]+>", "", reference)
    garbled = ("Alias for field number", "gt=None", "ForwardRef", "builtins.", "locals&gt;", "\nType:")
    assert [words for words in garbled if words in text] == []
