"""Training from pretrained weights: of all parameters, or only of adapters."""

import dataclasses
import math
import shutil

import chex
import jax
import numpy as np
import pytest
from flax import traverse_util

import jaxgpt
from jaxgpt.data.dataset import DataConfig
from jaxgpt.errors import UserError
from jaxgpt.lora import LoraConfig, init_adapters, merge_adapters
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.presets import finetune
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import read_metadata
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.tools.convert import export_hf, import_model
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from jaxgpt.tools.replay import replay
from jaxgpt.training import fit, introduction, open_training
from tests.helpers import FLOAT32_REORDERED, TINY, edit_record, make_model, stack_layers, tiny_experiment, write_params

# GPT-2's shape: learned positions, which a shorter context cuts, and biases.
MODEL = GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=8)
LORA = LoraConfig(rank=2, targets=("q", "c_fc"))


def tuning(text, source, *, lora=None, scan=False, **train):
    """An experiment whose own architecture is another one than the source's, and is to give way."""
    own = GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=4, dropout=0.1, scan_layers=scan)
    experiment = tiny_experiment(text, init_from=str(source), **train)
    return dataclasses.replace(experiment, model=own, lora=lora or LoraConfig())


@pytest.fixture(scope="module")
def source(text_file, tmp_path_factory):
    experiment = tiny_experiment(text_file, steps=60, eval_every=60, checkpoint_every=60)
    optim = dataclasses.replace(experiment.optim, learning_rate=1e-2)
    experiment = dataclasses.replace(experiment, model=MODEL, optim=optim)
    return fit(experiment, tmp_path_factory.mktemp("source") / "run", progress=False)


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory):
    return export_hf(source.directory, tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def scanned(source, tmp_path_factory):
    """The same run as one that was trained with `scan_layers`."""
    run = tmp_path_factory.mktemp("scanned") / "run"
    shutil.copytree(source.directory, run)
    edit_record(run, lambda record: record["experiment"]["model"].update(scan_layers=True))
    shutil.rmtree(run / "checkpoints")
    write_params(run, stack_layers(source.params, MODEL.n_layer), 60)
    return run


@pytest.fixture(scope="module")
def tuned(source, text_file, tmp_path_factory):
    """Adapters that were trained on top of a run."""
    experiment = tuning(text_file, source.directory, lora=LORA, keep_last=9)
    return fit(experiment, tmp_path_factory.mktemp("tuned") / "run", progress=False)


@pytest.fixture(scope="module")
def retrained(source, text_file, tmp_path_factory):
    """All parameters of a run, trained on."""
    experiment = tuning(text_file, source.directory, keep_last=9)
    return fit(experiment, tmp_path_factory.mktemp("retrained") / "run", progress=False)


def flat(params):
    return traverse_util.flatten_dict(params, sep="/")


def assert_same(found, expected):
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, strict=True, err_msg=path)


def first_state(experiment, directory):
    checked = open_training(experiment, directory, None)
    return checked.trainer, checked.restore_or_init(0)


@pytest.mark.parametrize(
    ("kind", "scan", "lora"),
    [("run", True, LORA), ("directory", False, None), pytest.param("scanned run", False, LORA, marks=pytest.mark.slow)],
)
def test_a_run_begins_as_its_source_is(source, exported, scanned, text_file, tmp_path, kind, scan, lora):
    """Bit for bit, whatever the layout of either; adapters change nothing at the start."""
    place = {"run": source.directory, "scanned run": scanned, "directory": exported}[kind]
    trainer, state = first_state(tuning(text_file, place, scan=scan, lora=lora), tmp_path)
    config = trainer.model.config
    assert (config.scan_layers, config.n_layer, config.block_size, config.dropout) == (scan, 2, 8, 0.1)
    T = {"wpe": {"embedding": source.params["wpe"]["embedding"][:8]}}
    params = flat(unstack_layers(trainer.model, trainer.merged_params(state))[1])
    assert any("lora" in path for path in params) == (lora is not None)
    assert_same({path: x for path, x in params.items() if "lora" not in path}, flat(source.params | T))


def test_the_preset_takes_the_context_of_the_weights(source, text_file, tmp_path):
    preset = dataclasses.replace(finetune(), data=DataConfig(path=str(text_file)))
    with pytest.raises(UserError, match="^finetune starts from weights: name a run or a model with --train.init-from$"):
        open_training(preset, tmp_path, None)
    started = dataclasses.replace(preset, train=dataclasses.replace(preset.train, init_from=str(source.directory)))
    session = open_training(started, tmp_path, None)
    assert session.experiment.model.block_size == 16 and "is cut to" not in "".join(introduction(session, 0))
    warm = open_training(dataclasses.replace(started, optim=OptimConfig(warmup_steps=400)), tmp_path, None)
    assert "400 is more than the run has: the warm-up takes 30" in "".join(introduction(warm, 0))


