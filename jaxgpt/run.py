"""A run directory: what is written there, and what is read back."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxgpt.checkpoint import open_checkpoints
from jaxgpt.config import Experiment, GPTConfig, from_dict, to_dict
from jaxgpt.data.corpus import read_text, user_files
from jaxgpt.data.dataset import Dataset, Tokens, prepare
from jaxgpt.data.pipeline import validation_batches
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer, start_token
from jaxgpt.errors import UserError
from jaxgpt.evaluate import mean_loss
from jaxgpt.model import GPT
from jaxgpt.parallel.device import compute_options, device_kind
from jaxgpt.parallel.single import jit_eval_step
from jaxgpt.paths import find_run, write_whole
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import generate
from jaxgpt.train import eval_step

FORMAT = 1  # of experiment.json; raised when an older reader would misunderstand it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model and all that is needed to use it."""

    directory: Path
    experiment: Experiment
    model: GPT
    params: dict
    tokenizer: Tokenizer
    step: int  # optimiser steps that made these parameters
    val_loss: float | None  # nats per token at that step, if it was measured

    def sample(
        self,
        prompt: str | list[str],
        *,
        max_new_tokens: int = 200,
        seed: int = 0,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        greedy: bool = False,
    ) -> str | list[str]:
        """What the model writes after `prompt` (without it); a list of prompts gives a list of texts.

        An empty prompt starts from the end-of-text token, a newline, or token 0, whichever the tokenizer has.
        temperature: None takes the experiment's `train.sample_temperature`. The same seed gives the same text.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if temperature is None:
            temperature = self.experiment.train.sample_temperature
        out = generate(
            self.model,
            self.params,
            [self.tokenizer.encode(p).tolist() or [start_token(self.tokenizer)[0]] for p in prompts],
            key=jax.random.key(seed),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy),
            vocab_size=self.tokenizer.vocab_size,
        )
        texts = [self.tokenizer.decode(tokens) for tokens in out.tokens]
        return texts[0] if isinstance(prompt, str) else texts


def load(run: str | Path | None = None, *, which: str = "best") -> Run:
    """The run in a directory (None: the newest under `runs/`), ready to sample on this machine.

    which: "best", the checkpoint with the lowest validation loss, or "last".
    Raises `UserError` if there is no run or no checkpoint.
    """
    if which not in ("best", "last"):
        raise UserError(f"which={which!r}: needs best or last")
    directory = find_run(run)
    record = read_record(directory)
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    experiment = record.experiment
    config = dataclasses.replace(experiment.model, vocab_size=record.vocab_size)
    model = GPT(config, **compute_options(config, experiment.train).for_model())
    checkpoints = open_checkpoints(directory)
    try:
        step = checkpoints.best() if which == "best" else checkpoints.last()
        assert step is not None
        shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), "int32"))["params"]
        params = checkpoints.restore_params(step, shapes)
        val_loss = checkpoints.val_loss(step)
    finally:
        checkpoints.close()
    return Run(
        directory=directory,
        experiment=experiment,
        model=model,
        params=params,
        tokenizer=tokenizer,
        step=step,
        val_loss=val_loss,
    )


def evaluate_run(run: Run, path: str | None = None) -> dict[str, Any]:
    """Loss of a run on its validation split, or on the whole of a text file: every token once.

    Returns loss (nats per token), perplexity, tokens, and bits_per_character (None where only token ids are known).
    """
    config, data = run.model.config, run.experiment.data
    if path is None:
        dataset = prepare(data, block_size=config.block_size, vocab_size=config.vocab_size)
        if dataset.fingerprint != read_record(run.directory).data:
            raise UserError(f"the text of {run.directory} has changed since it was trained: name one with --data FILE")
        tokens, characters = dataset.val, dataset.val_characters
    else:
        text = "".join("\n" if piece is None else piece for piece in read_text(user_files(path)))
        ids = run.tokenizer.encode(text)
        if len(ids) < 2:
            raise UserError(f"{path} has {len(ids)} tokens, needed at least 2")
        tokens, characters = Tokens([ids]), len(text)
    windows = validation_batches(tokens, block_size=config.block_size, batch_size=run.experiment.train.batch_size)
    loss, count = mean_loss(jit_eval_step(functools.partial(eval_step, model=run.model)), run.params, windows)
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "tokens": count,
        # The first token has nothing before it, so its characters are not counted either: a ratio of the whole.
        "bits_per_character": None if characters is None else loss / math.log(2) * len(tokens) / characters,
    }


def resolve_vocab(model: GPTConfig, tokenizer: Tokenizer) -> GPTConfig:
    """The model with its vocabulary known: the tokenizer's, unless a larger (padded) one was asked for."""
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    if model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}: "
            f"take {tokenizer.vocab_size} or more, or leave it out"
        )
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """`experiment.json`, read."""

    experiment: Experiment
    vocab_size: int
    data: dict[str, Any]  # the dataset's fingerprint


def write_record(directory: Path, experiment: Experiment, dataset: Dataset, vocab_size: int | None) -> None:
    """`experiment.json` and `tokenizer.json`: everything that decides the run, and where it was begun."""
    record = {
        "format": FORMAT,
        "experiment": to_dict(experiment),
        "vocab_size": vocab_size,
        "data": dataset.fingerprint,
        "versions": {
            "python": platform.python_version(),
            **{
                name: metadata.version(name)
                for name in ("jaxgpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
            },
        },
        "device": device_kind(),
        "git_commit": _git_commit(),
    }
    write_whole(directory / "tokenizer.json", dataset.tokenizer.to_json())
    write_whole(directory / "experiment.json", json.dumps(record, indent=2) + "\n")


def read_record(directory: Path) -> Record:
    path = directory / "experiment.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read: {e}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise UserError(f"{path} has format {found!r}, this jaxgpt reads {FORMAT}: was it written by a newer version?")
    vocab_size, data = record.get("vocab_size"), record.get("data")
    if not isinstance(vocab_size, int) or vocab_size < 1 or not isinstance(data, dict):
        raise UserError(f"{path} is damaged: vocab_size={vocab_size!r}, data={data!r}")
    return Record(
        experiment=from_dict(Experiment, record.get("experiment"), "experiment."),
        vocab_size=vocab_size,
        data=data,
    )


def _git_commit() -> str | None:
    """Of the checkout that jaxgpt runs from, if it is one: installed packages have none."""
    here = Path(__file__).parent
    if not (here.parent / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
