"""Find, lock, write and read a run directory. Its file `experiment.json` makes a directory a run.

Importing this module imports no jax, so that commands check their arguments at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.config.serialize import Checked, from_dict, to_dict
from jaxgpt.config.validate import NonNegativeInt, PositiveInt, Size, check_value, short, short_repr
from jaxgpt.data.corpus import service_errors
from jaxgpt.errors import UserError, reason_of, shell_line
from jaxgpt.experiment import Experiment
from jaxgpt.files import Json, is_there, json_sha256, read_json, write_whole
from jaxgpt.model import GPTConfig
from jaxgpt.runs.bucket import BEGINNINGS, Bucket, HeldElsewhere, address_of, name_of
from jaxgpt.runs.code import CodeError, digests_of, find_class, keep_code, own_code

if TYPE_CHECKING:  # 0.1 s to import
    import filelock

    from jaxgpt.data.tokenizer import Tokenizer

RUNS = Path("runs")
LOCK = ".lock"
CLAIM = ".claim"  # the lock of a run of a grid, held from before anything is compiled
STALE = 3600  # seconds without a line of metrics.jsonl, after which the holder of a lock may be gone
PATIENCE = 0.2  # seconds: `is_training` holds the lock for an instant
FORMAT = 2  # of experiment.json and the run directory, raised when an older reader would misread it
# The addresses of other processes do not belong to a record: one process may resume the run.
ALONE: Json = {"coordinator": None, "processes": None, "process_id": None}
LARGEST_METADATA = 2**24  # longest experiment.json to read, in bytes: about 100,000 token files


def is_run(directory: Path) -> bool:
    """Return whether a directory holds a run. Raises `UserError` for an address: gs://bucket/run."""
    if address_of(directory) is not None:
        raise UserError(f"{directory} is an address: a run needs a directory of this machine")
    return is_there(directory, "A run directory is needed.") and (directory / "experiment.json").exists()


def is_resumable(directory: Path, fresh: bool) -> bool:
    """Return whether to resume the run in a directory. Raises `UserError` if something else is there.

    A run that was killed before it wrote experiment.json is written anew.
    """
    if is_run(directory):
        return not fresh
    if is_there(directory, "Name another directory with --run-dir.") and not (
        directory.is_dir() and all(BEGINNINGS.fullmatch(path.name) for path in directory.iterdir())
    ):
        raise UserError(f"{directory} exists and is not a run directory: name another with --run-dir")
    return False


def fetch_run(run: str | Path) -> Path:
    """Return the directory of a run, which need not exist. For an address it is a copy, as new as the bucket."""
    address = address_of(run)
    if address is None:
        return Path(run)
    with service_errors("read", address):
        bucket = Bucket(address)
        bucket.pull()
    return bucket.directory


def find_run(run: str | Path | None) -> Path:
    """Return a run directory, by default the newest under `runs/`. Raises `UserError` if it is none."""
    check_value("run", run, str | os.PathLike | None)
    directory = None if run is None else fetch_run(run)
    if directory is not None and is_run(directory):
        return directory
    runs = sorted(d for d in RUNS.glob("*") if is_run(d))
    if directory is not None:
        why = "it has no experiment.json" if directory.is_dir() else "there is no such directory"
        known = ", ".join(map(str, runs)) or "none yet: train one with `jaxgpt train`"
        raise UserError(f"{name_of(directory)} is not a run directory: {why}. Runs here: {known}")
    if not runs:
        raise UserError(f"no run under {RUNS}/ here: train one with `jaxgpt train`, or name a run directory")
    return max(runs, key=lambda r: (r / "experiment.json").stat().st_mtime)


def lock_run(
    directory: Path, fresh: bool, doing: str = "trained", option: str = "--run-dir", name: str = LOCK
) -> filelock.BaseFileLock:
    """Create a directory if needed, and lock it until the lock is released or this process ends, even by SIGKILL.

    fresh: move an existing directory aside. name: the file of the lock, which says who holds it. Raises `HeldElsewhere`
    if another process does.
    """
    import filelock

    is_run(directory)  # which refuses an address
    path = directory / name
    lock = filelock.FileLock(path, timeout=PATIENCE)
    try:
        if directory.exists() and fresh:
            lock.acquire()
            olds = (directory.with_name(f"{directory.name}.old-{number}") for number in itertools.count(1))
            directory.rename(next(old for old in olds if not old.exists()))
            lock.release()
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n", encoding="utf-8")
    except filelock.Timeout:
        who = path.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
        remedy = f"wait for it, stop it, or name another {option}"
        written = max(file.stat().st_mtime for file in (path, directory / "metrics.jsonl") if file.exists())
        if time.time() - written > STALE:
            hours = (time.time() - written) / 3600
            remedy = f"it has written nothing for {hours:.1f} hours: if it is gone, delete {path}"
        raise HeldElsewhere(f"{name_of(directory)} is being {doing} by another process ({who}): {remedy}") from None
    except OSError as e:
        raise UserError(f"cannot write in {directory}: {reason_of(e)}. Name another directory with {option}.") from None
    return lock


