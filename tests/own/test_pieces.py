"""What a user brings in a file of their own goes through everything: (pieces) x (uses). What cannot be says so."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpt
from jaxgpt import ObjectiveConfig, interventions, plain_generate
from jaxgpt.cli.experiment_file import load_file
from jaxgpt.errors import UserError
from jaxgpt.tools.convert import export_gguf, export_hf
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from jaxgpt.tools.plan.plan import make_plan
from jaxgpt.tools.replay import audit
from jaxgpt.tools.xray.live import make_page
from jaxgpt.tools.xray.xray import xray
from jaxgpt.training import fit
from tests.conftest import REPOSITORY
from tests.helpers import logged, quick

FILE = REPOSITORY / "tests" / "own" / "pieces.py"
PIECES = ("layer", "attention", "distance", "optimizer", "objective", "plain")  # `plain` has data of its own, as all do
# By default the experiment that has four at once; each alone by `-m slow`.
EVERY = ["experiment", *(pytest.param(name, marks=pytest.mark.slow) for name in PIECES)]


class Stopped(Exception):
    """As a crash after a save."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXGPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=EVERY)
def trained(request, tmp_path_factory):
    """(experiment, its run, the lines of its callback)."""
    experiment, callbacks = load_file(f"{FILE}:{request.param}")
    lines = []
    run = fit(
        experiment, tmp_path_factory.mktemp(request.param) / "run", callbacks=[*callbacks, lines.append], progress=False
    )
    return experiment, run, lines


def test_it_trains_logs_and_is_resumed_bit_for_bit(trained, tmp_path):
    experiment, run, lines = trained

    def crash(line):
        if line.get("saved") == 4:
            raise Stopped

    with pytest.raises(Stopped):
        fit(experiment, tmp_path / "run", callbacks=[crash], progress=False)
    again = fit(experiment, tmp_path / "run", progress=False)
    chex.assert_trees_all_equal(
        jaxgpt.load(tmp_path / "run", which="last").params, jaxgpt.load(run.directory, which="last").params
    )
    assert logged(run.directory) == logged(again.directory) and {"step": 6, "saved": 6} in lines
    step = next(line for line in lines if "grad_norm" in line)
    has_experts, has_z = (
        type(experiment.model).__name__ == "ExpertConfig",
        type(experiment.objective) is not ObjectiveConfig,
    )
    assert ("balance" in step, "largest_gate" in step, "z" in step) == (has_experts, has_experts, has_z)
    if type(experiment.optim).__name__ == "LossOptim":
        assert step["learning_rate"] == pytest.approx(0.5 * step["loss"])
        assert 0 < step["update_norm"] < step["mean_norm"]


@pytest.mark.slow
def test_it_is_sampled_as_the_whole_forward_pass_says(trained):
    """With requests of several lengths in one slot, past the context, and in int8; and it is scored."""
    _, run, _ = trained
    model, params = run.decode_params
    prompts, how = [[49, 43, 50], [50, 43, 51, 61, 53, 32, 49]], jaxgpt.Sampling(greedy=True)
    drawn = jaxgpt.generate(model, params, prompts, key=jax.random.key(0), max_new_tokens=8, sampling=how, slots=1)
    for prompt, tokens in zip(prompts, drawn.tokens, strict=True):
        whole = plain_generate.generate(
            run.model, run.params, jnp.asarray([prompt]), jax.random.key(0), max_new_tokens=8, temperature=0.0
        )
        assert tokens == whole[0, len(prompt) :].tolist()
    assert len(run.sample("1+1=", max_new_tokens=40, greedy=True, stop=["\0"])) > 20, "past the context"
    assert len(run.for_decoding("int8").sample("1+1=", max_new_tokens=3)) > 0
    assert run.score(["1+1=2 "])[0].bits > 0
    found = evaluate_run(run)
    assert found["loss"] == pytest.approx(run.val_loss, rel=1e-4)


def test_what_is_validated_is_what_is_saved(trained):
    """With `eval_params` the model of the checkpoint is the average, and training goes on from the other."""
    _, run, lines = trained
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert evaluate_run(jaxgpt.load(run.directory, which="last"))["loss"] == pytest.approx(losses[-1], rel=1e-5)
    accepted = audit(str(run.directory), steps=2)
    assert accepted.accepted, accepted


def test_tools_do_what_is_right_or_say_why_not(trained, tmp_path):
    experiment, run, _ = trained
    name = type(experiment.model).__name__
    plan = make_plan(experiment, 256)
    assert plan.memory > 0 and (plan.flops_per_token is None) == (name != "GPTConfig")
    tokens = jnp.arange(8)[None]
    edited = interventions.run(
        run.model, run.params, tokens, [interventions.zero("mlp", 0)], read=["h_0/mlp", "h_0/attention"]
    )
    assert not np.any(edited.activations["h_0/mlp"]) and np.any(edited.activations["h_0/attention"])
    heads = [interventions.zero("heads", 0, index=1)]
    if name == "AverageConfig":
        with pytest.raises(UserError, match="'h_0/heads': give h_0/PLACE, to h_.*, with one of embedding"):
            interventions.run(run.model, run.params, tokens, heads)
    else:
        assert interventions.run(run.model, run.params, tokens, heads).logits_BTV.shape == (1, 8, 256)
    if name == "GPTConfig":
        return
    lacks = {"ExpertConfig": "units", "AverageConfig": "pattern", "DistanceConfig": "pattern"}[name]
    with pytest.raises(UserError, match=f"{name} has no {lacks}, which the page draws"):
        xray(run, "1+1=")
    for refuse in (
        lambda: make_page(run),
        lambda: export_hf(run.directory, tmp_path / "out"),
        lambda: export_gguf(run.directory, tmp_path / "o.gguf"),
    ):
        with pytest.raises(UserError, match=f"^{name}: "):
            refuse()


