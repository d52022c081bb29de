"""May a run be resumed: the same configuration, tokenizer and data as before, which are opened again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxgpt.config import DataConfig, Experiment, differences
from jaxgpt.data.dataset import prepare_for
from jaxgpt.data.tokenizer import IdTokenizer, fingerprint, load_tokenizer
from jaxgpt.data.tokens import Dataset
from jaxgpt.errors import UserError, shell_line
from jaxgpt.files import cache_directory, is_there
from jaxgpt.runs.find import is_run
from jaxgpt.runs.metadata import RunMetadata, load_run_tokenizer

# The fields that may differ when a run is resumed, by how their names begin. All others decide what is trained.
CHANGEABLE = (
    "name",  # a label
    # The hardware, and how it computes: rounding alone.
    *("parallel.", "train.dtype", "train.attention", "model.remat"),
    # Where the text is: its fingerprint is compared.
    *("data.path", "data.corpus"),
    # What is logged, measured and written in between. eval_every also says where a best checkpoint can be, among losses
    # that can be compared; those of other eval_tokens cannot.
    *("train.log_every", "train.eval_every", "train.sample_"),
    # What is kept, and when to give up.
    *("train.checkpoint_every", "train.keep_", "optim.max_skipped"),
)
# What is there before experiment.json is, if a run was killed in its first moment.
BEGINNINGS = re.compile(
    r"\.lock|(tokenizer|tokenizer_config|special_tokens_map|experiment)\.json(\..*)?|chat_template\.jinja|hf"
)


def is_resumable(directory: Path, fresh: bool) -> bool:
    """Return whether a run in a directory is to be resumed. Raises `UserError` for a directory of something else."""
    if is_run(directory):
        return not fresh
    if is_there(directory, "Name another place with --run-dir.") and not (
        directory.is_dir() and all(BEGINNINGS.fullmatch(path.name) for path in directory.iterdir())
    ):
        raise UserError(
            f"{directory} exists and is not a run directory (no experiment.json): name another with --run-dir"
        )
    return False


def check_same_configuration(metadata: RunMetadata, experiment: Experiment) -> None:
    """Raise `UserError` unless what decides the result is what it was: all fields but those of CHANGEABLE."""
    directory = metadata.directory
    if metadata.imported is not None:
        raise UserError(
            f"{directory} holds an imported model, not a run to go on with: name another "
            f"--run-dir, and start from this one with {shell_line('--train.init-from', directory)}"
        )
    # The experiment may be given as it was written or as `load` returns it.
    changed = min((differences(known, experiment) for known in (metadata.given, metadata.experiment)), key=len)
    changed = {name: values for name, values in changed.items() if not name.startswith(CHANGEABLE)}
    if experiment.data.tokenizer_file is not None:
        check_same_tokenizer(metadata, experiment.data.tokenizer_file)
        changed.pop("data.tokenizer", None)
    optim, steps = metadata.given.optim, metadata.given.train.steps
    if experiment.optim.warmup_steps in (None, optim.warmup(steps)):  # not named, or the same in figures
        changed.pop("optim.warmup_steps", None)
    if None not in changed.get("train.init_from", (None,)):
        del changed["train.init_from"]  # the same weights in another place, which their SHA-256 tells
    if changed:
        listed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
        raise UserError(
            f"{directory} holds a run with another configuration: {listed}. "
            "Name another directory with --run-dir, or start over with --fresh (the old run is moved aside)."
        )


def check_same_tokenizer(metadata: RunMetadata, named: str) -> None:
    """Raise `UserError` unless a file is the run's tokenizer, or was and is gone: its copy in the run directory stays.

    named: its path, or ids.
    """
    own, directory = load_run_tokenizer(metadata), metadata.directory
    if named == "ids" and isinstance(own, IdTokenizer):
        return
    gone = not is_there(Path(named), "Leave --data.tokenizer out.") and named == metadata.given.data.tokenizer
    if named == "ids" or (not gone and fingerprint(load_tokenizer(named)) != fingerprint(own)):
        raise UserError(
            f"{named} is not the tokenizer that {directory} was trained with, which is in its directory: take it by "
            + shell_line("--data.tokenizer", directory / "tokenizer.json")
        )


def reopen_dataset(metadata: RunMetadata, data: DataConfig | None = None, *, remedy: str) -> Dataset:
    """Return the dataset that a run was trained on: from its text or, where that is gone, from the cache of tokens.

    data: the run's, perhaps with its text in another place; None: the recorded one. remedy: what to do without it, as a
    clause. Raises `UserError` if it is nowhere, or is another.
    """
    data = data or metadata.experiment.data
    try:
        dataset = prepare_for(metadata.model, data, with_prefix=metadata.has_prefix, known=metadata.data)
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
    """Raise `UserError` unless a dataset is the one that a run was trained on. remedy: what to do, as a clause."""
    changed = describe_data_changes(metadata.data, dataset.fingerprint)
    if changed:
        raise UserError(f"{metadata.directory} was trained on other data: {', '.join(changed[:8])}: {remedy}")


def describe_data_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say what differs between two fingerprints: token files by name, wherever they lie now."""
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
