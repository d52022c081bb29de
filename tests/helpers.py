"""Plain functions that several tests use."""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.data.dataset import DataConfig, open_data
from jaxgpt.data.pipeline import Dataset, Tokens
from jaxgpt.data.tokenizer import BPETokenizer, load_tokenizer
from jaxgpt.experiment import Experiment, TrainConfig
from jaxgpt.layers.block import Compute
from jaxgpt.model import GPT, GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.run import Run
from jaxgpt.runs.checkpoint import Checkpoints, _render
from jaxgpt.runs.directory import read_metadata, write_metadata
from jaxgpt.runs.metrics import read_metrics
from tests.conftest import REPOSITORY, SIZES, TEXT

DIMS = chex.Dimensions(**SIZES)

# float32 sums in another order: a few units in the last place of numbers near 1.
FLOAT32_REORDERED = dict(rtol=2e-5, atol=2e-5)

TINY = GPTConfig(vocab_size=SIZES["V"], block_size=8, n_layer=2, n_head=2, n_embd=8)


def make_model(config: GPTConfig, seed: int = 0, **kwargs):
    """(model, params) with random parameters everywhere, so that no bias or scale hides a mistake by being 0 or 1.

    Drawn here: to compile a model's own initialisation takes a second.
    """
    model = config.make_model(Compute(**kwargs))
    shapes = jax.eval_shape(model.init, jax.random.key(seed), jax.ShapeDtypeStruct((1, 1), jnp.int32))["params"]
    rng = np.random.default_rng(seed)

    def draw(path, x):
        middle = 1.0 if path[-1].key == "scale" and not config.norm_offset else 0.0
        return jnp.asarray(middle + 0.1 * rng.normal(size=x.shape), x.dtype)

    return model, jax.tree.map_with_path(draw, shapes)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("train", "method"))
def apply(
    model: GPT, params: dict, inputs, *, train: bool = False, key: jax.Array | None = None, method: str | None = None
):
    """`model.apply` in one compiled program: op by op a test would compile hundreds."""
    rngs = None if key is None else {"dropout": key}
    if method is not None:
        return model.apply({"params": params}, inputs, method=method)
    return model.apply({"params": params}, inputs, train=train, rngs=rngs)


def tokens_BT(config: GPTConfig, batch: int = 2, seed: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, config.block_size), 0, config.vocab_size)


def out_and_gradients(attend, q, k, v, **how):
    """What an attention gives, and the gradients of a loss of it, in one compiled program."""

    def pulled(*x):
        out, pull = jax.vjp(functools.partial(attend, **how), *x)
        return out, pull(jnp.cos(out))

    return jax.jit(pulled)(q, k, v)


def stack_layers(params: dict, n_layer: int) -> dict:
    """The parameters of a model with separate layers, as the same model with `scan_layers` has them."""
    layers = [params[f"h_{i}"] for i in range(n_layer)]
    rest = {name: value for name, value in params.items() if not name.startswith("h_")}
    return rest | {"h": {"block": jax.tree.map(lambda *x: jnp.stack(x), *layers)}}


def tiny_experiment(text: Path, **train) -> Experiment:
    """Trains in a second or two."""
    return Experiment(
        name="tiny",
        model=dataclasses.replace(TINY, vocab_size=None, n_layer=1),
        data=DataConfig(path=str(text)),
        optim=OptimConfig(warmup_steps=2),
        train=TrainConfig(
            **dict(steps=6, batch_size=4, log_every=1, eval_every=3, checkpoint_every=2, sample_tokens=12) | train
        ),
    )


def replace_fields(experiment: Experiment, **parts: dict) -> Experiment:
    """Return the experiment with other fields in its parts: optim={...}, model={...}."""
    new = {part: dataclasses.replace(getattr(experiment, part), **fields) for part, fields in parts.items()}
    return dataclasses.replace(experiment, **new)


def plant_bad_targets(patch: pytest.MonkeyPatch, bad: Iterable[int]) -> None:
    """Let these rows of all training data have a target outside the vocabulary, whose loss is NaN."""
    training_rows = Tokens.training_rows

    def poisoned(self, **options):
        rows = training_rows(self, **options)

        def row(n):
            inputs, targets = rows(n)
            return inputs, np.append(targets[:-1], np.int32(30_000)) if n in bad else targets

        return row

    patch.setattr(Tokens, "training_rows", poisoned)


def flip(path: Path, bit: int) -> None:
    """As a disk does."""
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def edit_record(run: Path, change: Callable[[dict], object]) -> None:
    """Change the experiment.json of a run by hand, which needs its digest out of it."""
    path = run / "experiment.json"
    record = json.loads(path.read_text())
    record.pop("sha256", None)
    change(record)
    path.write_text(json.dumps(record))


def edit_manifest(checkpoint: Path, change: Callable[[dict], object]) -> None:
    """Change a manifest and seal it again, as somebody who sends a run could."""
    path = checkpoint / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    path.write_text(_render(body))


