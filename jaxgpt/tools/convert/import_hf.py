"""Import a model in Hugging Face's format as a run directory."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from jax.typing import DTypeLike

from jaxgpt.config import Experiment
from jaxgpt.data.tokenizer import fingerprint
from jaxgpt.errors import UserError
from jaxgpt.files import is_there
from jaxgpt.hf.params import read_params
from jaxgpt.hf.source import Source, keep_companions, open_source
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.lock import lock_run
from jaxgpt.runs.metadata import write_metadata


def import_hf(
    name: str, run_dir: str | Path, *, dtype: DTypeLike | None = None, tokenizer: str | None = None
) -> Source:
    """Write a model into a new run directory, for sampling, evaluation and export.

    Holds the model and one more tensor in memory.

    Args:
        name: directory of the model, or its id on the Hub.
        run_dir: the run directory, absent or empty.
        dtype: of the parameters. None means as stored.
        tokenizer: path of another tokenizer.json, or "ids" for none. None means the one in the directory.

    Raises:
        UserError: the model cannot be read, or `run_dir` is not empty. Nothing is written then.
    """
    source = open_source(name, tokenizer)
    directory = Path(run_dir)
    if is_there(directory, "Name another directory with --run-dir.") and (
        not directory.is_dir() or any(directory.iterdir())
    ):
        raise UserError(f"{directory} exists and is not empty: name another directory with --run-dir")
    with lock_run(directory, fresh=False):
        try:
            _write(source, directory, name, dtype)
        except BaseException:  # leave it empty for the next attempt
            shutil.rmtree(directory, ignore_errors=True)
            raise
    return source


def _write(source: Source, directory: Path, name: str, dtype: DTypeLike | None) -> None:
    params = read_params(source.tensors, source.family, source.config, dtype=dtype)
    with contextlib.closing(Checkpoints(directory / "checkpoints")) as checkpoints:
        checkpoints.save_params(params, 0)
    keep_companions(source.directory, directory)
    write_metadata(
        directory,
        Experiment(name=_name(name), model=source.config),
        source.tokenizer,
        data={"tokenizer_sha256": fingerprint(source.tokenizer)},
        vocab_size=source.config.vocab_size,
        imported={"from": name, "model_type": source.family.model_type},
    )


def _name(name: str) -> str:
    """Return the name of the experiment: the last part of the path or id, with invalid characters replaced."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(name).resolve().name)[:100].strip("-") or "imported"
