"""What makes a directory a run: `experiment.json`, and who may go on with it."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock

from jaxgpt.config import Experiment, GPTConfig, differences, from_dict, to_dict
from jaxgpt.config.validate import LARGEST_SIZE, check_types, short
from jaxgpt.data.chat.template import write_template
from jaxgpt.data.tokenizer import IdTokenizer, Tokenizer, fingerprint, load_tokenizer
from jaxgpt.data.tokens import Dataset
from jaxgpt.errors import UserError, shell_line
from jaxgpt.files import is_there, json_sha256, read_json, refuse_links_out, write_whole
from jaxgpt.parallel.device import device_kind
from jaxgpt.runs.find import is_run

FORMAT = 2  # of experiment.json and the run directory; raised when an older reader would misunderstand it
OLDER = {1: "its checkpoints have no manifests, so that damage could not be told"}  # what is no longer read, and why
LOCK = ".lock"
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
LARGEST_RECORD = 2**24  # bytes of experiment.json: a hundred thousand token files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The weights that a run began with, which `train.init_from` names."""

    directory: str  # where they were
    step: int | None  # of a run
    sha256: str  # see `init_from.Weights`
    model: GPTConfig  # theirs, with what the experiment decides

    def __post_init__(self) -> None:
        check_types(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """`experiment.json`, read."""

    directory: Path  # of the run
    experiment: Experiment  # as it is trained: with the architecture of `origin`, and the run directory's tokenizer
    given: Experiment  # as it was asked for
    origin: Origin | None
    vocab_size: int
    data: dict[str, Any]  # the dataset's fingerprint
    imported: dict[str, Any] | None  # of a model that was not trained here: where it came from
    device: str  # its kind, where the run was begun
    command: str | None  # by which it was begun

    @property
    def model(self) -> GPTConfig:
        """With the size of its vocabulary."""
        return dataclasses.replace(self.experiment.model, vocab_size=self.vocab_size)

    @property
    def prefixed(self) -> bool:
        """Whether conversations and pairs begin with the tokens that the tokenizer begins texts with.

        A run that an earlier version trained on such documents left them out, and goes on as it was trained.
        """
        return "prefix" in self.data or not self.experiment.data.is_packed


def write_record(
    directory: Path,
    experiment: Experiment,
    tokenizer: Tokenizer,
    *,
    data: dict[str, Any],
    vocab_size: int | None,
    tokenizer_config: dict[str, Any] | None = None,
    imported: dict[str, Any] | None = None,
    origin: Origin | None = None,
) -> None:
    """`experiment.json` and `tokenizer.json`: everything that decides the run, and where it was begun.

    data: the fingerprint of the dataset; of an imported model, of its tokenizer alone. tokenizer_config: of conversations,
    see `Dataset`.
    """
    # Where the other processes were is nobody's business later: the run may go on alone.
    here = dataclasses.replace(experiment.parallel, coordinator=None, processes=None, process_id=None)
    experiment = dataclasses.replace(experiment, parallel=here)
    record = {
        "format": FORMAT,
        "experiment": to_dict(experiment),
        "vocab_size": vocab_size,
        "data": data,
        "imported": imported,
        "origin": None if origin is None else to_dict(origin),
        "versions": {
            "python": platform.python_version(),
            **{
                name: metadata.version(name)
                for name in ("jaxgpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
            },
        },
        "device": device_kind(),
        "command": _command(),
        "git_commit": _git_commit(),
    }
    write_whole(directory / "tokenizer.json", tokenizer.to_json())
    if tokenizer_config is not None:
        write_template(directory, tokenizer_config)
    # Second, so that a line can be deleted by hand.
    sealed = {"format": FORMAT, "sha256": json_sha256(record), **record}
    write_whole(directory / "experiment.json", json.dumps(sealed, indent=2) + "\n")


def read_record(directory: Path) -> Record:
    path = directory / "experiment.json"
    record = read_json(path, LARGEST_RECORD)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        why = OLDER.get(found) if isinstance(found, int) else None
        why = (
            "was it written by a newer version?" if why is None else f"{why}. The jaxgpt that wrote it still reads it."
        )
        raise UserError(f"{path} has format {short(found)}, this jaxgpt reads {FORMAT}: {why}")
    digest = record.pop("sha256", None)  # older versions wrote none
    if digest is not None and digest != json_sha256(record):
        raise UserError(
            f"{path} is not what was written: its own SHA-256 does not hold. Put back a copy, or, if you have changed it "
            'yourself, delete its "sha256"'
        )
    vocab_size, data = record.get("vocab_size"), record.get("data")
    if type(vocab_size) is not int or not 1 <= vocab_size <= LARGEST_SIZE or not isinstance(data, dict):
        raise UserError(f"{path} is damaged: vocab_size={short(vocab_size)}, data={short(data)}")
    origin = None
    try:
        given = experiment = from_dict(Experiment, record.get("experiment"), "experiment.")
        if (begun := record.get("origin")) is not None:
            origin = from_dict(Origin, begun, "origin.")
            experiment = dataclasses.replace(given, model=origin.model)
        if origin is not None or given.data.tokenizer_file is not None:
            own = dataclasses.replace(given.data, tokenizer=str(directory / "tokenizer.json"))
            experiment = dataclasses.replace(experiment, data=own)
        dataclasses.replace(experiment.model, vocab_size=vocab_size)
        if (given.train.init_from is None) != (origin is None):
            raise UserError(f"train.init_from={given.train.init_from}, but origin {short(begun)}")
    except UserError as e:
        raise UserError(f"{path} is damaged, or of another version: {e}") from None
    imported = record.get("imported")
    if not isinstance(imported, dict | None):
        raise UserError(f"{path} is damaged: imported={short(imported)}")
    command = record.get("command")
    return Record(
        directory=directory,
        experiment=experiment,
        given=given,
        origin=origin,
        vocab_size=vocab_size,
        data=data,
        imported=imported,
        device=str(record.get("device")),
        command=command if isinstance(command, str) else None,
    )


def _command() -> str | None:
    """Of this process, as one would type it."""
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    if program is None:
        return None
    name = "jaxgpt" if program.name == "__main__.py" else program.name
    return shell_line(*(["python"] if name.endswith(".py") else []), name, *sys.argv[1:])


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
    if is_there(directory, "Name another place with --run-dir.") and not (
        directory.is_dir() and all(BEGINNINGS.fullmatch(path.name) for path in directory.iterdir())
    ):
        raise UserError(
            f"{directory} exists and is not a run directory (no experiment.json): name another with --run-dir"
        )
    return False


def refuse_other_configuration(directory: Path, experiment: Experiment) -> None:
    """Raise `UserError` unless what decides the result is what it was: all fields but those of CHANGEABLE."""
    record = read_record(directory)
    if record.imported is not None:
        raise UserError(
            f"{directory} holds an imported model, not a run to go on with: name another "
            f"--run-dir, and start from this one with {shell_line('--train.init-from', directory)}"
        )
    changed = {
        name: values
        for name, values in _fewest_differences(record, experiment).items()
        if not name.startswith(CHANGEABLE)
    }
    if experiment.data.tokenizer_file is not None:
        refuse_other_tokenizer(directory, record, experiment.data.tokenizer_file)
        changed.pop("data.tokenizer", None)
    optim, steps = record.given.optim, record.given.train.steps
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


def own_tokenizer(directory: Path, record: Record) -> Tokenizer:
    """Return the tokenizer in a run directory. Raises `UserError` unless it is the one that the run was trained with."""
    path = directory / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    if fingerprint(tokenizer) != record.data.get("tokenizer_sha256"):
        raise UserError(
            f"{path} is not the tokenizer that the run was trained with: its ids would mean other "
            "text. Put back the file that experiment.json names by its SHA-256."
        )
    return tokenizer


def refuse_other_tokenizer(directory: Path, record: Record, named: str) -> None:
    """Raise `UserError` unless a file is the run's tokenizer, or was and is gone: its copy in the run directory stays.

    named: its path, or ids.
    """
    own = own_tokenizer(directory, record)
    if named == "ids" and isinstance(own, IdTokenizer):
        return
    gone = not is_there(Path(named), "Leave --data.tokenizer out.") and named == record.given.data.tokenizer
    if named == "ids" or (not gone and fingerprint(load_tokenizer(named)) != fingerprint(own)):
        raise UserError(
            f"{named} is not the tokenizer that {directory} was trained with, which is in its directory: take it by "
            + shell_line("--data.tokenizer", directory / "tokenizer.json")
        )


def _fewest_differences(record: Record, experiment: Experiment) -> dict[str, tuple[Any, Any]]:
    """The same experiment may be given as it was written, or as `load` returns it."""
    return min((differences(known, experiment) for known in (record.given, record.experiment)), key=len)


def refuse_other_data(directory: Path, dataset: Dataset, remedy: str = "give the same text") -> None:
    """Raise `UserError` unless a dataset is the one that a run was trained on. remedy: what to do, as a clause."""
    changed = changed_data(read_record(directory).data, dataset.fingerprint)
    if changed:
        raise UserError(f"{directory} was trained on other data: {', '.join(changed[:8])}: {remedy}")


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


def claim(directory: Path, fresh: bool) -> filelock.BaseFileLock:
    """The directory, made if need be, and ours until the lock is released or this process ends, however it ends.

    With `fresh` what is there is moved aside. Raises `UserError` if another process trains there.
    """
    try:
        if directory.exists() and fresh:
            lock = _lock(directory)
            number = 1
            while (aside := directory.with_name(f"{directory.name}.old-{number}")).exists():
                number += 1
            directory.rename(aside)
            lock.release()
        directory.mkdir(parents=True, exist_ok=True)
        return _lock(directory)
    except OSError as e:
        raise UserError(f"cannot write in {directory}: {e.strerror}. Name another place with --run-dir.") from None


def _lock(directory: Path) -> filelock.BaseFileLock:
    refuse_links_out(directory)  # before the first byte is written there
    path = directory / LOCK
    lock = filelock.FileLock(path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        who = path.read_text(encoding="utf-8", errors="replace").strip()
        raise UserError(
            f"{directory} is being trained by another process ({who or 'unknown'}): "
            "wait for it, stop it, or name another --run-dir"
        ) from None
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    return lock
