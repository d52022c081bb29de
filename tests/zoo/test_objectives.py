"""experiments/zoo, objectives: the terms against NumPy, what is validated, and what cannot be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.batch import Batch
from jaxgpt.layers.mlp import MLP
from jaxgpt.loss import make_loss
from jaxgpt.model import GPTConfig
from jaxgpt.training import fit
from tests.helpers import TINY, import_pages, make_model, tiny_experiment

label_smoothing, z_loss = import_pages("zoo", "label_smoothing", "z_loss")

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


def test_validation_has_the_plain_loss(model):
    module, params = model
    plain = run(make_loss(module), params, key=None)
    for config in (z_loss.ZLossConfig(z_loss=1.0), label_smoothing.SmoothingConfig(smoothing=0.5)):
        assert run(config.make_loss(module), params, key=None) == plain


def test_an_objective_trains_from_its_page(text_file, tmp_path):
    """With accumulation, since a loss is a sum over micro-batches."""
    lines: list[dict] = []
    tiny = tiny_experiment(text_file, steps=2, eval_every=2, sample_tokens=0)
    parallel = dataclasses.replace(tiny.parallel, micro_batch_size=2)
    optim = dataclasses.replace(tiny.optim, max_skipped=20)  # tests share a trainer of equal fields
    experiment = dataclasses.replace(tiny, objective=z_loss.ZLossConfig(), parallel=parallel, optim=optim)
    fit(experiment, tmp_path / "run", progress=False, setup=False, callbacks=[lines.append])
    trained = [line["log_z"] for line in lines if "loss" in line]
    assert trained and np.isfinite(trained).all()
