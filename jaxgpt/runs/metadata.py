"""Write and read `experiment.json`, the file that makes a directory a run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxgpt.config import Experiment, GPTConfig, from_dict
from jaxgpt.config.validate import LARGEST_SIZE, check_fields, short
from jaxgpt.data.template import write_template
from jaxgpt.data.tokenizer import Tokenizer, fingerprint, load_tokenizer
from jaxgpt.errors import UserError, shell_line
from jaxgpt.files import json_sha256, read_json, write_whole

FORMAT = 2  # version of experiment.json and the run directory; raised when an older reader would misread it
OLDER = {1: "its checkpoints have no manifests, so corruption could not be detected"}  # versions not read, and why
LARGEST_METADATA = 2**24  # longest experiment.json to read, in bytes: about 100,000 token files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The pretrained weights that a run started from, named by `train.init_from`."""

    directory: str  # where they were
    step: int | None  # of the run that they come from. None: they come from a model in Hugging Face's format
    sha256: str  # see `pretrained.Weights`
    model: GPTConfig  # their architecture, with the fields that the experiment decides

    def __post_init__(self) -> None:
        """Check the fields. Raises `UserError`."""
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """The content of `experiment.json`."""

    directory: Path  # the run directory
    experiment: Experiment  # as it is trained: with the architecture of `origin`, and the run directory's tokenizer
    given: Experiment  # as the user configured it
    origin: Origin | None
    vocab_size: int
    data: dict[str, Any]  # fingerprint of the dataset
    imported: dict[str, Any] | None  # source of an imported model. None: the run was trained here
    device: str  # device kind on which the run was started
    command: str | None  # command that started the run

    @property
    def model(self) -> GPTConfig:
        """Return the architecture, with the size of the vocabulary."""
        return dataclasses.replace(self.experiment.model, vocab_size=self.vocab_size)

    @property
    def has_prefix(self) -> bool:
        """Return whether conversations and pairs begin with the tokenizer's prefix.

        An earlier version left it out; a run that it trained on such data is resumed without it.
        """
        return "prefix" in self.data or not self.experiment.data.is_packed


def write_metadata(
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
    """Write `experiment.json`, `tokenizer.json` and, for conversations, the chat template.

    Args:
        directory: the run directory.
        experiment: as the user configured it.
        tokenizer: of the run.
        data: fingerprint of the dataset. For an imported model, only that of its tokenizer.
        vocab_size: of the model.
        tokenizer_config: see `Dataset`.
        imported: source of an imported model.
        origin: the weights that the run starts from.
    """
    from jaxgpt.parallel.device import device_kind  # imports jax, which reading a run does without

    # The addresses of the other processes do not belong to the experiment: one process may resume the run.
    here = dataclasses.replace(experiment.parallel, coordinator=None, processes=None, process_id=None)
    experiment = dataclasses.replace(experiment, parallel=here)
    record = {
        "format": FORMAT,
        "experiment": dataclasses.asdict(experiment),
        "vocab_size": vocab_size,
        "data": data,
        "imported": imported,
        "origin": None if origin is None else dataclasses.asdict(origin),
        "versions": {
            "python": platform.python_version(),
            **{
                name: importlib.metadata.version(name)
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
    _write(directory, record)


def extend_metadata(directory: Path, experiment: Experiment) -> None:
    """Record that a run continues to `experiment.train.steps`, with the schedule's earlier ends in `optim.horizons`."""
    record = read_json(directory / "experiment.json", LARGEST_METADATA)
    record.pop("sha256", None)  # older versions wrote none
    record["experiment"]["train"]["steps"] = experiment.train.steps
    record["experiment"]["optim"]["horizons"] = experiment.optim.horizons
    _write(directory, record)


def _write(directory: Path, record: dict[str, Any]) -> None:
    """Write `experiment.json` with its digest on the second line, where it is easily deleted by hand."""
    sealed = {"format": FORMAT, "sha256": json_sha256(record), **record}
    write_whole(directory / "experiment.json", json.dumps(sealed, indent=2) + "\n")


def read_metadata(directory: Path) -> RunMetadata:
    """Read and check the `experiment.json` of a run directory. Raises `UserError` if it is damaged."""
    path = directory / "experiment.json"
    record = read_json(path, LARGEST_METADATA)
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
            f"{path} is not what was written: its own SHA-256 does not match. Restore a copy, or, if you have "
            'changed it yourself, delete its "sha256"'
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
    return RunMetadata(
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


def load_run_tokenizer(metadata: RunMetadata) -> Tokenizer:
    """Load the tokenizer of a run. Raises `UserError` if the run was trained with another one."""
    path = metadata.directory / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    if fingerprint(tokenizer) != metadata.data.get("tokenizer_sha256"):
        raise UserError(
            f"{path} is not the tokenizer that the run was trained with: the same ids would mean "
            "other text. Restore the file with the SHA-256 in experiment.json."
        )
    return tokenizer


def _command() -> str | None:
    """Return the command line of this process, quoted for a shell."""
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    if program is None:
        return None
    name = "jaxgpt" if program.name == "__main__.py" else program.name
    return shell_line(*(["python"] if name.endswith(".py") else []), name, *sys.argv[1:])


def _git_commit() -> str | None:
    """Return the git commit of jaxgpt, or None if it is not a checkout."""
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
