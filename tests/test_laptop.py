"""experiments/laptop/: what the study computes from its results, and that it runs nothing twice."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxgpt.model import GPTConfig
from tests.conftest import REPOSITORY
from tests.helpers import script


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(REPOSITORY / "experiments/laptop")
    module = script("laptop/run")
    monkeypatch.setitem(__import__("sys").modules, "run", module)  # which draw.py imports
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_the_first_step_of_shampoo_is_orthogonal_with_the_size_of_adams(run):
    """The fourth roots of G G^T and G^T G turn G = U S V^T into U V^T, and Adam's first step is the gradient's sign."""
    optim = dataclasses.replace(run.NEW.variants["shampoo"].optim, warmup_steps=0)
    optim = dataclasses.replace(optim, grad_clip=None, weight_decay=0.0, learning_rate=1.0)
    optimizer = optim.make_optimizer(2, model=GPTConfig(n_layer=1, n_head=1, n_embd=8))
    grads = {"h_0": {"mlp": {"c_fc": {"kernel": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)}}}}
    (update,) = jax.tree.leaves(optimizer.update(grads, optimizer.init(grads), grads)[0])
    u, _, vt = np.linalg.svd(*jax.tree.leaves(grads), full_matrices=False)
    np.testing.assert_allclose(update, -np.sqrt(15 / 3) * u @ vt, rtol=1e-3, atol=1e-3)


def test_what_has_run_is_not_run_again_and_what_diverged_has_no_loss(run, tmp_path, monkeypatch):
    calls = []

    def fit(experiment, directory, *, progress):
        calls.append(experiment.train.seed)
        if experiment.train.seed == 1:
            raise run.Diverged("it did")
        directory.mkdir(parents=True)
        (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 1, "val_loss": 2.5}\n')

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.jaxgpt, "fit", fit)
    experiment = run.experiment_of(run.optimizers()["adamw"], 176, 100, "text.txt")
    for seed in (0, 1, 0, 1):
        run.run_one("ideas", ["baseline"], experiment, seed)
    found = run.read("ideas")
    assert calls == [0, 1] and [found["baseline"][str(seed)][0] for seed in (0, 1)] == [2.5, None]
    assert sum(found["processors"].values()) == 2 and not (tmp_path / "runs/laptop/ideas-baseline-0").exists()
