"""Load experiments: built-in ones by name, others by running a Python file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxgpt.config.serialize import suggest
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import Json, is_there
from jaxgpt.presets import EXPERIMENTS, find_preset, finetune, quickstart
from jaxgpt.runs.code import run_file
from jaxgpt.runs.directory import RunMetadata, fetch_run, is_run, read_metadata


def choose_experiment(name: str, arguments: list[str]) -> tuple[Experiment, list[Callable[..., Any]]]:
    """Return the experiment that a command's options are fields of, and its callbacks. Its name leaves the arguments."""
    if arguments and not arguments[0].startswith("-"):
        return load_file(arguments.pop(0))
    metadata = resumed_run(arguments) if name == "train" else None
    if metadata is not None:
        return metadata.given, []
    if any(re.match("--train.init[-_]from", word) for word in arguments):
        return finetune(), []
    return quickstart(chat=name == "train" and any(word.endswith(".jsonl") for word in arguments)), []


def load_experiment(named: str) -> Experiment:
    """Return a built-in experiment, `experiment` of FILE.py, or NAME of FILE.py:NAME. Raises `UserError`."""
    return load_file(named)[0]


def load_file(named: str) -> tuple[Experiment, list[Callable[[Json], None]]]:
    """Return the experiment of `load_experiment`, and `callbacks` of the file: see `jaxgpt.fit`."""
    if (preset := find_preset(named)) is not None:
        return preset, []
    file, has_attribute, attribute = named.partition(".py:")
    path, name = (Path(file + ".py"), attribute) if has_attribute else (Path(named), "experiment")
    if not _is_program(path):
        known = f"a .py file that is there, or one of {', '.join(EXPERIMENTS)}, depth:N"
        raise UserError(f"no experiment {named!r}{suggest(named, EXPERIMENTS)}: give {known}")
    found = vars(run_file(path))
    experiment = found.get(name)
    if not isinstance(experiment, Experiment):
        others = [other for other, value in found.items() if isinstance(value, Experiment)]
        raise UserError(f"{path} has no `{name} = Experiment(...)`; it has {', '.join(others) or 'none'}")
    callbacks = found.get("callbacks", [])
    if not isinstance(callbacks, list | tuple) or not all(map(callable, callbacks)):
        raise UserError(f"{path}: callbacks={short(callbacks)}: needs a list of functions")
    return experiment, list(callbacks)


def load_variants(named: str) -> dict[str, Experiment]:
    """Return `variants` of a Python file: the experiments that a study compares, by name. Raises `UserError`."""
    path = Path(named)
    found = vars(run_file(path)).get("variants") if _is_program(path) else None
    is_right = isinstance(found, dict) and {*map(type, found)} == {str}
    if not is_right or not all(isinstance(one, Experiment) for one in found.values()):
        raise UserError(f"no study {named!r}: give a .py file with `variants = {{name: Experiment(...), ...}}` in it")
    return found


def _is_program(path: Path) -> bool:
    return path.suffix == ".py" and is_there(path, "Give a .py file.")


def resumed_run(argv: list[str]) -> RunMetadata | None:
    """Return the metadata of the run in --run-dir, or None if there is none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run-dir", "--run_dir", nargs="?")
    named = parser.parse_known_args(argv)[0].run_dir
    directory = fetch_run(named) if named else None
    return read_metadata(directory) if directory is not None and is_run(directory) else None
