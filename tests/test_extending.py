"""docs/extending.md: each of its files is written as a reader would, and trained for two steps."""

import dataclasses
import json
import re
import sys
import types

import jax
import numpy as np
import pytest

import jaxgpt
from jaxgpt import DataConfig, Experiment
from jaxgpt.batch import Batch
from jaxgpt.cli.experiment_file import load_experiment, load_file, load_variants
from jaxgpt.errors import UserError
from jaxgpt.loss import make_loss
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.tools.replay import replay
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow
PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {
    re.match(r"# (\w+\.py)\n", code)[1]: code
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A folder with the files of the page, and a text."""
    folder = tmp_path_factory.mktemp("lab")
    for name, code in FILES.items():
        (folder / name).write_text(code)
    (folder / "text.txt").write_text("Nothing is as easy as it looks, said the owl. " * 40)
    return folder


def shrink(experiment: Experiment, lab) -> Experiment:
    """Return an experiment of two steps of a model with one layer, on the folder's text unless it has its own data."""
    model = dataclasses.replace(experiment.model, block_size=16, n_layer=1, n_head=2, n_embd=16)
    train = dataclasses.replace(
        experiment.train, steps=2, batch_size=4, log_every=1, eval_every=2, eval_tokens=64, sample_tokens=0
    )
    data = experiment.data
    if type(data) is DataConfig:
        data = dataclasses.replace(data, path=str(lab / "text.txt"))
    return dataclasses.replace(experiment, model=model, train=train, data=data)


def train(file: str, lab, **changes) -> jaxgpt.Run:
    experiment, callbacks = load_file(str(lab / file))
    experiment = dataclasses.replace(shrink(experiment, lab), **changes)
    return jaxgpt.fit(experiment, lab / "runs" / experiment.name, progress=False, callbacks=callbacks)


def losses(run: jaxgpt.Run) -> list[dict]:
    return [line for line in read_metrics(run.directory / "metrics.jsonl") if "loss" in line]


def val_loss(run: jaxgpt.Run) -> float:
    return [line["val_loss"] for line in read_metrics(run.directory / "metrics.jsonl") if "val_loss" in line][-1]


def test_every_file_of_the_page_is_tried_here():
    source = (REPOSITORY / "tests" / "test_extending.py").read_text(encoding="utf-8")
    assert FILES and all(f'"{name}"' in source for name in FILES)


@pytest.mark.parametrize("name", ["sharp_gelu.py", "alibi.py", "experts.py"])
def test_a_model_trains_and_takes_its_code_along(name, lab):
    run = train(name, lab)
    assert run.step == 2 and run.experiment.model.is_foreign and (run.directory / "code" / name).exists()


def test_alibi_is_sampled_from_its_cache(lab, caplog):
    """The engine compares `decode` with the whole pass, and raises where it differs. The text is longer than the context."""
    run = train("alibi.py", lab)
    assert len(run.sample("Nothing", max_new_tokens=24, temperature=0.0)) == 24
    assert "computes its context again" not in caplog.text


def test_alibi_keeps_documents_apart(lab):
    """A token of the second document in a row has the logits that it has in a row of its own."""
    config = shrink(load_experiment(str(lab / "alibi.py")), lab).model
    model = dataclasses.replace(config, vocab_size=9, n_layer=2).make_model()
    tokens_BT = np.random.default_rng(0).integers(9, size=(1, 8))
    params = model.init(jax.random.key(0), tokens_BT)["params"]
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape), params)
    apply = jax.jit(model.apply)
    both = apply({"params": params}, tokens_BT, segments_BT=np.array([[1, 1, 1, 2, 2, 2, 2, 2]]))
    own = apply({"params": params}, tokens_BT[:, 3:])
    np.testing.assert_allclose(both[:, 3:], own, rtol=1e-5, atol=1e-5)


def test_the_balance_loss_is_logged_and_stays_out_of_validation(lab):
    run = train("experts.py", lab)
    assert all(0.0 < line["balance"] < 0.1 and 0.25 <= line["busiest_expert"] <= 0.5 for line in losses(run))
    heavy = dataclasses.replace(run.experiment.model, balance=100.0)
    first = train("experts.py", lab, name="heavy", model=heavy)
    difference = losses(first)[0]["loss"] - losses(run)[0]["loss"]
    assert difference == pytest.approx(losses(first)[0]["balance"] - losses(run)[0]["balance"], rel=1e-3)
    assert val_loss(first) < 10.0 < losses(first)[-1]["loss"]


