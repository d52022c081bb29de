"""One step of a run, alone and from the state that entered it: to see again what was logged, or why it was skipped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxgpt.config.validate import check_whole
from jaxgpt.data.pipeline import training_batches
from jaxgpt.errors import UserError
from jaxgpt.in_flight import why_skipped
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.runs.autopsy import Findings, examine, params_here, state_before, table, training_batch
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.find import find_run
from jaxgpt.runs.metadata import read_metadata
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.runs.pretrained import base_of, state_at
from jaxgpt.runs.reopen import reopen_dataset
from jaxgpt.skip import NOT_FINITE
from jaxgpt.train import init_and_dropout_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayResult:
    step: int
    start: int  # the step whose state it began from
    origin: str  # of that state: the step's autopsy, a checkpoint, or the seed
    loss: float  # nats per token
    grad_norm: float
    skipped: str | None  # why; None: the step was taken
    logged: dict[str, Any] | None  # the run's own line of metrics.jsonl; None: this step was not logged
    equal: bool | None  # bit for bit with that line, or skipped for the same reason; None: not logged. See `replay`
    findings: Findings | None  # if the step is not finite


def replay(run: str | Path | None, step: int, *, say: Callable[[str], None] = lambda text: None) -> ReplayResult:
    """Take the steps of a run up to `step` again, with its own configuration and data, writing nothing.

    It begins from the autopsy of that step, else from the newest checkpoint before it, else from the seed. The same
    hardware and strategy give the same bits on CPU, which tests hold. On GPU nothing asks for deterministic operations:
    the gradient of an embedding adds rows in any order there, cuDNN's backward pass may, and another process may choose
    other kernels for its products. XLA_FLAGS=--xla_gpu_deterministic_ops=true asks for them; untried.
    say: told where it begins. Raises `UserError` for what is not there.
    """
    directory = find_run(run)
    metadata = read_metadata(directory)
    experiment = dataclasses.replace(metadata.experiment, model=metadata.model)
    step = check_whole("step", step)
    if not 1 <= step <= experiment.train.steps:
        raise UserError(f"--step {step}: needs one of the steps of {directory}, 1 to {experiment.train.steps}")
    config, train = experiment.model, experiment.train
    dataset = reopen_dataset(metadata, remedy="to replay a step, put that text back")
    trainer = make_trainer(experiment, recorded=experiment)
    strategy = trainer.strategy

    init_key, key = init_and_dropout_keys(train.seed)
    start, origin, checkpoints = _newest_before(directory, step)
    weights = None if metadata.origin is None else functools.partial(base_of, metadata)
    state = state_at(trainer, weights, init_key, checkpoints, start)
    say(f"{strategy.name}: steps {start + 1} to {step}, from {origin}")
    batches = training_batches(
        dataset.train,
        block_size=config.block_size,
        batch_size=train.batch_size,
        seed=train.seed,
        start_step=start,
        rows=strategy.local_rows(train.batch_size),
    )
    metrics: Any = None
    with contextlib.closing(batches):
        for _ in range(start, step):
            state, metrics = trainer.train_step(state, strategy.shard_batch(next(batches)), key)
            float(metrics["loss"])  # one step in flight
    assert int(state.step) == step
    findings = None
    if int(metrics["skipped"]) == NOT_FINITE:  # so the parameters after it are those before it
        findings = examine(trainer, params_here(trainer, state), training_batch(dataset, experiment, step), key, step)
    skipped = why_skipped(metrics) if int(metrics["skipped"]) else None
    loss = float(metrics["loss"])
    lines = [x for x in read_metrics(directory / "metrics.jsonl") if x["step"] == step and "val_loss" not in x]
    logged = lines[-1] if lines else None
    return ReplayResult(
        step=step,
        start=start,
        origin=origin,
        loss=loss,
        grad_norm=float(metrics["grad_norm"]),
        skipped=skipped,
        logged=logged,
        equal=None
        if logged is None
        else (logged.get("loss") == loss if skipped is None else logged.get("skipped") == skipped),
        findings=findings,
    )


def _newest_before(directory: Path, step: int) -> tuple[int, str, Checkpoints]:
    """(the newest step before `step` whose state was kept, or 0; in words where; there)."""
    places = {"the state in the autopsy": state_before(directory, step), "the checkpoint": directory / "checkpoints"}
    kept = {named: Checkpoints(place) for named, place in places.items()}
    for named, checkpoints in kept.items():
        if (newest := checkpoints.good(before=step)) is not None:
            return newest, f"{named}, after step {newest}", checkpoints
    return 0, "the seed", kept["the checkpoint"]


def format_replay(found: ReplayResult) -> str:
    """As text."""
    logged = "not logged" if found.logged is None else str(found.logged.get("skipped", found.logged.get("loss")))
    verdict = {True: "the same", False: "another value", None: ""}[found.equal]
    return "\n".join(
        [
            f"step {found.step}, from {found.origin}: {f'skipped, {found.skipped}' if found.skipped else 'taken'}",
            f"loss           {found.loss}",
            f"logged         {logged}" + (f" ({verdict})" if verdict else ""),
            f"gradient norm  {found.grad_norm}",
            *([] if found.findings is None else [table(found.findings)]),
        ]
    )
