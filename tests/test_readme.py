"""Every command and every piece of Python in the README runs, with the sizes made small."""

import functools
import re
import shlex

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import run_command
from tests.zygote import Zygote

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
TRAIN = "python -m pip install -e . && jaxgpt train"
TEST = 'python -m pip install -e ".[test]" && python -m pytest'

SMALL = """
    --model.n-layer 1 --model.n-head 2 --model.n-embd 16 --model.block-size 16 --optim.warmup-steps 1 --train.steps 2
    --train.batch-size 2 --train.eval-every 2 --train.eval-tokens 64 --train.sample-tokens 5
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands():
    lines = "".join(blocks("bash")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def test_the_two_lines_are_there_and_ci_runs_the_second():
    assert TRAIN in commands() and TEST in commands()
    assert TEST in (REPOSITORY / ".ci" / "run").read_text().splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory, text_file):
    """Where the README's files are: a text of the user's own, and a folder of tokens."""
    directory = tmp_path_factory.mktemp("readme")
    (directory / "mytext.txt").write_text("The text of the user. " + text_file.read_text() * 3)
    (directory / "mypairs.tsv").write_text("".join(f"uno {n}\t{n}\n" for n in range(100)))
    (directory / "experiments").symlink_to(REPOSITORY / "experiments")
    return directory


@pytest.mark.slow
def test_every_command_in_order(place):
    """In forks of one process that has imported everything; programs of their own in processes of their own."""
    ran, zygote = 0, Zygote()
    for command in commands():
        if command == TEST or (command.startswith("python -m pip install") and command != TRAIN):
            continue  # that is CI itself, or an accelerator's
        argv = shlex.split(command.removeprefix("python -m pip install -e . && "))
        verb, *argv = argv
        if "train" in argv or verb == "python":
            argv += SMALL.split()
            if not {"--data.path", "--run-dir"} & set(argv):
                pairs = any("2017" in word for word in argv)
                argv += ["--data.path", "mypairs.tsv" if pairs else "mytext.txt"]
        run = (
            functools.partial(zygote.run, deadline=240)
            if verb == "jaxgpt"
            else lambda argv, cwd: run_command(*argv, cwd=cwd)
        )
        done = run(argv, place)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout.strip(), command
        ran += 1
    zygote.close()
    assert ran >= 5


@pytest.mark.slow
def test_the_python_runs(place):
    for code in blocks("python"):
        done = run_command("-c", code, cwd=place)
        assert done.returncode == 0, (code, done.stderr)


def test_the_tree_is_the_tree():
    """Every file that the README's tree names exists, and no module is left out."""
    (tree,) = [b for b in blocks("text") if b.startswith("jaxgpt/")]
    named = set(re.findall(r"[\w.]+\.py", tree))
    actual = {p.name for p in (REPOSITORY / "jaxgpt").rglob("*.py")} - {"__init__.py"}
    experiments = {p.name for p in (REPOSITORY / "experiments").glob("*.py")}
    assert named - {"__init__.py"} == actual | experiments


def test_every_table_row_has_its_command():
    rows = [
        line for line in README.splitlines() if line.startswith("|") and "loss" not in line and "experiments/" in line
    ]
    assert all("`" in row for row in rows)
