"""The code of a run's own classes: kept, found again by its digest, and not run unless it is trusted."""

import dataclasses
import json
import shutil
import sys
import types

import pytest

import jaxgpt
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.errors import UserError
from jaxgpt.runs import code
from jaxgpt.runs.directory import read_metadata
from tests.helpers import edit_record, run_command

# Annotations that are strings; a neighbour, which imports another; and a field that is an option.
MINE = """
from __future__ import annotations
import dataclasses
from jaxgpt import DataConfig, Experiment, GPTConfig, TrainConfig
from jaxgpt.config.validate import Count
from layer import Scaled

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(GPTConfig):
    factor: Count = 2  # of the MLP

    def make_mlp(self, layer, compute):
        return Scaled(super().make_mlp(layer, compute), self.factor)

experiment = Experiment(
    name="mine",
    model=Mine(block_size=8, n_layer=1, n_head=1, n_embd=8, factor=3),
    data=DataConfig(path="TEXT"),
    train=TrainConfig(steps=2, batch_size=2, sample_tokens=0, eval_tokens=16),
)
"""
NOTEBOOK = """
import dataclasses
from jaxgpt import DataConfig, Experiment, GPTConfig, TrainConfig

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(GPTConfig):
    factor: int = 2

model, data = Mine(block_size=8, n_layer=1, n_head=1, n_embd=8), DataConfig(path="TEXT")
experiment = Experiment(name="mine", model=model, data=data, train=TrainConfig(steps=1, batch_size=2, sample_tokens=0))
"""
LAYER = """
from flax import linen as nn
from power import up

class Scaled(nn.Module):
    inner: nn.Module
    factor: int

    def __call__(self, x_BTD, *, train=False):
        return up(self.factor) * self.inner(x_BTD, train=train)
"""
POWER = "def up(x):\n    return x\n"


def write(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MINE.replace("TEXT", str(text)))
    (folder / "layer.py").write_text(LAYER)
    (folder / "power.py").write_text(POWER)
    return folder / "mine.py"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("hello there, world. " * 60)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A user's cache, in which the user has trained with the code of `trained`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXGPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text, cache):
    """(its file, its run directory)."""
    file = write(tmp_path_factory.mktemp("lab"), text)
    directory = file.parent / "run"
    jaxgpt.fit(load_experiment(str(file)), directory, progress=False)
    return file, directory


@pytest.fixture
def directory(trained, tmp_path):
    """A copy of the run."""
    return shutil.copytree(trained[1], tmp_path / "run")


@pytest.fixture
def stranger(monkeypatch, tmp_path):
    """Another user, who has trained with nothing."""
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))


def up(model):
    """Return `power(1)` of the file that a model comes from."""
    return sys.modules[type(model).__module__.replace("mine", "power")].up(1)


def forget(monkeypatch):
    """As in another process: no class is imported."""
    monkeypatch.setattr(code, "_subclasses", lambda base: iter(()))
    for name in [name for name in sys.modules if "@" in name]:
        monkeypatch.delitem(sys.modules, name)


def test_the_run_keeps_what_its_classes_are_made_of(trained, cache, monkeypatch):
    _, directory = trained
    names = sorted(p.name for p in (directory / "code").iterdir())
    record = json.loads((directory / "experiment.json").read_text())
    assert record["experiment"]["model"]["class"] == "mine:Mine"
    assert names == sorted(record["code"]) == ["layer.py", "mine.py", "power.py"]
    forget(monkeypatch)
    model = read_metadata(directory).model
    assert (type(model).__name__, model.factor) == ("Mine", 3) and type(model).__module__.startswith("mine@")
    assert read_metadata(directory).model == model, "one class for one digest"


def test_a_received_run_is_not_run_unless_it_is_trusted(directory, stranger, monkeypatch, tmp_path):
    """Its code would write a file. Nothing of it is run to say so, and with the flag it is."""
    forget(monkeypatch)
    said = r"brings code of its own, layer.py, mine.py, power.py \(SHA-256 [0-9a-f]{12}.*--trust-code"
    with pytest.raises(UserError, match=said):
        jaxgpt.load(directory)
    place, mark = directory / "code" / "power.py", tmp_path / "was-here"
    place.write_text(f"__import__('pathlib').Path({str(mark)!r}).touch()\n" + place.read_text())
    with pytest.raises(UserError, match=r"not the code that the run was trained with: restore power.py"):
        jaxgpt.load(directory, trust_code=True)
    edit_record(directory, lambda record: record.update(code=code.digests_of(code.read_code(directory))))
    with pytest.raises(UserError, match="trust_code=True"):
        jaxgpt.load(directory)
    assert not mark.exists()
    jaxgpt.load(directory, trust_code=True)
    assert mark.exists()