def test_lion_takes_steps_of_one_size(lab):
    """The sign of the momentum, times the learning rate: a bias moves by exactly that, since it does not decay."""
    experiment = shrink(load_experiment(str(lab / "lion.py")), lab)
    optimizer = experiment.optim.make_optimizer(2, model=experiment.model)
    params = {"h_0": {"kernel": np.full((2, 3), 2.0, np.float32), "bias": np.ones(3, np.float32)}}
    grads = jax.tree.map(np.ones_like, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    rate = experiment.optim.make_schedule(2)(0)
    np.testing.assert_allclose(updates["h_0"]["bias"], -rate, rtol=1e-6)
    np.testing.assert_allclose(updates["h_0"]["kernel"], -rate * (1.0 + 2.0), rtol=1e-6)
    assert losses(train("lion.py", lab))[-1]["learning_rate"] <= 5e-4


def test_distillation_learns_from_the_teacher_and_validates_as_others_do(lab):
    teacher = train("sharp_gelu.py", lab, name="teacher")
    objective = dataclasses.replace(load_experiment(str(lab / "distill.py")).objective, teacher=str(teacher.directory))
    run = train("distill.py", lab, objective=objective)
    assert all(line["teacher_kl"] > 0.0 for line in losses(run))
    batch = Batch(*np.random.default_rng(0).integers(5, size=(2, 2, 8)))
    loss, plain = objective.make_loss(run.model), make_loss(run.model)
    assert float(loss(run.params, batch, None)[0]) == float(plain(run.params, batch, None)[0])
    trained, count, metrics = loss(run.params, batch, jax.random.key(0))
    nats, _, _ = plain(run.params, batch, None)
    np.testing.assert_allclose(trained, 0.5 * nats + 0.5 * metrics["teacher_kl"], rtol=1e-5)
    assert count == 16.0
    with pytest.raises(UserError, match="train both on the same text"):
        objective.make_loss(dataclasses.replace(run.experiment.model, vocab_size=5).make_model())


def test_the_sums_are_a_function_of_seed_and_row(lab):
    experiment = load_experiment(str(lab / "sums.py"))
    dataset = experiment.data.open_dataset(experiment.model)
    rows = dataset.train.training_rows(block_size=64, seed=3)
    for x, y in zip(rows(5), experiment.data.open_dataset(experiment.model).train.row(5, 64, 3), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(rows(5)[0], rows(6)[0])
    assert not np.array_equal(rows(5)[0], dataset.train.training_rows(block_size=64, seed=4)(5)[0])
    count, read = dataset.val.validation_rows(block_size=64, stride=64, max_tokens=None, prefix_length=0)
    assert read(count - 1)[2].all() and not read(count)[2].any()

    few = dataclasses.replace(experiment.data, largest=9).open_dataset(experiment.model)  # a hundred pairs

    def pairs(split, n):
        text = [few.tokenizer.decode(split.row(i, 64, 0)[0]).split("\n")[:-1] for i in range(n)]
        return {line.split("=")[0] for lines in text for line in lines}

    assert len(pairs(few.train, 100)) == 90 and len(pairs(few.val, 100)) == 10

    run = train("sums.py", lab)
    longer = dataclasses.replace(run.experiment, train=dataclasses.replace(run.experiment.train, steps=3))
    assert jaxgpt.fit(longer, run.directory, extend=True, progress=False).step == 3
    other = dataclasses.replace(longer, data=dataclasses.replace(longer.data, largest=99))
    with pytest.raises(UserError, match="data.largest 999 -> 99"):
        jaxgpt.fit(other, run.directory, progress=False)


def test_the_model_writes_letters_and_writes_them_again_in_a_replay(lab):
    run = train("letters.py", lab)
    assert all(0.0 < line["reward"] < 0.5 for line in losses(run))
    assert replay(run.directory, 2).equal


def test_the_callback_logs_every_line(lab, monkeypatch):
    logged, started = [], []
    wandb = types.ModuleType("wandb")
    wandb.run = None

    def init(**settings):
        started.append(settings)
        wandb.run = types.SimpleNamespace(log=logged.append)
        return wandb.run

    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = train("tracked.py", lab)
    assert started == [{"project": "jaxgpt", "name": "tracked"}]
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in logged if "saved" not in line] == lines and {"step": 2, "saved": 2} in logged


def test_the_comparison_is_of_two_variants_of_equal_size(lab):
    variants = load_variants(str(lab / "compare.py"))
    kinds = {name: type(experiment.model).__name__ for name, experiment in variants.items()}
    assert kinds == {"GELU": "GPTConfig", "sharp GELU": "SharpConfig"}
    models = [dataclasses.replace(e.model, vocab_size=65).make_model() for e in variants.values()]
    assert len({count_parameters(model.shapes()) for model in models}) == 1
