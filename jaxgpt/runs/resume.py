"""Check that a run can be resumed, with the same configuration, tokenizer and data, and reopen its data."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig, Experiment, differences
from jaxgpt.data.pipeline import Dataset
from jaxgpt.data.tokenizer import IdTokenizer, fingerprint, load_tokenizer
from jaxgpt.errors import UserError, shell_line
from jaxgpt.files import cache_directory, is_there
from jaxgpt.optim import learning_rate
from jaxgpt.runs.directory import RunMetadata, is_run, load_run_tokenizer

# Prefixes of the fields that may differ when a run is resumed. All others decide the result.
CHANGEABLE = (
    "name",  # a label
    # The hardware, and how it computes: only rounding differs.
    *("parallel.", "train.dtype", "train.attention", "model.remat"),
    # The location of the text: its fingerprint is compared instead.
    *("data.path", "data.corpus"),
    # Logging, validation and samples. eval_tokens is not among them: losses over other tokens cannot be compared, to
    # find the best checkpoint.
    *("train.log_every", "train.eval_every", "train.sample_"),
    # Which checkpoints to keep, and when to give up.
    *("train.checkpoint_every", "train.keep_", "optim.max_skipped"),
)
# Names of files in the directory of a run that was killed before it wrote experiment.json.
BEGINNINGS = re.compile(
    r"\.lock|(tokenizer|tokenizer_config|special_tokens_map|experiment)\.json(\..*)?|chat_template\.jinja|hf"
)


def is_resumable(directory: Path, fresh: bool) -> bool:
    """Return whether to resume the run in a directory. Raises `UserError` for a directory with something else in it."""
    if is_run(directory):
        return not fresh
    if is_there(directory, "Name another directory with --run-dir.") and not (
        directory.is_dir() and all(BEGINNINGS.fullmatch(path.name) for path in directory.iterdir())
    ):
        raise UserError(
            f"{directory} exists and is not a run directory (no experiment.json): name another with --run-dir"
        )
    return False


def with_horizons(metadata: RunMetadata, experiment: Experiment, *, extend: bool | None) -> Experiment:
    """Return the experiment with the schedule that the run has followed so far, if it asks for more steps.

    extend: see `jaxgpt.fit`. Raises `UserError` if it is None and the learning rate would rise again.
    """
    recorded, steps = metadata.given.optim, metadata.given.train.steps
    if experiment.optim.horizons not in ((), recorded.horizons) or experiment.train.steps < steps:
        return experiment  # refused below
    if experiment.train.steps == steps or extend is False:
        return dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, horizons=recorded.horizons))
    optim = dataclasses.replace(experiment.optim, horizons=(*recorded.horizons, steps))
    rates = [np.asarray(learning_rate(optim, experiment.train.steps)(step)) for step in (steps - 1, steps)]
    if rates[1] > rates[0] and extend is None:
        raise UserError(
            f"{metadata.directory}: its {optim.schedule} schedule ends at step {steps} with a learning rate of {rates[0]:.3g}. "
            f"With train.steps={experiment.train.steps} the rate rises to {rates[1]:.3g} there, and falls again until the new end. "
            "To continue so, add --extend (extend=True)"
        )
    return dataclasses.replace(experiment, optim=optim)


def check_same_configuration(metadata: RunMetadata, experiment: Experiment) -> None:
    """Raise `UserError` if a field that is not in CHANGEABLE differs from that of the run. More steps may be asked for."""
    directory = metadata.directory
    if metadata.imported is not None:
        raise UserError(
            f"{directory} holds an imported model, which cannot be resumed: name another "
            f"--run-dir, and start from this one with {shell_line('--train.init-from', directory)}"
        )
    # The experiment may be the one that the user configured, or the one that `load` returns.
    changed = min((differences(known, experiment) for known in (metadata.given, metadata.experiment)), key=len)
    changed = {name: values for name, values in changed.items() if not name.startswith(CHANGEABLE)}
    if experiment.data.tokenizer_file is not None:
        check_same_tokenizer(metadata, experiment.data.tokenizer_file)
        changed.pop("data.tokenizer", None)
    optim, steps = metadata.given.optim, metadata.given.train.steps
    if experiment.optim.warmup_steps in (None, optim.warmup(steps)):  # left out, or the same number
        changed.pop("optim.warmup_steps", None)
    if experiment.optim.horizons == (*optim.horizons, steps):  # see `with_horizons`
        del changed["train.steps"], changed["optim.horizons"]
    if None not in changed.get("train.init_from", (None,)):
        del changed["train.init_from"]  # another path of the same weights: `load_base` compares their SHA-256
    if changed:
        listed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
        raise UserError(
            f"{directory} holds a run with another configuration: {listed}. "
            "Name another directory with --run-dir, or start over with --fresh (the old run is moved aside)."
        )


def check_same_tokenizer(metadata: RunMetadata, named: str) -> None:
    """Raise `UserError` if a tokenizer is not the run's. A deleted file passes if the run was trained with that path.

    named: path of a tokenizer.json, or "ids".
    """
    own, directory = load_run_tokenizer(metadata), metadata.directory
    if named == "ids" and isinstance(own, IdTokenizer):
        return
    gone = not is_there(Path(named), "Leave --data.tokenizer out.") and named == metadata.given.data.tokenizer
    if named == "ids" or (not gone and fingerprint(load_tokenizer(named)) != fingerprint(own)):
        raise UserError(
            f"{named} is not the tokenizer that {directory} was trained with. Use the run's own: "
            + shell_line("--data.tokenizer", directory / "tokenizer.json")
        )


def reopen_dataset(metadata: RunMetadata, data: DataConfig | None = None, *, remedy: str) -> Dataset:
    """Return the dataset that a run was trained on, from its text or, if that is gone, from the cache of tokens.

    Raises `UserError` if neither exists, or if the data have changed.

    Args:
        metadata: of the run.
        data: the run's data configuration, perhaps with another path. None means the recorded one.
        remedy: what the user can do if the data are missing or have changed, as a clause.
    """
    data = data or metadata.experiment.data
    try:
        dataset = data.open_dataset(metadata.model, known=metadata.data)
    except UserError:
        if data.path is None or is_there(Path(data.path), "Name another text."):
            raise
        raise UserError(
            f"{metadata.directory} was trained on {data.path}, which is not there, and its tokens are not in the cache "
            f"{cache_directory() / 'tokens'}: {remedy}"
        ) from None
    check_same_data(metadata, dataset, remedy)
    return dataset


def check_same_data(metadata: RunMetadata, dataset: Dataset, remedy: str = "give the same text") -> None:
    """Raise `UserError` if a run was trained on another dataset. remedy: what the user can do, as a clause."""
    changed = describe_data_changes(metadata.data, dataset.fingerprint)
    if changed:
        raise UserError(f"{metadata.directory} was trained on other data: {', '.join(changed[:8])}: {remedy}")


def describe_data_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe the differences between two fingerprints. Token files are compared by name, not by directory."""
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
