"""An experiment's file means the same to `jaxgpt train FILE` as to `python FILE`."""

import sys

import pytest

from jaxgpt.cli.experiment_file import load_experiment, load_variants
from jaxgpt.errors import UserError
from tests.helpers import check_command

# Annotations that are strings, of which dataclasses ask the module in `sys.modules`; neighbours, one of them late.
FILE = """
from __future__ import annotations
import dataclasses
from typing import ClassVar
from jaxgpt import Experiment
from neighbour import STEPS
from name import NAME

@dataclasses.dataclass
class Width:
    unit: ClassVar[int] = 8
    heads: int = 2

def context():
    import late
    return late.CONTEXT

train = dataclasses.replace(Experiment(name="x").train, steps=STEPS)
model = dataclasses.replace(Experiment(name="x").model, n_head=2, n_embd=Width.unit * Width().heads, block_size=context())
experiment = Experiment(name=NAME, train=train, model=model)
variants = {"one": experiment}
if __name__ == "__main__":
    print(experiment)
"""


def write(folder, steps):
    folder.mkdir()
    (folder / "mine.py").write_text(FILE)
    (folder / "neighbour.py").write_text(f"STEPS = {steps}\n")
    (folder / "late.py").write_text("CONTEXT = 64\n")
    (folder / "name.py").write_text(f'NAME = "of-{folder.name}"\n')
    return folder / "mine.py"


def test_a_file_is_what_python_makes_of_it(tmp_path):
    file = write(tmp_path / "a", 300)
    done = check_command(str(file), cwd=tmp_path)
    (tmp_path / "link.py").symlink_to(file)  # has the neighbours of what it points to
    assert repr(load_experiment(str(file))) == repr(load_experiment(str(tmp_path / "link.py"))) == done.stdout.strip()


def test_files_of_two_folders_have_neighbours_of_their_own(tmp_path):
    before = list(sys.path), set(sys.modules)
    for folder, steps in (("a", 300), ("b", 500)):
        file = str(write(tmp_path / folder, steps))
        for found in (load_experiment(file), load_variants(file)["one"]):
            assert (found.name, found.train.steps) == (f"of-{folder}", steps)
        assert sys.path == before[0] and not {"neighbour", "late", "name"} & sys.modules.keys()
    left = {name for name in sys.modules.keys() - before[1] if not name.startswith("jaxgpt.")}
    assert left and all("@" in name for name in left), "each under a name of its own"


def test_a_mistake_in_a_neighbour_is_told_and_leaves_nothing(tmp_path):
    file, path = write(tmp_path / "a", 300), list(sys.path)
    (tmp_path / "a/late.py").write_text("CONTEXT = 1 / 0\n")
    with pytest.raises(UserError, match=r"late\.py:1: ZeroDivisionError: division by zero: repair the experiment"):
        load_experiment(str(file))
    assert sys.path == path and not {"neighbour", "mine"} & sys.modules.keys()