def is_training(directory: Path) -> bool:
    """Return whether a process trains in a directory, perhaps a read-only one. False on Windows."""
    with contextlib.suppress(ImportError, OSError), open(directory / LOCK, "rb") as f:
        import fcntl

        try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the file is closed
        except BlockingIOError:
            return True
    return False  # it was never trained here, or there are no locks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin(Checked):
    """The pretrained weights that a run started from, named by `train.init_from`."""

    directory: str  # where the weights were
    step: int | None  # the run's step. None means a model in Hugging Face's format
    sha256: str  # SHA-256 of the weights: see `pretrained.Weights`
    model: GPTConfig  # the architecture of the weights, with the fields that the experiment decides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals(Checked):
    """The steps between logged lines and between validations, which may change on a resume."""

    after: NonNegativeInt  # steps taken when the session began
    log_every: PositiveInt
    eval_every: PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunMetadata(Checked):
    """The content of `experiment.json`."""

    directory: Path  # the run directory
    experiment: Experiment  # as it is trained: with the model of `origin`, and its own tokenizer
    given: Experiment  # as the user configured it
    origin: Origin | None  # the weights that it started from. None means random ones
    vocab_size: Size  # number of tokens
    data: dict  # fingerprint of the dataset
    imported: dict | None  # source of an imported model. None means that the run was trained here
    versions: dict  # versions of Python, jaxgpt and its packages when it was started
    device: str  # kind of device on which the run was started
    command: str | None  # command that started the run
    intervals: tuple[Intervals, ...]  # by session, where they changed; the first are in `given` too
    code: dict | None  # SHA-256 of each file of its own classes, kept in code/. None if there is none
    __repr__ = short_repr

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.given.train.init_from is None) != (self.origin is None):
            raise UserError(f"train.init_from={self.given.train.init_from}, but origin {short(self.origin)}")
        assert self.model.vocab_size == self.vocab_size  # checks the vocabulary with the architecture

    @property
    def model(self) -> GPTConfig:
        """Return the architecture, with the size of the vocabulary."""
        return dataclasses.replace(self.experiment.model, vocab_size=self.vocab_size)


