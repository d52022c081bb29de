"""Send the metrics of a run to TensorBoard, Weights & Biases or trackio. Training has no part in it.

Command     python experiments/track.py RUN --to tensorboard [--follow]             # pip install tensorboardX
            python experiments/track.py RUN --to wandb [--project mine] [--follow]  # pip install wandb
            python experiments/track.py RUN --to trackio                            # pip install trackio
            --follow reads on until the run is complete, or Ctrl-C.
Result      the scalars of RUN/metrics.jsonl, and the hyperparameters. Called again, it sends what is new: what was sent
            is kept in RUN/tracked-SERVICE.json, so a run that was killed and resumed sends each value once. TensorBoard's
            files, in RUN/tensorboard, are written anew by each call.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxgpt import UserError
from jaxgpt.runs.directory import read_metadata

SCALARS = ("loss", "val_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu")
POLL = 2.0  # seconds between two looks at the log of a run in training
# A service is (send(step, values, time in seconds since 1970), flush(), close()).
Service = tuple[Callable[[int, dict[str, float], float], Any], Callable[[], Any], Callable[[], Any]]


def open_tensorboard(directory: Path, config: dict[str, Any], project: str, name: str, key: str) -> Service:
    """Open new event files in RUN/tensorboard, in place of those of earlier calls."""
    from tensorboardX import SummaryWriter
    from tensorboardX.summary import hparams

    for old in (directory / "tensorboard").glob("events.out.tfevents.*"):
        old.unlink()
    # purge_step: a TensorBoard that has read the deleted files forgets their points.
    writer = SummaryWriter(str(directory / "tensorboard"), purge_step=0)
    for summary in hparams(config, {"loss": 0.0, "val_loss": 0.0}):
        writer.file_writer.add_summary(summary)  # add_hparams would make a second run of them

    def send(step: int, values: dict[str, float], at: float) -> None:
        for scalar, value in values.items():
            writer.add_scalar(scalar, value, step, walltime=at)

    return send, writer.flush, writer.close


def open_wandb(directory: Path, config: dict[str, Any], project: str, name: str, key: str) -> Service:
    """Create a run of W&B, or continue that of an earlier call. Its files are in ./wandb, where W&B puts them."""
    import wandb

    # This process does not train: its console, processor and memory are not those of the run.
    settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
    try:
        run = wandb.init(project=project, name=name, id=key, resume="allow", config=config, settings=settings)
    except wandb.Error as e:  # no account, or no network
        raise UserError(f"W&B: {str(e).splitlines()[0].rstrip('.')}; or set WANDB_MODE=offline") from None
    # The step is a value like others: W&B drops what is logged below its own step.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return lambda step, values, at: run.log({**values, "step": step}), lambda: None, run.finish


def open_trackio(directory: Path, config: dict[str, Any], project: str, name: str, key: str) -> Service:
    """Create a run of trackio, or continue that of an earlier call."""
    import trackio

    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}  # this process does not train
    run = trackio.init(project=project, name=f"{name}-{key}", config=config, resume="allow", **quiet)
    return lambda step, values, at: run.log(values, step=step), lambda: None, run.finish


SERVICES = {"tensorboard": open_tensorboard, "wandb": open_wandb, "trackio": open_trackio}


def iter_new_lines(path: Path, is_live: Callable[[], bool], pause: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield the undamaged lines of metrics.jsonl in order, and then those that are written later.

    A last line without its end is read when it is complete. When a run resumes, its log is replaced by one with fewer
    lines: the new file is read from its beginning, so lines may be yielded again.

    Args:
        path: of metrics.jsonl, which need not exist yet.
        is_live: asked before each look at the file; after False, that look is the last.
        pause: called between two looks.
    """
    file, at = None, 0
    while True:
        is_last = not is_live()
        if path.exists():
            with path.open("rb") as f:
                found = os.fstat(f.fileno())
                if found.st_ino != file or found.st_size < at:
                    file, at = found.st_ino, 0
                f.seek(at)
                for raw in f:
                    if not raw.endswith(b"\n"):
                        break
                    at += len(raw)
                    with contextlib.suppress(ValueError):
                        yield json.loads(raw)
        if is_last:
            return
        pause()


def flatten(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return nested fields by their names as options: {"model.n_layer": 4}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{where}{name}.")
        else:
            flat[where + name] = list(value) if isinstance(value, tuple) else value
    return flat


def track(directory: Path, to: str, *, project: str = "jaxgpt", follow: bool = False) -> int:
    """Send the scalars of metrics.jsonl and the hyperparameters. Return the number of values sent.

    A value at or below the last step that was sent is left out: a resumed run writes the same steps again.
    """
    metadata, kept = read_metadata(directory), directory / f"tracked-{to}.json"
    key, sent = secrets.token_hex(4), {}  # of the run, at the service; the last step sent, by scalar
    if to != "tensorboard" and kept.exists():
        try:
            record = json.loads(kept.read_text())
            key, sent = record["key"], {scalar: int(step) for scalar, step in record["sent"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{kept} is damaged: delete it to send everything again, to a new run") from None
    name = directory.as_posix().removeprefix("runs/")
    try:
        config = flatten(dataclasses.asdict(metadata.experiment))
        send, flush, close = SERVICES[to](directory, config, project, name, key)
    except ImportError as e:
        raise UserError(f"this needs the {e.name} package: python -m pip install {e.name}") from None
    inode, last = directory.stat().st_ino, directory / "checkpoints" / str(metadata.experiment.train.steps)

    def keep() -> None:
        if to != "tensorboard":
            kept.write_text(json.dumps({"key": key, "sent": sent}) + "\n")

    def pause() -> None:
        flush()
        keep()
        time.sleep(POLL)
        if directory.stat().st_ino != inode:
            raise UserError(f"{directory} was started over with --fresh: track it again")

    def is_live() -> bool:
        return follow and metadata.imported is None and not last.is_dir()

    count, began = 0, (directory / "experiment.json").stat().st_mtime
    now = began
    try:
        for line in iter_new_lines(directory / "metrics.jsonl", is_live, pause):
            now = began + line["seconds"] if line.get("seconds") is not None else now
            new = {x: line[x] for x in SCALARS if line.get(x) is not None and line["step"] > sent.get(x, -1)}
            if new:
                send(line["step"], new, now)
                sent.update(dict.fromkeys(new, line["step"]))
                count += len(new)
    finally:
        close()
        keep()
    return count


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Exit status 2: the user's mistake, in a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--to", choices=SERVICES, required=True)
    parser.add_argument("--project", default="jaxgpt", help="for wandb and trackio")
    parser.add_argument("--follow", action="store_true", help="read on until the run is complete, or Ctrl-C")
    options = parser.parse_args(argv)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # trackio prints on stdout, which is for results
            count = track(options.run, options.to, project=options.project, follow=options.follow)
    except UserError as e:
        parser.exit(2, f"{parser.prog}: {e}\n")
    except KeyboardInterrupt:
        parser.exit(1, "stopped; the same command sends what is new\n")
    print(f"{options.run}: {count:,} values sent to {options.to}")


if __name__ == "__main__":
    main()
