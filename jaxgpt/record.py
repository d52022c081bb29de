"""What makes a directory a run: `experiment.json`, and who may go on with it."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxgpt.checks import short
from jaxgpt.config import LARGEST_SIZE, Experiment, differences, from_dict, to_dict
from jaxgpt.data.dataset import Dataset
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_json
from jaxgpt.parallel.device import device_kind
from jaxgpt.paths import is_run, write_whole

FORMAT = 1  # of experiment.json; raised when an older reader would misunderstand it
LARGEST_RECORD = 2**24  # bytes of experiment.json: a hundred thousand token files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """`experiment.json`, read."""

    experiment: Experiment
    vocab_size: int
    data: dict[str, Any]  # the dataset's fingerprint


def write_record(directory: Path, experiment: Experiment, dataset: Dataset, vocab_size: int | None) -> None:
    """`experiment.json` and `tokenizer.json`: everything that decides the run, and where it was begun."""
    # Where the other processes were is nobody's business later: the run may go on alone.
    here = dataclasses.replace(experiment.parallel, coordinator=None, processes=None, process_id=None)
    experiment = dataclasses.replace(experiment, parallel=here)
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
    record = read_json(path, LARGEST_RECORD)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise UserError(
            f"{path} has format {short(found)}, this jaxgpt reads {FORMAT}: was it written by a newer version?"
        )
    vocab_size, data = record.get("vocab_size"), record.get("data")
    if type(vocab_size) is not int or not 1 <= vocab_size <= LARGEST_SIZE or not isinstance(data, dict):
        raise UserError(f"{path} is damaged: vocab_size={short(vocab_size)}, data={short(data)}")
    try:
        experiment = from_dict(Experiment, record.get("experiment"), "experiment.")
        dataclasses.replace(experiment.model, vocab_size=vocab_size)
    except UserError as e:
        raise UserError(f"{path} is damaged, or of another version: {e}") from None
    return Record(experiment=experiment, vocab_size=vocab_size, data=data)


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


def existing_run(directory: Path, fresh: bool) -> bool:
    if is_run(directory):
        return not fresh
    if is_there(directory, "Name another place with --run-dir.") and (
        not directory.is_dir() or any(directory.iterdir())
    ):
        raise UserError(
            f"{directory} exists and is not a run directory (no experiment.json): name another with --run-dir"
        )
    return False


def refuse_other_configuration(directory: Path, experiment: Experiment) -> None:
    """A run continues only as what it was. Hardware may change, what fits on it, and the place of the same data."""
    changed = {
        name: values
        for name, values in differences(read_record(directory).experiment, experiment).items()
        if not name.startswith("parallel.") and name not in ("data.path", "data.corpus", "model.remat")
    }
    if changed:
        listed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
        raise UserError(
            f"{directory} holds a run with another configuration: {listed}. "
            "Name another directory with --run-dir, or start over with --fresh (the old run is moved aside)."
        )


def refuse_other_data(directory: Path, dataset: Dataset) -> None:
    changed = changed_data(read_record(directory).data, dataset.fingerprint)
    if changed:
        raise UserError(
            f"{directory} was trained on other data: {', '.join(changed[:8])}. Give the same text, another --run-dir, or --fresh."
        )


def changed_data(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two fingerprints, in words: token files by name, wherever they lie now."""
    files, files_now = before.get("files"), now.get("files")
    if isinstance(files, dict) and isinstance(files_now, dict):
        changed = [f"{name} is missing" for name in files if name not in files_now]
        changed += [f"{name} is new" for name in files_now if name not in files]
        changed += [f"{name} has changed" for name in files if name in files_now and files[name] != files_now[name]]
        if changed:
            return changed
    return [
        f"{name} {str(before.get(name))[:12]} -> {str(value)[:12]}"
        for name, value in now.items()
        if before.get(name) != value
    ]


def make_directory(directory: Path, fresh: bool) -> None:
    """An empty one, or the one that is there; with `fresh` what is there is moved aside."""
    if directory.exists() and fresh:
        number = 1
        while (aside := directory.with_name(f"{directory.name}.old-{number}")).exists():
            number += 1
        directory.rename(aside)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot make {directory}: {e.strerror}. Name another place with --run-dir.") from None
