"""Repeat one training step of a run, to reproduce what was logged or find out why it was skipped."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxgpt.config.validate import check_whole
from jaxgpt.errors import UserError
from jaxgpt.runs.autopsy import NonFiniteReport, autopsy_directory, debug_step, format_report, gather_params
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.find import find_run
from jaxgpt.runs.metadata import read_metadata
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.runs.training import Training, reopen_training
from jaxgpt.train import NOT_FINITE, why_skipped


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """Result of a repeated training step."""

    step: int
    start: int  # the step whose state the replay started from
    origin: str  # where that state is from: the autopsy of the step, a checkpoint, or the seed
    loss: float  # nats per token
    grad_norm: float
    skipped: str | None  # reason; None: the step was taken
    logged: dict[str, Any] | None  # the line of this step in metrics.jsonl; None: it was not logged
    equal: bool | None  # loss equal bit for bit to the logged one, or the same reason to skip; None: not logged
    findings: NonFiniteReport | None  # None: the step is finite


def replay(run: str | Path | None, step: int, *, say: Callable[[str], None] = lambda text: None) -> ReplayResult:
    """Repeat the steps of a run up to `step`, with its configuration and data. Writes nothing.

    The replay starts from the autopsy of that step, else from the newest checkpoint before it, else from the seed.

    On CPU the same hardware and strategy give the same bits (tested). Operations on GPU are not deterministic by
    default: the gradient of an embedding adds rows in any order, cuDNN's backward pass may do so too, and another
    process may select other kernels for matrix products. `XLA_FLAGS=--xla_gpu_deterministic_ops=true` requests
    deterministic ones (not tried).

    Args:
        run: directory of the run. None means the newest under `runs/`.
        step: the step to repeat, from 1.
        say: receives a line of text with the state that the replay starts from.

    Raises:
        UserError: the run, the step or its text does not exist.
    """
    directory = find_run(run)
    metadata = read_metadata(directory)
    step, steps = check_whole("step", step), metadata.experiment.train.steps
    if not 1 <= step <= steps:
        raise UserError(f"--step {step}: needs one of the steps of {directory}, 1 to {steps}")
    training = reopen_training(metadata, remedy="to replay a step, put that text back")
    start, origin, checkpoints = _newest_state(training, step)
    training = dataclasses.replace(training, checkpoints=checkpoints)
    state = training.restore_or_init(start)
    trainer = training.trainer
    say(f"{trainer.strategy.name}: steps {start + 1} to {step}, from {origin}")
    ((_, state, metrics),) = collections.deque(training.take_steps(state, start, step), maxlen=1)
    assert int(state.step) == step
    findings = None
    # A skipped step leaves the parameters unchanged.
    if int(metrics["skipped"]) == NOT_FINITE and (params := gather_params(trainer, state)) is not None:
        findings = debug_step(trainer, params, training.whole_batch(step), training.dropout_key, step)
    skipped = why_skipped(metrics) if int(metrics["skipped"]) else None
    loss = float(metrics["loss"])
    lines = [x for x in read_metrics(directory / "metrics.jsonl") if x["step"] == step and "val_loss" not in x]
    logged, equal = lines[-1] if lines else None, None
    if logged is not None:
        equal = logged.get("loss") == loss if skipped is None else logged.get("skipped") == skipped
    return ReplayResult(
        step=step,
        start=start,
        origin=origin,
        loss=loss,
        grad_norm=float(metrics["grad_norm"]),
        skipped=skipped,
        logged=logged,
        equal=equal,
        findings=findings,
    )


def _newest_state(training: Training, step: int) -> tuple[int, str, Checkpoints]:
    """Return (the newest step before `step` with a stored state, or 0; a description; the checkpoints that hold it)."""
    kept = {
        "the state in the autopsy": Checkpoints(autopsy_directory(training.directory, step) / "state"),
        "the checkpoint": training.checkpoints,
    }
    for name, checkpoints in kept.items():
        if (newest := checkpoints.latest_valid(before=step)) is not None:
            return newest, f"{name}, after step {newest}", checkpoints
    return 0, "the seed", training.checkpoints


def format_replay(found: ReplayResult) -> str:
    """Return the result of `replay` as text."""
    logged = "not logged" if found.logged is None else str(found.logged.get("skipped", found.logged.get("loss")))
    verdict = {True: "the same", False: "different", None: ""}[found.equal]
    return "\n".join(
        [
            f"step {found.step}, from {found.origin}: {f'skipped, {found.skipped}' if found.skipped else 'taken'}",
            f"loss           {found.loss}",
            f"logged         {logged}" + (f" ({verdict})" if verdict else ""),
            f"gradient norm  {found.grad_norm}",
            *([] if found.findings is None else [format_report(found.findings)]),
        ]
    )