def write_metadata(
    directory: Path,
    experiment: Experiment,
    tokenizer: Tokenizer,
    *,
    data: Json,
    vocab_size: int | None,
    tokenizer_config: Json | None = None,
    imported: Json | None = None,
    origin: Origin | None = None,
) -> None:
    """Write `experiment.json`, `tokenizer.json`, the code of classes that are not jaxgpt's and, for conversations, the chat template.

    `data` is the fingerprint of the dataset, or of an imported model's tokenizer. `imported` is the source of such a
    model, `origin` the weights that the run starts from. See `Dataset` for `tokenizer_config`.
    """
    from jaxgpt.data.template import write_template
    from jaxgpt.parallel.jax_setup import device_name

    alone = dataclasses.replace(experiment.parallel, **ALONE)
    program, *options = sys.argv or [""]
    name = "jaxgpt" if Path(program).name == "__main__.py" else Path(program).name
    words = ["python", name, *options] if name.endswith(".py") else [name, *options]
    record = {
        "format": FORMAT,
        "experiment": to_dict(dataclasses.replace(experiment, parallel=alone)),
        "vocab_size": vocab_size,
        "data": data,
        "imported": imported,
        "origin": None if origin is None else to_dict(origin),
        "versions": installed_versions(),
        "device": device_name(),
        "command": shell_line(*words) if name else None,
    }
    if code := own_code(experiment):
        keep_code(directory, code)
        record["code"] = digests_of(code)
    write_whole(directory / "tokenizer.json", tokenizer.to_json())
    if tokenizer_config is not None:
        write_template(directory, tokenizer_config)
    _write(directory, record)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a step computes."""
    from importlib.metadata import version  # 0.02 s, which most commands do not need

    names = ("jaxgpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def extend_metadata(metadata: RunMetadata, experiment: Experiment, after: int) -> None:
    """Record what changes when a run continues after a step: its end and its intervals, if they do.

    The end is `experiment.train.steps`, with the schedule's earlier ends in `optim.horizons`.
    """
    train, directory, last = experiment.train, metadata.directory, metadata.intervals[-1]
    now = dataclasses.replace(last, log_every=train.log_every, eval_every=train.eval_every)
    intervals = list(metadata.intervals)
    if now != last:
        intervals.append(dataclasses.replace(now, after=after))
    elif train.steps == metadata.given.train.steps:
        return
    record = read_json(directory / "experiment.json", LARGEST_METADATA)
    record.pop("sha256", None)  # older versions wrote none
    record["experiment"]["train"]["steps"] = train.steps
    record["experiment"]["optim"]["horizons"] = experiment.optim.horizons
    record["intervals"] = [dataclasses.asdict(each) for each in intervals[1:]]
    _write(directory, record)


def _write(directory: Path, record: Json) -> None:
    """Write `experiment.json`, with its digest on a line that is easily deleted by hand."""
    sealed = {"format": FORMAT, "sha256": json_sha256(record), **record}
    write_whole(directory / "experiment.json", json.dumps(sealed, indent=2) + "\n")


def read_metadata(directory: Path, *, trust_code: bool = False) -> RunMetadata:
    """Read and check the `experiment.json` of a run directory, which may come from somebody else.

    Raises `UserError` if it is damaged, or needs code that is not trusted: see `find_class`.
    """
    path = directory / "experiment.json"
    record = read_json(path, LARGEST_METADATA)
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        said = f"{path} has format {short(found)}, this jaxgpt reads {FORMAT}"
        raise UserError(f"{said}: was it written by another version?")
    digest = record.pop("sha256", None)  # older versions wrote none
    if digest is not None and digest != json_sha256(record):
        remedy = 'Restore a copy, or, if you have changed it yourself, delete its "sha256"'
        raise UserError(f"{path} is not what was written: its own SHA-256 does not match. {remedy}")
    digests = record.get("code")
    if digests is not None and not (isinstance(digests, dict) and all(isinstance(x, str) for x in digests.values())):
        raise UserError(f"{path} is damaged: code={short(digests)} must be the SHA-256 of files")
    find = functools.partial(find_class, directory=directory, digests=digests, trusted=trust_code)
    try:
        given = from_dict(Experiment, record.get("experiment"), "experiment.", find_class=find)
        experiment = given = _without_addresses(given)
        origin = record.get("origin")
        if origin is not None:
            origin = from_dict(Origin, origin, "origin.", find_class=find)
            experiment = dataclasses.replace(experiment, model=origin.model)
        if origin is not None or given.data.tokenizer_file is not None:
            own = dataclasses.replace(given.data, tokenizer=str(directory / "tokenizer.json"))
            experiment = dataclasses.replace(experiment, data=own)
        first = {"after": 0, "log_every": given.train.log_every, "eval_every": given.train.eval_every}
        return RunMetadata(
            directory=directory,
            intervals=tuple(from_dict(Intervals, x, "intervals.") for x in [first, *(record.get("intervals") or [])]),
            experiment=experiment,
            given=given,
            origin=origin,
            versions=record.get("versions") or {},
            device=str(record.get("device")),
            **{name: record.get(name) for name in ("vocab_size", "data", "imported", "command", "code")},
        )
    except CodeError:
        raise
    except UserError as e:
        raise UserError(f"{path} is damaged, or of another version: {e}") from None


def _without_addresses(experiment: Experiment) -> Experiment:
    """Return a recorded experiment without anything to connect to: see `replace_addresses`."""
    data = experiment.data
    if data.path is not None and "://" in data.path:
        from jaxgpt.data.corpus import find_copy
        from jaxgpt.data.mixture import replace_addresses

        data = dataclasses.replace(data, path=replace_addresses(data.path, find_copy))
    return dataclasses.replace(experiment, data=data, parallel=dataclasses.replace(experiment.parallel, **ALONE))


def load_run_tokenizer(metadata: RunMetadata) -> Tokenizer:
    """Load the tokenizer of a run. Raises `UserError` if the run was trained with another one."""
    from jaxgpt.data.tokenizer import fingerprint, load_tokenizer

    path = metadata.directory / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    if fingerprint(tokenizer) != metadata.data.get("tokenizer_sha256"):
        raise UserError(f"{path} is not the tokenizer that the run was trained with: restore that file")
    return tokenizer


def check_same_tokenizer(metadata: RunMetadata, named: str) -> None:
    """Raise `UserError` if a tokenizer is not the run's. A deleted file passes if it was the run's.

    named: the path of a tokenizer.json, or "ids".
    """
    from jaxgpt.data.tokenizer import IdTokenizer, fingerprint, load_tokenizer

    own, directory = load_run_tokenizer(metadata), metadata.directory
    if named == "ids" and isinstance(own, IdTokenizer):
        return
    gone = not is_there(Path(named), "Leave --data.tokenizer out.") and named == metadata.given.data.tokenizer
    if named == "ids" or (not gone and fingerprint(load_tokenizer(named)) != fingerprint(own)):
        use = shell_line("--data.tokenizer", directory / "tokenizer.json")
        raise UserError(f"{named} is not the tokenizer that {directory} was trained with. Use the run's own: {use}")