@pytest.mark.parametrize("scan", [False, True], ids=["apart", "scan"])
def test_merged_equals_unmerged(scan):
    """kernel + alpha / rank a b; that a layer computes the same beside its matrix, see test_lora."""
    _, params = make_model(TINY)
    if scan:
        params = stack_layers(params, TINY.n_layer)
    adapters = init_adapters(LORA, jax.random.key(1), params)
    rng = np.random.default_rng(0)
    adapters = flat(jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(np.float32), adapters))
    expected = flat(params)
    for path in [path for path in adapters if path.endswith("lora_a")]:
        name = path.removesuffix("lora_a")
        expected[f"{name}kernel"] += LORA.alpha / LORA.rank * (adapters[path] @ adapters[f"{name}lora_b"])
    found = merge_adapters(LORA, traverse_util.unflatten_dict(adapters, sep="/"), params)
    chex.assert_trees_all_close(flat(found), expected, **FLOAT32_REORDERED)
    assert len(adapters) == 2 * len(LORA.targets) * (1 if scan else TINY.n_layer)


def test_the_merge_is_in_float32_on_any_device():
    """Where products of float32 are rounded, in training and in what is exported alike."""
    _, params = make_model(TINY)
    adapters = jax.eval_shape(lambda params: init_adapters(LORA, jax.random.key(1), params), params)
    text = jax.jit(merge_adapters, static_argnums=0).lower(LORA, adapters, params).as_text()
    assert text.count("dot_general") == text.count("precision = [HIGHEST, HIGHEST]") == len(LORA.targets) * TINY.n_layer


@pytest.mark.slow
def test_what_is_learned_is_kept(source, tuned, tmp_path):
    """The first loss is near the source's last: with random weights it would be that of guessing. Adapters alone move."""
    first = read_metrics(tuned.directory / "metrics.jsonl")[0]["loss"]
    assert abs(first - source.val_loss) < 0.15 and math.log(source.tokenizer.vocab_size) - first > 0.3
    assert tuned.val_loss < source.val_loss
    record = read_metadata(tuned.directory)
    assert record.given.model.n_embd == 4 and record.model.n_embd == tuned.experiment.model.n_embd == 8
    full = flat(source.params)
    moved = {path for path, x in flat(tuned.params).items() if path != "wpe/embedding" and np.any(x != full[path])}
    assert moved == {f"h_{i}/{name}/kernel" for i in range(2) for name in ("attn/q", "mlp/c_fc")}
    arrays = Checkpoints(tuned.directory / "checkpoints").manifest(tuned.step)["arrays"]
    moments = [path for path in arrays["rest"] if ".mu" in path]
    assert all(len(paths) == 8 and all("lora_" in path for path in paths) for paths in (arrays["params"], moments))
    # What is exported and loaded is merged.
    out = export_hf(tuned.directory, tmp_path / "out")
    import_model(str(out), tmp_path / "back")
    assert_same(jaxgpt.load(tmp_path / "back").params, tuned.params)
    assert evaluate_run(tuned)["loss"] == pytest.approx(tuned.val_loss, rel=1e-5)
    card = (out / "README.md").read_text()
    source = tuned.experiment.train.init_from
    assert f"Starting from `{source.rpartition('/')[2]}`, by adapters of rank 2" in card and source not in card


@pytest.mark.slow
@pytest.mark.parametrize("kept", [None, "2"], ids=["all, from the start", "adapters, from step 2"])
def test_a_run_goes_on_as_if_it_had_not_stopped(request, source, text_file, tmp_path, kept):
    """And its weights may lie in another place by then. A step is replayed to the same bits."""
    whole = request.getfixturevalue("tuned" if kept else "retrained")
    shutil.copytree(whole.directory, tmp_path / "run")
    for step in (tmp_path / "run").glob("checkpoints/*"):
        if step.name != kept:
            shutil.rmtree(step)
    shutil.copytree(source.directory, tmp_path / "elsewhere")
    experiment = tuning(text_file, tmp_path / "elsewhere", lora=whole.experiment.lora, keep_last=9)
    assert_same(fit(experiment, tmp_path / "run", progress=False).params, whole.params)
    ours, theirs = (
        [(x["step"], x.get("loss"), x.get("val_loss")) for x in read_metrics(directory / "metrics.jsonl")]
        for directory in (tmp_path / "run", whole.directory)
    )
    assert ours == theirs and replay(whole.directory, 3 if kept else 1).equal


@pytest.mark.slow
def test_adapters_learn_on_int8_matrices(source, text_file, tmp_path):
    """The rounded matrices are those that are sampled from: the losses agree, also after a resume."""
    lora = dataclasses.replace(LORA, frozen="int8")
    run = fit(tuning(text_file, source.directory, lora=lora), tmp_path / "run", progress=False)
    assert evaluate_run(run)["loss"] == pytest.approx(run.val_loss, rel=1e-5)
    _, state = first_state(run.experiment, tmp_path / "other")
    kernel = state.frozen_params["h_0"]["attn"]["q"]["kernel"]
    assert kernel.dtype == np.int8 and replay(run.directory, 3).equal


@pytest.mark.slow
def test_adapters_without_their_base_are_told(source, tuned, tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(tuned.directory, run)

    def began_from_base(record):
        record["experiment"]["train"]["init_from"] = record["origin"]["directory"] = str(base)

    edit_record(run, began_from_base)
    with pytest.raises(UserError, match="the run has only adapters, for .*base: no directory at .*base"):
        jaxgpt.load(run)
    shutil.copytree(source.directory, base)
    jaxgpt.load(run)
    shutil.rmtree(base / f"checkpoints/{source.step}")
    write_params(base, jax.tree.map(lambda x: x + 1, source.params), source.step)
    with pytest.raises(UserError, match="base holds other weights than the run began from"):
        jaxgpt.load(run)
