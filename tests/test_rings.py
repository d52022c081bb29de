"""The outer rings come off: with the folder of one deleted, the rest trains, loads and samples."""

import shutil

from tests.conftest import REPOSITORY
from tests.helpers import run_command

SCRIPT = """
import sys
import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, TrainConfig

assert jaxgpt.__file__.startswith(sys.argv[1]), jaxgpt.__file__
tiny = Experiment(
    name="tiny",
    model=GPTConfig(block_size=8, n_layer=1, n_head=2, n_embd=8),
    data=DataConfig(path="text.txt"),
    train=TrainConfig(steps=3, batch_size=2, eval_every=3, checkpoint_every=3),
)
run = jaxgpt.fit(tiny, run_dir="run", progress=False)
assert run.step == 3 and run.val_loss > 0
again = jaxgpt.load("run").sample("The ", max_new_tokens=5, seed=0)
assert len(again) == 5 and again == run.sample("The ", max_new_tokens=5, seed=0)
"""

TOOLS = """
import importlib
import pkgutil
import sys
from pathlib import Path

import jaxgpt
from jaxgpt import *

assert jaxgpt.__file__.startswith(sys.argv[1]), jaxgpt.__file__


def load(package):
    for name in [package.__name__, *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]:
        try:
            importlib.import_module(name)
        except ImportError as e:
            if (e.name or "").startswith("jaxgpt"):  # others are of extras that are not installed
                sys.exit(f"{name} needs {e.name}")


load(jaxgpt)
assert {"jaxgpt.serve.app", "jaxgpt.cli.main", "jaxgpt.tools.sweep"} <= sys.modules.keys()
tools = Path(jaxgpt.__file__).parent / "tools"
folders = sorted(path for path in Path("tools").iterdir() if (path / "__init__.py").exists())
assert folders
for folder in folders:
    folder.rename(tools / folder.name)
    importlib.invalidate_caches()
    load(importlib.import_module(f"jaxgpt.tools.{folder.name}"))
    (tools / folder.name).rename(folder)
    for name in [name for name in sys.modules if name.startswith(f"jaxgpt.tools.{folder.name}")]:
        del sys.modules[name]
"""


def copy_package(directory):
    shutil.copytree(REPOSITORY / "jaxgpt", directory / "jaxgpt", ignore=shutil.ignore_patterns("__pycache__"))


def test_the_rest_trains_and_samples_without_its_rings(tmp_path, text_file):
    copy_package(tmp_path)
    for ring in ("tools", "cli", "interventions"):
        shutil.rmtree(tmp_path / "jaxgpt" / ring)
    (tmp_path / "text.txt").write_text("The text. " + text_file.read_text() * 2)
    done = run_command("-c", SCRIPT, str(tmp_path), cwd=tmp_path, deadline=120, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_each_tool_can_be_deleted_with_its_folder(tmp_path):
    """Nothing outside their folders imports one, and no tool imports another: each is loaded where the others are not."""
    copy_package(tmp_path)
    (tmp_path / "tools").mkdir()
    for folder in [path for path in (tmp_path / "jaxgpt" / "tools").iterdir() if path.is_dir()]:
        shutil.move(folder, tmp_path / "tools" / folder.name)
    done = run_command("-c", TOOLS, str(tmp_path), cwd=tmp_path, deadline=60, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
