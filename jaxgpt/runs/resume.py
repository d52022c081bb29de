"""Check an experiment and its data against the run that it resumes: only some fields may differ."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from jaxgpt.config.serialize import differences
from jaxgpt.data.corpus import fetch
from jaxgpt.data.dataset import DataConfig
from jaxgpt.data.mixture import recorded_sources, replace_addresses
from jaxgpt.data.pipeline import Dataset
from jaxgpt.errors import UserError, shell_line
from jaxgpt.experiment import Experiment
from jaxgpt.files import Json, cache_directory, is_there
from jaxgpt.runs.directory import RunMetadata, check_same_tokenizer

# Prefixes of the fields that may differ when a run is resumed. All others decide the result.
CHANGEABLE = (
    "name",  # a label
    # The hardware, and how it computes: only rounding differs.
    *("parallel.", "train.dtype", "train.attention", "model.remat", "optim.muon_dtype"),
    # The location of the text: its fingerprint is compared instead.
    *("data.path", "data.corpus"),
    # Logging, validation and samples, but for eval_tokens: losses over other tokens do not compare.
    *("train.log_", "train.profile", "train.eval_every", "train.sample_"),
    # Which checkpoints to keep, and when to give up.
    *("train.checkpoint_every", "train.keep_", "optim.max_skipped"),
)


def with_horizons(metadata: RunMetadata, experiment: Experiment, *, extend: bool | None) -> Experiment:
    """Return the experiment with the schedule that the run has followed, if it asks for more steps: see `jaxgpt.fit`."""
    recorded, steps = metadata.given.optim, metadata.given.train.steps
    if experiment.optim.horizons not in ((), recorded.horizons) or experiment.train.steps < steps:
        return experiment  # refused below
    if experiment.train.steps == steps or extend is False:
        return dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, horizons=recorded.horizons))
    optim = dataclasses.replace(experiment.optim, horizons=(*recorded.horizons, steps))
    before, after = (np.asarray(optim.make_schedule(experiment.train.steps)(step)) for step in (steps - 1, steps))
    if after > before and extend is None:
        said = f"its learning rate would rise from {before:.3g} to {after:.3g} at step {steps}"
        raise UserError(f"{metadata.directory}: {said}: to continue so, add --extend (extend=True)")
    return dataclasses.replace(experiment, optim=optim)


def check_same_configuration(metadata: RunMetadata, experiment: Experiment) -> None:
    """Raise `UserError` if a field outside CHANGEABLE differs from the run's, but for more steps."""
    directory = metadata.directory
    if metadata.imported is not None:
        start = f"start another run with {shell_line('--train.init-from', directory)}"
        raise UserError(f"{directory} holds an imported model, which cannot be resumed: {start}")
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
        del changed["train.init_from"]  # another path of the same weights, as `load_base` checks
    if changed:
        listed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
        remedy = "Name another --run-dir, or start over with --fresh (the old run is moved aside)"
        raise UserError(f"{directory} holds a run with another configuration: {listed}. {remedy}")


def reopen_dataset(metadata: RunMetadata, data: DataConfig | None = None, *, remedy: str) -> Dataset:
    """Return the dataset of a run, from its text or, if that is gone, from the cache of tokens.

    Raises `UserError`, ending with `remedy`, if neither exists, or if the data have changed. data: the
    configuration of the run, perhaps with another path.
    """
    data = data or metadata.experiment.data
    data = dataclasses.replace(data, path=replace_addresses(data.path, fetch))  # the user's
    try:
        dataset = data.open_dataset(metadata.model, known=metadata.data)
    except UserError:
        if data.path is None or ":" in data.path or is_there(Path(data.path), "Name another text."):
            raise
        lost = f"{data.path}, which is neither there nor in the cache {cache_directory() / 'tokens'}"
        raise UserError(f"{metadata.directory} was trained on {lost}: {remedy}") from None
    if changed := describe_data_changes(metadata.data, dataset.fingerprint):
        raise UserError(f"{metadata.directory} was trained on other data: {', '.join(changed[:8])}: {remedy}")
    return dataset


def describe_data_changes(before: Json, now: Json) -> list[str]:
    """Describe the differences between two fingerprints. Token files are compared by name."""
    sources, sources_now = recorded_sources(before), recorded_sources(now)
    if len(sources) != len(sources_now):
        return [f"{len(sources) or 1} -> {len(sources_now) or 1} sources"]
    if sources:
        both = enumerate(zip(sources, sources_now, strict=True), 1)
        return [f"source {n}: {change}" for n, (old, new) in both for change in describe_data_changes(old, new)]
    files, files_now = before.get("files"), now.get("files")
    if isinstance(files, dict) and isinstance(files_now, dict) and files != files_now:
        changed = [name for name in sorted({**files, **files_now}) if files.get(name) != files_now.get(name)]
        words = {(True, False): "is missing", (False, True): "is new", (True, True): "has changed"}
        return [f"{name} {words[name in files, name in files_now]}" for name in changed]
    changed = [name for name, value in now.items() if before.get(name) != value]
    return [f"{name} {str(before.get(name))[:12]} -> {str(now[name])[:12]}" for name in changed]
