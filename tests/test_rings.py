"""The outer rings come off: with the folder of one deleted, the rest trains, loads and samples."""

import shutil

from tests.conftest import REPOSITORY
from tests.helpers import check_command

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


def test_the_rest_trains_and_samples_without_its_rings(tmp_path, text_file):
    shutil.copytree(REPOSITORY / "jaxgpt", tmp_path / "jaxgpt", ignore=shutil.ignore_patterns("__pycache__"))
    for ring in ("tools", "cli", "interventions"):
        shutil.rmtree(tmp_path / "jaxgpt" / ring)
    (tmp_path / "text.txt").write_text("The text. " + text_file.read_text() * 2)
    check_command("-c", SCRIPT, str(tmp_path), cwd=tmp_path, deadline=120, PYTHONPATH=str(tmp_path))
