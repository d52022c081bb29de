"""Send the metrics of a run to a service, once or until it is complete."""

from __future__ import annotations

import dataclasses
import secrets
import time
from pathlib import Path
from typing import Any, Literal

from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_json, render_json, write_whole
from jaxgpt.runs.directory import RunMetadata, read_metadata
from jaxgpt.tools.track.lines import iter_new_lines
from jaxgpt.tools.track.services import Service, TensorBoard, Trackio, Wandb

SCALARS = ("loss", "val_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu")
POLL = 2.0  # seconds between two looks at the log of a run in training
LARGEST_STATE = 2**16  # longest tracked-SERVICE.json to read, in bytes

ServiceName = Literal["tensorboard", "wandb", "trackio"]


@dataclasses.dataclass(kw_only=True)
class Tracked:
    """The steps that a service has received, in `RUN/tracked-SERVICE.json`, so that a second call sends only new ones."""

    key: str  # of the run, at the service
    sent: dict[str, int]  # the last step sent, by scalar


def track(directory: Path, to: ServiceName, *, project: str, follow: bool) -> int:
    """Send the scalars of metrics.jsonl and the hyperparameters. Return the number of values sent.

    A value at or below the last step that was sent is left out: a resumed run writes the same steps again.

    Args:
        directory: the run directory.
        to: the service.
        project: name of the project, for W&B and trackio.
        follow: read on until the run is complete.
    """
    metadata = read_metadata(directory)
    tracked = _read_tracked(directory, to)
    service, inode = _open(to, metadata, project, tracked.key), directory.stat().st_ino

    def pause() -> None:
        service.flush()
        _write_tracked(directory, to, tracked)
        time.sleep(POLL)
        if directory.stat().st_ino != inode:
            raise UserError(f"{directory} was started over with --fresh: track it again")

    last = directory / "checkpoints" / str(metadata.experiment.train.steps)

    def is_live() -> bool:
        return follow and metadata.imported is None and not last.is_dir()

    count, began = 0, (directory / "experiment.json").stat().st_mtime
    now = began
    try:
        for line in iter_new_lines(directory / "metrics.jsonl", is_live, pause):
            now = began + line["seconds"] if line.get("seconds") is not None else now
            new = {x: line[x] for x in SCALARS if line.get(x) is not None and line["step"] > tracked.sent.get(x, -1)}
            if new:
                service.write(line["step"], new, now)
                tracked.sent.update(dict.fromkeys(new, line["step"]))
                count += len(new)
    finally:
        service.close()
    _write_tracked(directory, to, tracked)
    return count


def _open(to: ServiceName, metadata: RunMetadata, project: str, key: str) -> Service:
    """Return the service, with the hyperparameters sent."""
    directory, config = metadata.directory, _flatten(dataclasses.asdict(metadata.experiment))
    if to == "tensorboard":
        return TensorBoard(directory, config)
    name = directory.as_posix().removeprefix("runs/")
    kind = Wandb if to == "wandb" else Trackio
    return kind(config, project=project, name=name, key=key)


def _flatten(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return nested fields by their names as options: {"model.n_layer": 4}."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{where}{name}.")
        else:
            flat[where + name] = list(value) if isinstance(value, tuple) else value
    return flat


def _read_tracked(directory: Path, to: ServiceName) -> Tracked:
    """Return what earlier calls have sent. Raises `UserError` if the file is damaged."""
    path = directory / f"tracked-{to}.json"
    if to == "tensorboard" or not is_there(path, "It holds what was sent."):
        return Tracked(key=secrets.token_hex(4), sent={})
    match read_json(path, LARGEST_STATE):
        case {"key": str(key), "sent": dict(sent)} if all(type(step) is int for step in sent.values()):
            return Tracked(key=key, sent=sent)
    raise UserError(f"{path} is damaged: delete it to send everything again, to a new run")


def _write_tracked(directory: Path, to: ServiceName, tracked: Tracked) -> None:
    """Write what was sent, except to TensorBoard, whose files are written anew."""
    if to != "tensorboard":
        write_whole(directory / f"tracked-{to}.json", render_json(dataclasses.asdict(tracked)) + "\n")