# Mistakes -----------------------------------------------------------------------------------------------------------

HEAD = """
import dataclasses
import jax.numpy as jnp, numpy as np, optax
from flax import linen as nn
from jaxgpt import *
from jaxgpt.data.pipeline import Dataset
from jaxgpt.data.tokenizer import ByteTokenizer, fingerprint
config = dataclasses.dataclass(frozen=True, kw_only=True)
small = dict(block_size=8, n_layer=1, n_head=1, n_embd=8)
def of(**parts):
    return Experiment(name="x", data=DataConfig(path="text.txt"), train=TrainConfig(steps=1, batch_size=2), **parts)
"""
MODEL = "@config\nclass Mine(GPTConfig):\n    {}\nexperiment = of(model=Mine(**small))"
LAYER = """
class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, *more, train=False, **others):
        x = nn.Dense(8)(x)
        return {result}
@config
class Mine(GPTConfig):
    def make_{piece}(self, layer, compute):
        return Layer()
experiment = of(model=Mine(**small))
"""
PART = "@config\nclass Mine({base}):\n    def make_{piece}(self, *args, **more):\n{body}\nexperiment = of(model=GPTConfig(**small), {part}=Mine())"
ROWS = """
ids, mask = np.arange(8, dtype=np.int32), np.ones(8, bool)
class Rows:
    def __len__(self):
        return 99
    def training_rows(self, *, block_size, seed):
        return lambda n: ({train})
    def validation_rows(self, **more):
        return {val}
@config
class Mine(DataConfig):
    def open_dataset(self, model, *, known=None):
        made_of = dict(tokenizer_sha256=fingerprint(ByteTokenizer()))
        return Dataset(train=Rows(), val=Rows(), tokenizer=ByteTokenizer(), fingerprint=made_of)
experiment = Experiment(name="x", model=GPTConfig(**small), data=Mine(), train=TrainConfig(steps=1, batch_size=2))
"""
LOSS = """        plain = super().make_loss(*args)
        def loss(*given):
            nats, count, metrics = plain(*given)
            return nats / 0.0, count, metrics
        return loss"""
MISTAKES = {
    "a mutable default": (MODEL.format("sizes: list = []"), "mutable default"),
    "what JSON cannot hold": (MODEL.format("act: object = jnp.tanh"), r"Mine.act=.*experiment.json needs"),
    "hides a method": (MODEL.format("window: int = 8"), r"Mine.window hides GPTConfig.window\(\): give it"),
    "not causal": (LAYER.format(piece="attention", result="x.mean(axis=1, keepdims=True) + x"), "Mine: Layer is not causal"),
    "too narrow": (LAYER.format(piece="mlp", result="x[..., :4]"), r"Mine: TypeError: add got incompatible shapes.*\(1, 1, 4\)"),
    "no loss": (PART.format(base="ObjectiveConfig", piece="loss", body="        return lambda *_: 1.0", part="objective"), "Mine: TypeError: cannot unpack non-iterable float object"),
    "what it raises": (PART.format(base="OptimConfig", piece="optimizer", body="        return optax.sgd('fast')", part="optim"), "Mine: TypeError"),
    "another batch": (ROWS.format(train="ids, ids, mask", val="2, lambda n: (ids, ids)"), r"Rows.training_rows makes .* mask_BT bool\[1, 8\], but"),
    "unknown tokens": (ROWS.format(train="ids, ids + 300", val="2, lambda n: (ids, ids)"), "Rows.training_rows: row 0 has tokens from 0 to 307"),
    "no validation": (ROWS.format(train="ids, ids", val="0, lambda n: (ids, ids)"), "Rows.validation_rows has no rows"),
    # Finite where they are traced, and NaN or infinity at the first step.
    "NaN": (LAYER.format(piece="mlp", result="jnp.log(-1 - x * x)"), r"Layer gives NaN .*, first in h_0.* \(Layer\)"),
    "NaN of a slope": (LAYER.format(piece="mlp", result="x + jnp.sqrt(0.0 * x)"), "Layer gives NaN .*, first in the backward pass"),
    "NaN of a loss": (PART.format(base="ObjectiveConfig", piece="loss", body=LOSS, part="objective"), "Mine gives NaN .*, first in the loss, of finite logits"),
    "NaN of an optimiser": (PART.format(base="OptimConfig", piece="optimizer", body="        return optax.scale(float('nan'))", part="optim"), "Mine gives NaN .*: its first update"),
}  # fmt: skip


@quick(MISTAKES, *(name for name in MISTAKES if "NaN" not in name))
def test_a_mistake_is_one_line_and_nothing_is_written(name, tmp_path, monkeypatch):
    source, said = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("hello there, world. " * 30)
    (tmp_path / "mine.py").write_text(HEAD + source)
    with pytest.raises(UserError, match=said) as found:
        experiment, _ = load_file("mine.py")
        fit(experiment, "run", progress=False)
    assert "\n" not in str(found.value) and "mine.py:" in str(found.value)
    assert not (tmp_path / "run").exists()