@pytest.mark.parametrize("name", ["os:system", "mine:Scaled", "jaxgpt.model:GPTConfig", 3, "../mine:Mine"])
def test_no_name_of_a_class_leads_elsewhere(directory, monkeypatch, name):
    edit_record(directory, lambda record: record["experiment"]["model"].update({"class": name}))
    forget(monkeypatch)
    with pytest.raises(UserError, match="class"):
        read_metadata(directory, trust_code=True)


def test_links_and_other_files_are_no_code(trained, directory, tmp_path):
    (directory / "code/link.py").symlink_to(trained[0])
    (directory / "code/notes.txt").write_text("x")
    assert code.read_code(directory) == code.read_code(trained[1])
    (tmp_path / "__init__.py").write_text("def up(x):\n    return x + 9\n")
    (directory / "code/power").symlink_to(tmp_path)  # which Python would prefer to power.py
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        assert up(read_metadata(directory).model) == 1
        shutil.rmtree(directory / "code")
        forget(patch)
        with pytest.raises(UserError, match="does not have its file: put it there again"):
            read_metadata(directory)


def test_a_file_that_has_changed_does_not_go_on_silently(directory, text, tmp_path, monkeypatch):
    """The run's own copy does, if it is asked for; and both versions are there at once."""
    other = write(tmp_path / "lab", text)
    (other.parent / "power.py").write_text("def up(x):\n    return x + 1\n")
    experiment = load_experiment(str(other))
    more = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=3))
    said = r"power.py has changed since .*run was trained.*[0-9a-f]{12} -> [0-9a-f]{12}.*--trust-code"
    with pytest.raises(UserError, match=said):
        jaxgpt.fit(more, directory, progress=False)
    found = jaxgpt.fit(more, directory, progress=False, trust_code=True, extend=True)
    assert found.step == 3
    assert [up(found.experiment.model), up(more.model)] == [1, 2]
    monkeypatch.setattr(code, "_subclasses", lambda base: iter((type(more.model),)))  # all that is imported
    assert type(read_metadata(directory).model) is not type(more.model)


def test_modules_of_the_same_names_from_elsewhere_are_not_taken(trained, cache, monkeypatch):
    """Neither another `power` that a program has imported, nor a `mine`."""
    here = [types.ModuleType("power"), types.ModuleType("mine")]
    for module in here:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    forget(monkeypatch)
    for model in (read_metadata(trained[1]).model, load_experiment(str(trained[0])).model):
        assert up(model) == 1
    assert [sys.modules["power"], sys.modules["mine"]] == here and "layer" not in sys.modules


def test_comments_and_the_experiment_of_a_file_may_change(directory, text, tmp_path):
    other = write(tmp_path / "lab", text)
    other.write_text('"""Another docstring."""\n' + other.read_text().replace("steps=2,", "steps=3,") + "# a comment\n")
    (other.parent / "power.py").write_text('def up(x):\n    """Say more."""\n    return x  # nothing\n')
    assert jaxgpt.fit(load_experiment(str(other)), directory, progress=False, extend=True).step == 3


@pytest.mark.parametrize("line", ["from .layer import Scaled", "from layers.scaled import Scaled"])
def test_packages_are_refused_in_a_line(text, tmp_path, line):
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers/__init__.py").touch()
    file = write(tmp_path, text)
    file.write_text(file.read_text().replace("from layer import Scaled", line))
    with pytest.raises(UserError, match="imports from a package.*put the file that it needs beside the experiment"):
        load_experiment(str(file))


@pytest.mark.slow
def test_another_process_uses_the_run_and_its_options(trained, cache, tmp_path):
    file, directory = trained
    other = ("--model.factor", "4", "--run-dir", str(directory))
    done = run_command("-m", "jaxgpt", "train", str(file), *other, cwd=tmp_path)
    assert done.returncode == 2 and "model.factor 3 -> 4" in done.stderr
    sample = ("-m", "jaxgpt", "sample", str(directory), "--max-new-tokens", "5", "--prompt", "he")
    stranger = str(tmp_path / "stranger")
    done = run_command(*sample, cwd=tmp_path, JAXGPT_CACHE=stranger)
    assert done.returncode == 2 and "--trust-code" in done.stderr
    done = run_command(*sample, "--trust-code", cwd=tmp_path, JAXGPT_CACHE=stranger)
    assert done.returncode == 0 and done.stdout.startswith("he"), done.stderr


@pytest.mark.slow
def test_a_class_of_no_file_is_used_where_it_is_defined(text, tmp_path, monkeypatch):
    """As in a notebook: the run trains, and only a process with that class opens it."""
    space: dict = {"__name__": "__main__"}
    exec(NOTEBOOK.replace("TEXT", str(text)), space)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    run = jaxgpt.fit(space["experiment"], tmp_path / "run", progress=False)
    assert type(run.experiment.model) is space["Mine"] and not (tmp_path / "run/code").exists()
    forget(monkeypatch)
    with pytest.raises(UserError, match="'__main__:Mine' was defined in no file"):
        read_metadata(tmp_path / "run")
