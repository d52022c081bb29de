"""Import a model in Hugging Face's format as a run directory."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from jax.typing import DTypeLike

from jaxgpt.config import Experiment
from jaxgpt.data.tokenizer import fingerprint
from jaxgpt.errors import UserError
from jaxgpt.files import is_there
from jaxgpt.hf.params import read_params
from jaxgpt.hf.source import Source, keep_companions, open_source
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import lock_run, write_metadata


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
    write_run(
        source,
        Path(run_dir),
        imported={"from": name, "model_type": source.family.model_type},
        dtype=dtype,
        write_companions=lambda directory: keep_companions(source.directory, directory),
    )
    return source


def write_run(
    source: Source,
    directory: Path,
    *,
    imported: dict[str, str],
    dtype: DTypeLike | None,
    write_companions: Callable[[Path], None],
) -> None:
    """Write a model into a new run directory, whole or not at all.

    Args:
        source: the model.
        directory: the run directory, absent or empty.
        imported: the record of its source: "from" and "model_type".
        dtype: of the parameters. None means as stored.
        write_companions: writes what belongs to the tokenizer into the directory.

    Raises:
        UserError: the directory is not empty.
    """
    if is_there(directory, "Name another directory with --run-dir.") and (
        not directory.is_dir() or any(directory.iterdir())
    ):
        raise UserError(f"{directory} exists and is not empty: name another directory with --run-dir")
    with lock_run(directory, fresh=False):
        try:
            params = read_params(source.tensors, source.family, source.config, dtype=dtype)
            with contextlib.closing(Checkpoints(directory / "checkpoints")) as checkpoints:
                checkpoints.save_params(params, 0)
            write_companions(directory)
            write_metadata(
                directory,
                Experiment(name=_name(imported["from"]), model=source.config),
                source.tokenizer,
                data={"tokenizer_sha256": fingerprint(source.tokenizer)},
                vocab_size=source.config.vocab_size,
                imported=imported,
            )
        except BaseException:  # leave it empty for the next attempt
            shutil.rmtree(directory, ignore_errors=True)
            raise


def _name(name: str) -> str:
    """Return the name of the experiment: the last part of the path or id, with invalid characters replaced."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(name).resolve().name)[:100].strip("-") or "imported"
