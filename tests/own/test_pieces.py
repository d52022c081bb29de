"""What a user brings in a file of their own goes through everything: (pieces) x (uses). What cannot be says so."""

import dataclasses
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpt
from jaxgpt import interventions, plain_generate
from jaxgpt.cli.experiment_file import load_file, load_variants
from jaxgpt.config.words import replace_fields
from jaxgpt.errors import UserError
from jaxgpt.lora import LoraConfig
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.tools.convert import export_gguf, export_hf
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from jaxgpt.tools.plan.plan import make_plan
from jaxgpt.tools.replay import audit
from jaxgpt.tools.study import run_study
from jaxgpt.tools.sweep import sweep
from jaxgpt.tools.xray.live import make_page
from jaxgpt.tools.xray.xray import xray
from jaxgpt.training import fit
from tests.conftest import REPOSITORY
from tests.helpers import check_command
from tests.serve.live import serve

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
    keys = ("step", "loss", "val_loss", "learning_rate", "balance", "largest_gate", "z")
    values = [
        [[line.get(key) for key in keys] for line in read_metrics(x.directory / "metrics.jsonl")] for x in (run, again)
    ]
    assert values[0] == values[1] and {"step": 6, "saved": 6} in lines
    step = next(line for line in lines if "grad_norm" in line)
    own = type(experiment.model).__name__ == "ExpertConfig"
    assert ("balance" in step, "largest_gate" in step, "z" in step) == (
        own,
        own,
        type(experiment.objective).__name__ == "ZLoss",
    )
    if type(experiment.optim).__name__ == "LossOptim":
        assert step["learning_rate"] == pytest.approx(0.5 * step["loss"])
        assert 0 < step["update_norm"] < step["mean_norm"]
    norms = [x for name, x in step.items() if name.startswith("grad_norm/")]
    assert len(norms) > 2 and math.hypot(*norms) == pytest.approx(step["grad_norm"], rel=1e-5)


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
        run.model, run.params, tokens, [interventions.zero("mlp", 0)], read=["h_0/mlp", "h_1/attention"]
    )
    assert not np.any(edited.activations["h_0/mlp"]) and np.any(edited.activations["h_1/attention"])
    heads = [interventions.zero("heads", 0, index=1)]
    if name == "AverageConfig":
        with pytest.raises(
            UserError, match="heads, layer=0: needs one of embedding, .*, the places that AverageConfig has"
        ):
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


@pytest.mark.slow
def test_it_is_adapted(trained, tmp_path):
    """By LoRA, with jaxgpt's own dense layers as targets."""
    experiment, run, _ = trained
    targets = {"AverageConfig": ("read",), "ExpertConfig": ("q",)}.get(type(experiment.model).__name__, ("q",))
    based = replace_fields(experiment, {"train.init_from": str(run.directory), "train.steps": 2})
    lora = dataclasses.replace(based, lora=LoraConfig(rank=2, targets=targets), name="adapted")
    adapted = fit(lora, tmp_path / "adapted", progress=False)
    assert type(adapted.model.config).__name__ == type(experiment.model).__name__
    assert len(adapted.sample("1", max_new_tokens=2)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "distance", "experiment"])
