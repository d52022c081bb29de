"""experiments/post, from file to run: pairs, their reference, and a teacher."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.batch import Batch
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from jaxgpt.training import fit
from tests.helpers import TINY, import_pages, make_model, replace_fields

distillation, dpo, logprobs = import_pages("post", "distillation", "dpo", "logprobs")
ROWS = jax.random.randint(jax.random.key(0), (3, 9), 0, TINY.vocab_size)
# A target that does not count may have any value, one outside the vocabulary too.
MASK = jnp.ones((3, 8), bool).at[1, 3:].set(False)
BATCH = Batch(ROWS[:, :-1], jnp.where(MASK, ROWS[:, 1:], -1), MASK)
KEY = jax.random.key(1)


def run(loss, params, key=KEY):
    nats, count, metrics = jax.jit(loss)(params, BATCH, key)
    return float(nats), float(count), {name: float(x) for name, x in metrics.items()}


def log_softmax(model, params, temperature=1.0):
    logits = np.asarray(model.apply({"params": params}, BATCH.inputs_BT), np.float64) / temperature
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


# Distillation


def test_distillation_mixes_cross_entropy_and_divergence(tiny_run):
    teacher = tiny_run
    module, params = make_model(dataclasses.replace(teacher.model.config, n_layer=1), seed=5)
    config = distillation.DistillationConfig(teacher=str(teacher.directory), weight=0.25, temperature=3.0)
    nats, count, metrics = run(config.make_loss(module), params)
    log_p, log_q = log_softmax(teacher.model, teacher.params, 3.0), log_softmax(module, params, 3.0)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    targets = np.maximum(np.asarray(BATCH.targets_BT), 0)
    ce = -np.take_along_axis(log_softmax(module, params), targets[..., None], axis=-1)[..., 0]
    mask = np.asarray(MASK)
    assert metrics["kl"] == pytest.approx(kl[mask].sum(), rel=1e-4)
    assert nats == pytest.approx((0.75 * ce + 0.25 * 9.0 * kl)[mask].sum(), rel=1e-5) and count == mask.sum()


# Pairs


@pytest.fixture(scope="module")
def answering(tmp_path_factory):
    """A model of both answers, that has learnt nothing yet."""
    model = dataclasses.replace(TINY, vocab_size=None, block_size=128, position="rope")
    experiment = replace_fields(dataclasses.replace(dpo.sft, model=model), train={"steps": 2, "batch_size": 2})
    return fit(experiment, tmp_path_factory.mktemp("answering") / "run", progress=False, setup=False)


def prefer(answering, steps=2, **data):
    train = {"steps": steps, "batch_size": 2, "init_from": str(answering.directory), "log_every": 1}
    return replace_fields(dpo.experiment, data={"reference_batch": 4} | data, train=train)


def test_pairs_train_from_their_page_and_resume(answering, tmp_path):
    """A policy equal to its reference has a margin of 0; a resumed run, whose tokenizer is its own, has the same one."""
    lines: list[dict] = []
    options = dict(progress=False, setup=False, callbacks=[lines.append], trust_code=True)
    fit(prefer(answering), tmp_path / "run", **options)
    trained = fit(prefer(answering, steps=4), tmp_path / "run", extend=True, **options)
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert sorted(losses) == [1, 2, 3, 4] and losses[1] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[4] != losses[1] and trained.experiment.data.reference is None
    assert evaluate_run(trained)["loss"] == pytest.approx(trained.val_loss, rel=1e-5)


def test_only_the_answers_own_tokens_count_and_the_reference_is_the_models(answering):
    """In a row, a pair is two texts with one prompt, and the extras are the model's own log-probabilities."""
    data = dataclasses.replace(dpo.experiment.data, tokenizer=str(answering.directory / "tokenizer.json"))
    dataset = data.open_dataset(answering.model.config)
    _, read = dataset.val.validation_rows(block_size=128, stride=128, max_tokens=None, prefix_length=0)
    inputs, targets, mask, segments, extras = read(0)
    texts = [dataset.tokenizer.decode(targets[mask & (segments == n)]) for n in (1, 2)]
    assert texts[0].strip("\x03").strip(".").isdigit() and texts[1] == f"It is {texts[0][:-2]}, I would say.\x03"
    prompts = [dataset.tokenizer.decode(inputs[~mask & (segments == n)]) for n in (1, 2)]
    assert prompts[0] == prompts[1] and "?" in prompts[0]
    batch = Batch(*(x[None] for x in (inputs, targets, mask, segments)))
    found_T = logprobs.token_logprobs(answering.model, answering.params, batch)[0]
    kept = segments > 0
    np.testing.assert_allclose(extras["reference_logprobs_BT"][kept], found_T[kept], atol=1e-5)