def logged(run: Path) -> list[dict]:
    """What a run logs, but for its clock."""
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in clock} for line in read_metrics(run / "metrics.jsonl")]


def write_params(run: Path, params: dict, step: int) -> None:
    """Give a run a checkpoint of parameters alone."""
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save_params(params, step)
    checkpoints.close()


def sentencepiece(kind: str, texts: Sequence[str], end: str | None = "</s>") -> BPETokenizer:
    """A tokenizer that puts a space before a text, as Llama 2's (BPE, whose words hold spaces), Mistral's or T5's do."""
    import tokenizers

    specials = [] if end is None else [end]
    if kind == "T5":
        tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
        trainer = tokenizers.trainers.UnigramTrainer(vocab_size=300, special_tokens=[*specials, "?"], unk_token="?")
    else:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    if kind == "Llama 2":
        prepend, replace = tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")
        tokenizer.normalizer = tokenizers.normalizers.Sequence([prepend, replace])
    else:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=kind == "T5")
    tokenizer.train_from_iterator(texts, trainer)
    return BPETokenizer(tokenizer.to_str())


def chat_file(directory: Path) -> Path:
    """40 conversations of one to three turns, which differ in length, and all in their words."""
    path = directory / "chat.jsonl"
    with path.open("w") as f:
        for n in range(40):
            contents = [
                word for turn in range(1 + n % 3) for word in (f"{n} and {turn}?", "x" * (n % 7) + str(n + turn))
            ]
            messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
            f.write(json.dumps({"messages": messages}) + "\n")
    return path


def ids(split: Tokens) -> list[int]:
    """Return all its tokens."""
    return split.read(0, len(split)).tolist()


def recorded_run(directory: Path, config: DataConfig, dataset: Dataset, *, block_size: int) -> Run:
    """A run that says it was trained on the dataset; it has no parameters."""
    directory.mkdir()
    size = dataset.tokenizer.vocab_size
    model = GPTConfig(vocab_size=size, block_size=block_size, n_layer=1)
    experiment = Experiment(name="recorded", model=model, data=config)
    made = dict(data=dataset.fingerprint, vocab_size=size, tokenizer_config=dataset.tokenizer_config)
    write_metadata(directory, experiment, dataset.tokenizer, **made)
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    of = dict(directory=directory, experiment=experiment, tokenizer=tokenizer, step=0, val_loss=None)
    return Run(model=model.make_model(), params={}, metadata=read_metadata(directory), **of)


def byte_run(directory: Path, *, block_size: int) -> Run:
    """A run of bytes with random parameters, which are in memory alone."""
    (directory / "text.txt").write_text(TEXT * (1 + block_size // 100))
    config = DataConfig(path=str(directory / "text.txt"), tokenizer="byte")
    run = recorded_run(directory / "tiny", config, open_data(config, block_size=block_size), block_size=block_size)
    return dataclasses.replace(run, params=make_model(run.model.config)[1])


def split_by(words: str) -> dict:
    """The pre-tokenizer of a tokenizer.json that splits by a pattern, as Llama 3's does."""
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}


def begin_with(ids: dict[str, int]) -> dict:
    """Return a post-processor that puts tokens before each text."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*({"SpecialToken": {"id": token, "type_id": 0}} for token in ids), text]
    known = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ids.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, text], "special_tokens": known}


def with_words(bpe: BPETokenizer, words: str) -> BPETokenizer:
    """The same merges with other words."""
    return BPETokenizer(json.dumps(json.loads(bpe.to_json()) | {"pre_tokenizer": split_by(words)}))


def run_command(
    *argv: str, cwd: Path, deadline: float = 240.0, python: str = sys.executable, **env: str
) -> subprocess.CompletedProcess:
    """`python ARGV...` with a deadline that ends in SIGKILL (subprocess.run kills on timeout)."""
    return subprocess.run(
        [python, *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline,
    )


def check_command(*argv: str, **options) -> subprocess.CompletedProcess:
    """`run_command`, which must succeed."""
    done = run_command(*argv, **options)
    assert done.returncode == 0, done.stderr
    return done


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    """A mark for tests that are skipped without a package."""
    reason = f'{package} is not installed: pip install "jaxgpt[{extra}]"'
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def quick(names: Iterable[str], *fast: str) -> pytest.MarkDecorator:
    """Parametrise a test by `name`, of which all but the fast ones are slow."""
    marks = {name: () if name in fast else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def script(path: str):
    """A file under experiments, as a module."""
    spec = importlib.util.spec_from_file_location(path.rsplit("/", 1)[-1], REPOSITORY / "experiments" / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_pages(folder: str, *names: str) -> list:
    """Modules of a folder of experiments, imported as Python imports the modules in a program's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "experiments" / folder))
        return [importlib.import_module(name) for name in names]