def test_it_is_served(name, tmp_path):
    """By another process, to three clients at once in two slots, as `sample` writes."""
    experiment, _ = load_file(f"{FILE}:{name}")
    run = fit(experiment, tmp_path / "run", progress=False)
    prompts = ["1+1=", "23", "9+"]  # a server ends at the end of the context
    with serve(run.directory, "--slots", "2") as server, ThreadPoolExecutor(3) as pool:

        def ask(prompt: str) -> str:
            body = json.dumps({"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}).encode()
            status, _, answer = server.send("/v1/completions", body)
            assert status == 200, answer
            return json.loads(answer)["choices"][0]["text"]

        assert list(pool.map(ask, prompts)) == [run.sample(p, max_new_tokens=12, greedy=True) for p in prompts]


@pytest.mark.slow
def test_it_is_compared(tmp_path):
    variants = {
        name: replace_fields(e, {"train.steps": 2, "train.eval_every": 2})
        for name, e in load_variants(str(FILE)).items()
    }
    found = run_study(variants, tmp_path / "study", seeds=1)
    assert [row.variant for row in found.tokens.rows] == ["plain", "own"]


@pytest.mark.slow
def test_it_is_searched(tmp_path):
    """Over a field of its own, and again, from what the first search kept."""
    experiment = replace_fields(load_file(f"{FILE}:layer")[0], {"train.steps": 4})
    given = {"over": ("model.n-expert=1,2",), "trials": 2, "run_dir": str(tmp_path / "sweep")}
    found = sweep(**given, experiment=experiment)
    assert {trial.point["model.n_expert"] for trial in found.trials} == {1, 2}
    assert sweep(**given, experiment=experiment).to_json() == found.to_json()


@pytest.mark.slow
def test_how_it_is_computed_changes_nothing_but_rounding(tmp_path):
    """Recomputed, and over micro-batches, of whose balance losses the mean counts; scanned layers draw other weights."""
    experiment = replace_fields(load_file(f"{FILE}:experiment")[0], {"train.steps": 3})
    hows = {"model.remat": "full"}, {"parallel.micro_batch_size": 2}, {"model.scan_layers": True, "model.remat": "dots"}
    run, *others = (
        fit(replace_fields(experiment, how), tmp_path / str(number), progress=False)
        for number, how in enumerate(({}, *hows))
    )
    for other, tolerance in zip(others, (1e-5, 1e-3, 0.1), strict=True):
        assert other.val_loss == pytest.approx(run.val_loss, rel=tolerance)
    assert all("balance" in line for line in read_metrics(others[2].directory / "metrics.jsonl") if "loss" in line)


DEVICES = f"""
import json, sys
from jaxgpt.cli.experiment_file import load_file
from jaxgpt.training import fit
from jaxgpt.config.words import replace_fields

for name in ("layer", "experiment"):
    experiment, _ = load_file({str(FILE)!r} + ":" + name)
    losses = {{}}
    for how in (dict(strategy="single"), dict(strategy="pmap"), dict(strategy="mesh", data=1, fsdp=2), dict(strategy="mesh", data=2, micro_batch_size=1)):
        values = {{"train.steps": 2}} | {{f"parallel.{{key}}": value for key, value in how.items()}}
        run = fit(replace_fields(experiment, values), f"{{name}}-{{len(losses)}}", progress=False)
        losses[json.dumps(how)] = run.val_loss
    print(name, json.dumps(losses))
"""


@pytest.mark.slow
def test_two_devices_train_as_one(tmp_path):
    """By pmap and on a mesh, where parameters that no rule names are sharded; each device balances its own rows."""
    done = check_command("-c", DEVICES, cwd=tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    for line in done.stdout.splitlines():
        losses = line.partition(" ")[2]
        values = list(json.loads(losses).values())
        np.testing.assert_allclose(values, values[0], rtol=1e-3, err_msg=line)


# Mistakes -----------------------------------------------------------------------------------------------------------

HEAD = """
import dataclasses
import jax, jax.numpy as jnp, optax
from flax import linen as nn
from jaxgpt import *
from jaxgpt import GPTConfig, Experiment, OptimConfig, ObjectiveConfig, TrainConfig, DataConfig
config = dataclasses.dataclass(frozen=True, kw_only=True)
small = dict(block_size=8, n_layer=1, n_head=1, n_embd=8)
def of(**parts):
    return Experiment(name="x", data=DataConfig(path="text.txt"), train=TrainConfig(steps=1, batch_size=2), **parts)
"""
MISTAKES = {
    "@config\nclass Mine(GPTConfig):\n    sizes: list = []\nexperiment = of(model=Mine(**small))": "mutable default",
    "class Mine(GPTConfig):\n    experts: int = 2\nexperiment = of(model=Mine(**small))": "Mine: experts would be no fields.*@dataclasses.dataclass",
    "@config\nclass Mine(GPTConfig):\n    act: object = jnp.tanh\nexperiment = of(model=Mine(**small))": r"mine.py:\d+: Mine.act=.*experiment.json needs",
    "@config\nclass Mine(GPTConfig):\n    window: int = 8": r"mine.py:\d+: Mine.window hides GPTConfig.window\(\): give it",
    "class Sees(nn.Module):\n    @nn.compact\n    def __call__(self, x, positions=None, *, segments_BT=None, train=False):\n"
    "        return nn.Dense(8)(x.mean(axis=1, keepdims=True) + x)\n"
    "@config\nclass Mine(GPTConfig):\n    def make_attention(self, layer, compute):\n        return Sees()\n"
    "experiment = of(model=Mine(**small))": r"mine.py:\d+: Mine: Sees is not causal",
    "class Narrow(nn.Module):\n    @nn.compact\n    def __call__(self, x, *, train=False):\n        return nn.Dense(4)(x)\n"
    "@config\nclass Mine(GPTConfig):\n    def make_mlp(self, layer, compute):\n        return Narrow()\n"
    "experiment = of(model=Mine(**small))": r"mine.py:\d+: Mine: TypeError",
    "@config\nclass Mine(ObjectiveConfig):\n    def make_loss(self, model, **more):\n        return lambda params, batch, key: 1.0\n"
    "experiment = of(model=GPTConfig(**small), objective=Mine())": r"mine.py:\d+: Mine: TypeError",
    "@config\nclass Mine(OptimConfig):\n    def make_optimizer(self, steps, *, model):\n        return optax.sgd('fast')\n"
    "experiment = of(model=GPTConfig(**small), optim=Mine())": r"mine.py:13: Mine: TypeError",
    "@config\nclass Mine(DataConfig):\n    def open_dataset(self, model, *, known=None):\n        return 3\n"
    "experiment = Experiment(name='x', data=Mine())": r"mine.py:13: Mine.open_dataset: TypeError: it returns a int, and must",
}  # fmt: skip


@pytest.mark.parametrize("source", MISTAKES, ids=MISTAKES.values())
def test_a_mistake_is_one_line_and_nothing_is_written(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("hello there, world. " * 30)
    (tmp_path / "mine.py").write_text(HEAD + source)
    with pytest.raises(UserError) as found:
        experiment, _ = load_file("mine.py")
        fit(experiment, "run", progress=False)
    assert re.search(MISTAKES[source], str(found.value)) and "\n" not in str(found.value), found.value
    assert not (tmp_path / "run").exists()


# Each is finite where it is traced, and gives NaN or infinity at the first step.
FAULTS = """
class M(nn.Module):
    fault: str
    @nn.compact
    def __call__(self, x, *more, train=False, **others):
        x = nn.Dense(8)(x)
        return {"log": jnp.log(-1 - x * x), "slope": x + jnp.sqrt(0.0 * x)}[self.fault]
@config
class Model(GPTConfig):
    fault: str = ""
    at: str = "mlp"
    def make_mlp(self, layer, compute):
        return M(self.fault) if self.at == "mlp" else super().make_mlp(layer, compute)
    def make_norm(self, **more):
        return M(self.fault) if self.at == "norm" else super().make_norm(**more)
    def make_activation(self):
        return (lambda x: jnp.log(-1 - x * x)) if self.at == "activation" else super().make_activation()
@config
class Loss(ObjectiveConfig):
    in_training: bool = True
    def make_loss(self, model, **more):
        plain = super().make_loss(model)
        def loss(params, batch, key):
            nats, count, metrics = plain(params, batch, key)
            return (nats / 0.0 if (key is not None) == self.in_training else nats), count, metrics
        return loss
@config
class Optim(OptimConfig):
    def make_optimizer(self, steps, *, model):
        return optax.scale(float("nan"))
"""
NOT_FINITE = {
    "model=Model(fault='log', **small)": r"mine.py:\d+: Model gives NaN or infinity: at the first step",
    "model=Model(fault='slope', **small)": "Model gives NaN or infinity: at the first step",
    "model=GPTConfig(**small), objective=Loss()": r"mine.py:\d+: Loss gives NaN or infinity: at the first step",
    "model=GPTConfig(**small), objective=Loss(in_training=False)": "Loss gives NaN or infinity: the validation loss of the first",
    "model=GPTConfig(**small), optim=Optim()": r"mine.py:\d+: Optim gives NaN or infinity: its first update",
}  # fmt: skip


# The first by default, each of the others by `-m slow`.
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(parts, id=said, marks=pytest.mark.slow if n else ())
        for n, (parts, said) in enumerate(NOT_FINITE.items())
    ],
)
def test_a_piece_that_gives_nan_is_named_and_nothing_is_written(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("hello there, world. " * 30)
    (tmp_path / "mine.py").write_text(f"{HEAD}{FAULTS}experiment = of({parts})")
    with pytest.raises(UserError, match=NOT_FINITE[parts]):
        fit(load_file("mine.py")[0], "run", progress=False)
    assert not (tmp_path / "run").exists()
