"""What makes a directory a run: `experiment.json`, and who may go on with it."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxgpt.config import Experiment, differences, from_dict, to_dict
from jaxgpt.data.dataset import Dataset
from jaxgpt.errors import UserError
from jaxgpt.parallel.device import device_kind
from jaxgpt.paths import is_run, write_whole

FORMAT = 1  # of experiment.json; raised when an older reader would misunderstand it


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


def existing_run(directory: Path, fresh: bool) -> bool:
    if is_run(directory):
        return not fresh
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(
            f"{directory} exists and is not a run directory (no experiment.json): name another with --run-dir"
        )
    return False


def refuse_other_configuration(directory: Path, experiment: Experiment) -> None:
    """A run continues only as what it was. Hardware may change, what fits on it, and the place of the same data."""
    changed = {
        name: values
        for name, values in differences(read_record(directory).experiment, experiment).items()
        if not name.startswith("parallel.")
        and name not in ("data.path", "data.corpus", "model.remat", "optim.max_skipped")
    }
    if changed:
        listed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
        raise UserError(
            f"{directory} holds a run with another configuration: {listed}. "
            "Name another directory with --run-dir, or start over with --fresh (the old run is moved aside)."
        )


def refuse_other_data(directory: Path, dataset: Dataset) -> None:
    before = read_record(directory).data
    changed = [name for name, value in dataset.fingerprint.items() if before.get(name) != value]
    if changed:
        listed = ", ".join(
            f"{name} {str(before.get(name))[:12]} -> {str(dataset.fingerprint[name])[:12]}" for name in changed
        )
        raise UserError(
            f"{directory} was trained on other data: {listed}. Give the same text, another --run-dir, or --fresh."
        )


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
