"""Every experiment: imported, validated by shape at full size, and stepped twice when shrunk."""

import ast
import dataclasses
import json
import runpy
import shlex

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.cli.experiment_file import load_experiment, load_variants
from jaxgpt.experiment import Experiment
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.tools.study import check_comparable
from jaxgpt.training import fit
from tests.conftest import REPOSITORY
from tests.helpers import run_command

HERE = REPOSITORY / "experiments"
# Beside them lie programs that measure, and may use any module.
FILES = [path for path in sorted(HERE.glob("*.py")) if "\nexperiment = " in path.read_text()]


def test_the_readme_has_the_first_lines_of_the_docstrings():
    assert runpy.run_path(str(HERE / "readme.py"))["render"]() == (HERE / "README.md").read_text(encoding="utf-8")


def list_experiments():
    yield "quickstart"
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and node.targets[0].id != "variants":
                yield f"{path}:{node.targets[0].id}"


every_experiment = pytest.mark.parametrize("name", list(list_experiments()), ids=lambda name: name.rsplit("/", 1)[-1])


@every_experiment
def test_full_size_by_shape(name):
    experiment = load_experiment(name)
    assert isinstance(experiment, Experiment)
    config = dataclasses.replace(experiment.model, vocab_size=experiment.model.vocab_size or 70)
    tokens = jax.ShapeDtypeStruct((1, config.block_size), jnp.int32)
    logits, variables = jax.eval_shape(config.make_model().init_with_output, jax.random.key(0), tokens)
    assert logits.shape == (1, config.block_size, config.vocab_size)
    assert count_parameters(variables["params"]) > 100_000


SMALL = json.dumps({"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "batch_size": 2})
# What each benchmark is given here, and a part of what it prints. TEXT stands for a file.
BENCHMARKS = {
    "training": (f"--systems jaxgpt --rounds 2 --seconds 0.05 --busy 1 --sizes {SMALL!r}", "beside 1 busy"),
    "compilation": (f"--systems jaxgpt --rounds 1 --sizes {SMALL!r}", "| jaxgpt |"),
    "speedrun": (
        "TEXT --seeds 1 --model.n-layer=1 --model.n-head=1 --model.n-embd=8 --model.block-size=8 --train.batch-size=2 "
        "--train.steps=4 --train.eval-every=2 --train.sample-prompt=In --optim.warmup-steps=1",
        "| 0 |",
    ),
    "data": ("TEXT --megabytes 0.02 --gigabytes 0.001 --rounds 1", "to open a corpus"),
    "startup": ("--rounds 1 --trains 1 --peer-python false", "| jaxgpt --help |"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_shrunken(name, tmp_path, text_file):
    words, said = BENCHMARKS[name]
    argv = [str(text_file) if word == "TEXT" else word for word in shlex.split(words)]
    path = HERE / f"benchmarks/{name}.py"
    done = run_command(str(path), "--json", "found.json", *argv, cwd=tmp_path, JAXGPT_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0 and said in done.stdout, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())


@pytest.mark.slow
@every_experiment
def test_two_shrunken_steps(name, text_file, tmp_path, request):
    e = load_experiment(name)
    init_from = e.train.init_from and str(request.getfixturevalue("tiny_run").directory)
    n_head = 2 if e.model.n_kv_head is None else 2 * e.model.n_head // e.model.n_kv_head
    small = {"n_layer": 1, "n_head": n_head, "n_embd": 8 * n_head}
    model = dataclasses.replace(e.model, vocab_size=None, block_size=8, **small)
    small = dataclasses.replace(
        e,
        model=model,
        data=dataclasses.replace(e.data, path=str(text_file), tokenizer="char"),
        optim=dataclasses.replace(e.optim, warmup_steps=1),
        train=dataclasses.replace(e.train, steps=2, batch_size=2, init_from=init_from),
        parallel=dataclasses.replace(e.parallel, micro_batch_size=e.parallel.micro_batch_size and 1),
    )
    run = fit(small, tmp_path / "run", progress=False)
    assert run.step == 2 and run.val_loss is not None


@pytest.mark.parametrize("path", sorted(HERE.glob("study_*.py")), ids=lambda path: path.name)
def test_a_studys_variants_can_be_compared(path):
    variants = load_variants(str(path))
    check_comparable(variants)
    first, *_ = variants.values()
    assert first == load_experiment(str(path))  # whose options are on the command line
    sizes = {
        count_parameters(dataclasses.replace(e.model, vocab_size=65).make_model().shapes()) for e in variants.values()
    }
    assert len(sizes) == 1 or path.name == "study_norm_position.py"  # post-norm has no last norm
    if path.name == "study_activation.py":
        assert sizes == {449_472}
