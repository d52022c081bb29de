"""The core by itself trains and samples where only jax, flax and optax can be imported; and its outer rings come off."""

import shutil

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import check_command

PROGRAM = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        rings = ("data", "sample", "parallel", "cluster", "runs", "hf", "tools", "cli", "run", "training")
        if name.split(".")[0] in {packages} or name.startswith("jaxgpt.") and name.split(".")[1] in rings:
            raise ImportError(f"{{name}} is not of the core")

import flax.linen  # which imports rich for itself
sys.meta_path.insert(0, Refuse())
for name in [name for name in sys.modules if name.split(".")[0] in {packages}]:
    del sys.modules[name]

import functools
import jax, jax.numpy as jnp
from jaxgpt.batch import Batch
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.loss import make_loss
from jaxgpt.model import GPT
from jaxgpt.optim import learning_rate, make_optimizer
from jaxgpt.train import init_state, train_step

text = list(b"to be or not to be, ")
steps = 60
optim = OptimConfig(learning_rate=1e-2)
model = GPT(GPTConfig(vocab_size=128, block_size=len(text), n_layer=1, n_head=2, n_embd=32))
optimizer = make_optimizer(optim, steps)
state = init_state(model, optimizer, jax.random.key(0))
step = functools.partial(train_step, loss_fn=make_loss(model), optimizer=optimizer, schedule=learning_rate(optim, steps))
batch = Batch(inputs_BT=jnp.asarray([text]), targets_BT=jnp.asarray([text[1:] + text[:1]]))

compiled = jax.jit(step)
for number in range(1, steps + 1):
    state, metrics = compiled(state, batch, jax.random.key(1))
    print(number, metrics["loss"])
tokens, apply = text[:6], jax.jit(model.apply)
while len(tokens) < len(text):
    padded = jnp.asarray([tokens + [0] * (len(text) - len(tokens))])
    logits_BTV = apply({{"params": state.params}}, padded)
    tokens.append(int(logits_BTV[0, len(tokens) - 1].argmax()))
print(bytes(tokens).decode())
"""
PACKAGES = "orbax rich matplotlib tokenizers jinja2 filelock safetensors huggingface_hub transformers torch".split()


def test_the_core_trains_and_samples_alone(tmp_path):
    done = check_command("-c", PROGRAM.format(packages=PACKAGES), cwd=tmp_path)
    *lines, text = done.stdout.splitlines()
    steps, losses = zip(*(map(float, line.split()) for line in lines), strict=True)
    assert list(steps) == list(range(1, 61)) and losses[-1] < 0.1 < losses[0]
    assert text == "to be or not to be, "


RINGS = """
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
again = jaxgpt.load("run").sample("The ", max_new_tokens=5, seed=0)
assert run.step == 3 and len(again) == 5 and again == run.sample("The ", max_new_tokens=5, seed=0)
"""


@pytest.mark.slow
def test_the_rest_trains_and_samples_without_its_rings(tmp_path, text_file):
    shutil.copytree(REPOSITORY / "jaxgpt", tmp_path / "jaxgpt", ignore=shutil.ignore_patterns("__pycache__"))
    for ring in ("tools", "cli", "interventions"):
        shutil.rmtree(tmp_path / "jaxgpt" / ring)
    (tmp_path / "text.txt").write_text("The text. " + text_file.read_text() * 2)
    check_command("-c", RINGS, str(tmp_path), cwd=tmp_path, deadline=120, PYTHONPATH=str(tmp_path))
