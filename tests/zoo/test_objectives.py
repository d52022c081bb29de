"""experiments/zoo, objectives: the terms against NumPy, what is validated, and what cannot be."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxgpt.batch import Batch
from jaxgpt.cli.main import main
from jaxgpt.config import GPTConfig, ObjectiveConfig
from jaxgpt.errors import UserError
from jaxgpt.fitting import fit
from jaxgpt.layers.mlp import MLP
from jaxgpt.loss import make_loss
from tests.conftest import REPOSITORY
from tests.helpers import FLOAT32_REORDERED, TINY, make_model, tiny_experiment

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(REPOSITORY / "experiments" / "zoo"))
    distillation, label_smoothing, z_loss = map(importlib.import_module, ("distillation", "label_smoothing", "z_loss"))

ROWS = jax.random.randint(jax.random.key(0), (3, 9), 0, TINY.vocab_size)
# A target that does not count may have any value, one outside the vocabulary too.
MASK = jnp.ones((3, 8), bool).at[1, 3:].set(False)
BATCH = Batch(ROWS[:, :-1], jnp.where(MASK, ROWS[:, 1:], -1), MASK)
KEY = jax.random.key(1)


class SowingMLP(MLP):
    """An MLP with a loss of its own."""

    def __call__(self, x_BTD, *, train=False):
        self.sow("losses", "own", jnp.mean(jnp.square(x_BTD)))
        return super().__call__(x_BTD, train=train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SowingConfig(GPTConfig):
    def make_mlp(self, layer, compute):
        plain = super().make_mlp(layer, compute)
        names = [field.name for field in dataclasses.fields(MLP) if field.name not in ("name", "parent")]
        return SowingMLP(**{name: getattr(plain, name) for name in names})


@pytest.fixture(scope="module")
def model():
    """One layer, with a sown loss, which every objective has to keep."""
    return make_model(SowingConfig(**dataclasses.asdict(TINY) | {"n_layer": 1}))


def run(loss, params, key=KEY, batch=BATCH):
    nats, count, metrics = jax.jit(loss)(params, batch, key)
    return float(nats), float(count), {name: float(x) for name, x in metrics.items()}


def learn(loss, params):
    """(The loss, its gradient)."""
    return jax.jit(jax.value_and_grad(lambda params: loss(params, BATCH, KEY)[0]))(params)


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def logits_of(model, params):
    return np.asarray(model.apply({"params": params}, BATCH.inputs_BT), np.float64)


def test_z_loss_is_the_square_of_log_z(model):
    module, params = model
    plain = run(make_loss(module), params)
    nats, count, metrics = run(z_loss.ZLossConfig(z_loss=0.01).make_loss(module), params)
    log_z = np.log(np.exp(logits_of(module, params)).sum(axis=-1))[np.asarray(MASK)]
    assert count == plain[1] == MASK.sum()
    assert metrics.pop("log_z") == pytest.approx(log_z.sum(), rel=1e-5)
    assert metrics.pop("z_loss") == pytest.approx(0.01 * np.square(log_z).sum(), rel=1e-5)
    assert nats - plain[0] == pytest.approx(0.01 * np.square(log_z).sum(), rel=1e-4)
    assert metrics == pytest.approx(plain[2])  # what modules sow stays in the loss and in the log


def test_label_smoothing_is_that_of_the_core(model):
    module, params = model
    ours, cores = (
        label_smoothing.SmoothingConfig(smoothing=0.2).make_loss(module),
        make_loss(module, label_smoothing=0.2),
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, **FLOAT32_REORDERED),
        *(learn(loss, params) for loss in (ours, cores)),
    )


@pytest.fixture(scope="module")
def teacher(text_file, tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher") / "run"
    return fit(tiny_experiment(text_file, steps=2, sample_tokens=0), directory, progress=False, setup=False)


def students(teacher, **fields):
    return make_model(dataclasses.replace(teacher.model.config, **fields), seed=5)


def test_distillation_mixes_cross_entropy_and_divergence(teacher):
    module, params = students(teacher, n_layer=1)
    config = distillation.DistillationConfig(teacher=str(teacher.directory), weight=0.25, temperature=3.0)
    nats, count, metrics = run(config.make_loss(module), params)
    targets = np.asarray(BATCH.targets_BT)
    log_p, log_q = (log_softmax(logits_of(m, p) / 3.0) for m, p in ((teacher.model, teacher.params), (module, params)))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    ce = -np.take_along_axis(log_softmax(logits_of(module, params)), np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    mask = np.asarray(MASK)
    assert metrics["kl"] == pytest.approx(kl[mask].sum(), rel=1e-4)
    assert nats == pytest.approx((0.75 * ce + 0.25 * 9.0 * kl)[mask].sum(), rel=1e-5) and count == mask.sum()


def test_a_student_equal_to_its_teacher_has_nothing_to_learn_from_it(teacher):
    plain = make_loss(teacher.model)
    mixed = distillation.DistillationConfig(teacher=str(teacher.directory), weight=0.5).make_loss(teacher.model)
    (_, ours), (_, cores) = (learn(loss, teacher.params) for loss in (mixed, plain))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y / 2, rtol=1e-3, atol=2e-4), ours, cores)


def test_validation_has_the_plain_loss(model):
    module, params = model
    plain = run(make_loss(module), params, key=None)
    for config in (z_loss.ZLossConfig(z_loss=1.0), label_smoothing.SmoothingConfig(smoothing=0.5)):
        assert run(config.make_loss(module), params, key=None) == plain


def test_validation_of_a_student_has_the_plain_loss(teacher):
    module, params = students(teacher)
    config = distillation.DistillationConfig(teacher=str(teacher.directory))
    assert run(config.make_loss(module), params, key=None) == run(make_loss(module), params, key=None)


@pytest.mark.parametrize(
    "config", [z_loss.ZLossConfig(), label_smoothing.SmoothingConfig(), distillation.DistillationConfig()]
)
def test_a_loss_in_chunks_is_refused(config):
    with pytest.raises(UserError, match="parallel.loss_chunk.*all logits"):
        config.make_loss(nn.Module(), head_loss=lambda: None)


def test_smoothing_is_given_once():
    with pytest.raises(UserError, match="give one of them"):
        label_smoothing.SmoothingConfig().make_loss(nn.Module(), label_smoothing=0.1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"vocab_size": 7}, r"has \d+ tokens .* student 7 and 8"), ({"block_size": 16}, "a context of 8, .* and 16")],
)
def test_a_teacher_of_another_vocabulary_or_shorter_context_is_refused(teacher, fields, said):
    module = dataclasses.replace(teacher.model.config, **fields).make_model()
    with pytest.raises(UserError, match=said):
        distillation.DistillationConfig(teacher=str(teacher.directory)).make_loss(module)


def test_without_a_teacher_one_line_says_so(text_file, tmp_path, capfd):
    page = REPOSITORY / "experiments" / "zoo" / "distillation.py"
    options = [
        "--objective.teacher",
        str(tmp_path / "none"),
        "--data.path",
        str(text_file),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    with pytest.raises(SystemExit) as end:
        main(["train", str(page), *options])
    err = capfd.readouterr().err.strip()
    assert end.value.code == 2 and "\n" not in err and "objective.teacher: " in err and not (tmp_path / "run").exists()


def test_objectives_train_from_their_pages(teacher, text_file, tmp_path):
    """With accumulation, since a loss is a sum over micro-batches."""
    tiny = tiny_experiment(text_file, steps=2, eval_every=2, sample_tokens=0)
    parallel = dataclasses.replace(tiny.parallel, micro_batch_size=2)
    objectives: dict[str, ObjectiveConfig] = {
        "log_z": z_loss.ZLossConfig(),
        "kl": distillation.DistillationConfig(teacher=str(teacher.directory)),
    }
    for number, (name, objective) in enumerate(objectives.items()):
        lines: list[dict] = []
        optim = dataclasses.replace(tiny.optim, max_skipped=20 + number)  # tests share a trainer of equal fields
        experiment = dataclasses.replace(tiny, objective=objective, parallel=parallel, optim=optim)
        fit(experiment, tmp_path / name, progress=False, setup=False, callbacks=[lines.append])
        assert all(np.isfinite(line[name]) for line in lines if "loss" in line) and any(name in line for line in lines)
