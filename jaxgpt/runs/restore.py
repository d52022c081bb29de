"""The parameters of a run: those of one checkpoint, or the mean of several."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax

from jaxgpt.config.validate import check_count, short, to_python
from jaxgpt.errors import UserError
from jaxgpt.runs.checkpoint import CheckpointRemoved, Checkpoints, open_checkpoints
from jaxgpt.runs.metadata import RunMetadata
from jaxgpt.runs.pretrained import restore_merged_params

Restored = tuple[Any, int, float | None]  # parameters, step, validation loss in nats per token, if it is known


def restore_mean(metadata: RunMetadata, like: Any, which: str | int, average: int | None) -> Restored:
    """Read the parameters of the checkpoint `which`, or the mean of the last `average`: see `jaxgpt.load`.

    like: shapes and shardings of the parameters. Raises `UserError` for checkpoints that do not exist.
    """
    which = to_python(which)
    if which not in ("best", "last") and (isinstance(which, bool) or not isinstance(which, int)):
        raise UserError(f"which={short(which)}: needs best, last or a step")
    average = None if average is None else check_count("average", average)
    for _ in range(4):
        with contextlib.suppress(CheckpointRemoved):  # by a process that trains; the next may last until it is read
            return _restore_mean(metadata, like, which, average)
    return _restore_mean(metadata, like, which, average)


def _restore_mean(metadata: RunMetadata, like: Any, which: str | int, average: int | None) -> Restored:
    checkpoints = open_checkpoints(metadata.directory)
    try:
        step, *earlier = _choose_steps(checkpoints, metadata.directory, which, average)
        params = restore_merged_params(metadata, checkpoints, step, like)
        for count, other in enumerate(earlier, start=2):
            more = restore_merged_params(metadata, checkpoints, other, like)
            params = jax.tree.map(lambda mean, x, n=count: mean + (x - mean) / n, params, more)
        return params, step, None if earlier else checkpoints.val_loss(step)
    finally:
        checkpoints.close()


def _choose_steps(checkpoints: Checkpoints, directory: Path, which: str | int, average: int | None) -> list[int]:
    """Return the steps of the checkpoints to read, the newest first: one, or `average`."""
    if isinstance(which, int):
        step = checkpoints.latest_valid(before=which + 1)
        if step != which:
            raise UserError(
                f"which={which}: {directory} needs a good checkpoint of that step, and has {checkpoints.steps()}"
            )
    else:
        step = checkpoints.latest_valid(which if average is None else "last")
    if step is None:
        raise CheckpointRemoved(f"the checkpoints of {directory} were removed while they were read")
    steps = [step]
    while len(steps) < (average or 1):
        earlier = checkpoints.latest_valid(before=steps[-1])
        if earlier is None:
            raise UserError(
                f"average={average}: {directory} has {len(steps)} checkpoints, the last up to step {step}. Give "
                f"{len(steps)} or fewer; --train.keep-last keeps more"
            )
        steps.append(earlier)
    return steps
