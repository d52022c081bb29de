"""Repeat steps of a run: one step, to see what happened in it, or random ones, to check the run's numbers.

On CPU the same hardware, versions and strategy give the same bits (tested). Operations on GPU are not deterministic by
default: the gradient of an embedding adds rows in any order, cuDNN's backward pass may do so too, and another process
may select other kernels for matrix products. `XLA_FLAGS=--xla_gpu_deterministic_ops=true` requests deterministic ones
(not tried).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import numpy as np

from jaxgpt.config.validate import Count, Fraction, Interval, check_value
from jaxgpt.config.words import replace_fields
from jaxgpt.errors import UserError
from jaxgpt.files import Json, Say
from jaxgpt.parallel.jax_setup import device_name
from jaxgpt.parallel.trainer import fit_devices, gather_params
from jaxgpt.runs.checkpoint import CorruptCheckpoint, open_checkpoints
from jaxgpt.runs.checks import NonFiniteReport, debug_step
from jaxgpt.runs.directory import RunMetadata, find_run, installed_versions, read_metadata
from jaxgpt.runs.metrics import parse_metrics, read_metrics
from jaxgpt.train import TrainState, why_skipped
from jaxgpt.training import Training, open_training

TIMES = ("tokens_per_second", "mfu", "seconds")  # what a line says of the machine, which no audit can repeat
SHARE = 0.035  # share of a run's steps to repeat by default
MOST_PRINTED = 10  # most findings to print


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """Result of a repeated training step."""

    step: int
    start: int  # the step that the replay started after
    origin: str  # where that state is from: a checkpoint, or the seed
    loss: float  # nats per token
    grad_norm: float
    skipped: str | None  # why the step was skipped. None means that it was taken
    logged: Json | None  # the line of this step in metrics.jsonl. None if it was not logged
    equal: bool | None  # loss equal bit for bit to the logged one, or the same reason to skip. None if not logged
    findings: NonFiniteReport | None  # None if the step is finite

    def __str__(self) -> str:
        logged = "not logged" if self.logged is None else str(self.logged.get("skipped", self.logged.get("loss")))
        verdict = {True: " (the same)", False: " (different)", None: ""}[self.equal]
        found = f"""\
step {self.step}, from {self.origin}: {f"skipped, {self.skipped}" if self.skipped else "taken"}
loss           {self.loss}
logged         {logged}{verdict}
gradient norm  {self.grad_norm}"""
        return found if self.findings is None else f"{found}\n{self.findings}"


def replay(run: str | Path | None, step: int, *, say: Say = lambda text: None) -> ReplayResult:
    """Repeat one training step of a run, writing nothing.

    Args:
        run: run directory, by default the newest under runs/
        step: the step to repeat, with all steps since the newest checkpoint before it, or the seed

    Raises:
        UserError: the run, the step or its text does not exist.
    """
    directory = find_run(run)
    metadata = read_metadata(directory)
    step, steps = check_value("step", step, int), metadata.experiment.train.steps
    if not 1 <= step <= steps:
        raise UserError(f"--step {step}: give one of the steps of {directory}, 1 to {steps}")
    remedy = "to replay a step, put that text back"
    training = open_training(fit_devices(metadata.experiment), directory, metadata, remedy=remedy)
    start = training.checkpoints.latest_valid(before=step) or 0
    origin = f"the checkpoint, after step {start}" if start else "the seed"
    trainer = training.trainer
    say(f"{trainer.strategy.name}: steps {start + 1} to {step}, from {origin}")
    taken = training.take_steps(training.restore_or_init(start), start, step)
    ((_, state, metrics),) = collections.deque(taken, maxlen=1)
    findings, loss, skipped = None, float(metrics["loss"]), why_skipped(metrics)
    params = None if skipped is None else gather_params(trainer, state)  # which a skipped step leaves unchanged
    if params is not None:
        findings = debug_step(trainer, params, training.whole_batch(step, state), training.dropout_key, step)
    lines = reversed(read_metrics(directory / "metrics.jsonl"))
    logged, equal = next((x for x in lines if x["step"] == step and "val_loss" not in x), None), None
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Result of an audit."""

    run: str
    steps: int  # steps that the run has
    retaken: int  # steps repeated
    seed: int  # seed of the random draw
    tolerance: float  # relative difference that is accepted, 0 for none
    elsewhere: list[str]  # how the place where the run was started differs from here: the last bits may differ
    findings: list[str]  # what differs from what was written, by how much
    accepted: bool  # nothing differs

    def __str__(self) -> str:
        exact = f"within {self.tolerance:g}" if self.tolerance else "bit for bit"
        lines = [f"{self.run}: {'accepted' if self.accepted else 'not accepted'}"]
        lines += [f"  {finding}" for finding in self.findings[:MOST_PRINTED]]
        taken = f"{self.retaken:,} of {self.steps:,} steps repeated and compared {exact}"
        lines.append(f"{taken}: {len(self.findings):,} findings" if self.findings else taken)
        if self.elsewhere and not self.accepted:
            lines.append(f"Last bits may differ, since the run is of {'; '.join(self.elsewhere)}: see --tolerance")
        return "\n".join(lines)


class _Claims(NamedTuple):
    """The numbers that a run states for its steps."""

    steps: dict[int, Json]  # the lines of metrics.jsonl with a loss or a reason to skip
    validations: dict[int, Json]  # the lines with a validation loss
    kept: dict[int, float | None]  # the validation loss of each undamaged checkpoint


def audit(
    run: str | Path | None,
    *,
    steps: Count | None = None,
    seed: Annotated[int, Interval(ge=0, lt=2**32)] | None = None,
    data: str | None = None,
    tolerance: Fraction = 0.0,
    say: Say = lambda text: None,
) -> AuditResult:
    """Check a run's numbers by taking random steps again.

    They are compared with the log and the checkpoints, bit for bit. The SHA-256 of configuration, data and checkpoints
    are compared, and the validation losses of these steps and of the last checkpoint are measured again. A line that
    the run should have and lacks, or has and should not, is a finding too. Exit status 1: something differs.

    Args:
        run: run directory, by default the newest under runs/
        steps: most steps to repeat, which are all if the run has no more, by default 3.5% of them. One is drawn always
        seed: seed of the random draw, by default a new one each time
        data: the text, if it is elsewhere now, by default where the run read it
        tolerance: relative difference to accept, for a run of other hardware or versions. 0 accepts only equal bits

    Raises:
        UserError: the run is imported or has no checkpoint, or its configuration or data have changed or are missing.
    """
    metadata = read_metadata(find_run(run))
    experiment, total = metadata.experiment, metadata.experiment.train.steps
    if metadata.imported is not None:
        raise UserError(f"{metadata.directory} is an imported model: there is no training to audit")
    open_checkpoints(metadata.directory)  # refused without any
    if data is not None:
        experiment = replace_fields(experiment, {"data.path": data})
    remedy = "to audit it, name that text with --data"
    training = open_training(fit_devices(experiment), metadata.directory, metadata, remedy=remedy)
    claims, findings = _read_claims(training, total)
    seed = secrets.randbits(32) if seed is None else seed
    stops = _draw_steps(claims, int(SHARE * total) if steps is None else steps, seed)
    retaken = sum(stop - start for start, stop in stops.items())
    say(f"repeating {retaken:,} of {total:,} steps")
    measured: set[int] = set()
    for start, stop in sorted(stops.items()):
        findings += _retake(training, metadata, claims, start, stop, tolerance)
        measured |= {step for step in claims.validations if start < step <= stop}
    newest = max((step for step, val_loss in claims.kept.items() if val_loss is not None), default=None)
    if newest is not None and newest not in measured:
        findings += _validate(training, claims, newest, training.restore_or_init(newest), tolerance)
    here = installed_versions() | {"device": device_name()}
    there = metadata.versions | {"device": metadata.device}
    return AuditResult(
        run=str(metadata.directory),
        steps=total,
        retaken=retaken,
        seed=seed,
        tolerance=tolerance,
        elsewhere=[f"{name} {there.get(name)}, here {x}" for name, x in here.items() if there.get(name) != x],
        findings=findings,
        accepted=not findings,
    )


def _read_claims(training: Training, total: int) -> tuple[_Claims, list[str]]:
    """Return what a run claims. What cannot be true, whatever its steps give, is a finding."""
    lines, damaged = parse_metrics(training.directory / "metrics.jsonl")
    claims, findings = _Claims({}, {}, {}), [damaged] if damaged else []
    impossible = f"is in the run, which has the steps 1 to {total}"
    for line in lines:
        step, kinds = line["step"], [name for name in ("loss", "skipped", "val_loss") if name in line]
        claimed = claims.validations if kinds == ["val_loss"] else claims.steps
        if len(kinds) != 1:
            findings.append(f"step {step}: a line of the log has {' and '.join(kinds) or 'no loss'}")
        elif not 1 <= step <= total:
            findings.append(f"step {step}: {impossible}")
        elif step in claimed:
            findings.append(f"step {step}: a second line of the log has {kinds[0]}")
        else:
            claimed[step] = line
    for step in training.checkpoints.steps():
        try:
            training.checkpoints.verify(step)
        except (CorruptCheckpoint, OSError) as e:
            findings.append(str(e))
            continue
        if not 1 <= step <= total:
            findings.append(f"checkpoint {step}: {impossible}")
            continue
        claims.kept[step] = training.checkpoints.val_loss(step)
        logged = claims.validations.get(step, {}).get("val_loss")
        if claims.kept[step] != logged:
            findings.append(f"checkpoint {step}: its val_loss is {claims.kept[step]}, and {logged} in the log")
    return claims, findings


def _draw_steps(claims: _Claims, limit: int, seed: int) -> dict[int, int]:
    """Draw steps that a run states something of, in the order of a seed, as many as can be repeated in `limit` steps, or one.

    Returns:
        {step to start from, a checkpoint's or 0 for the seed: the last step to take from there}.
    """
    starts = {}
    for step in sorted({*claims.steps, *claims.validations, *claims.kept}):
        starts[step] = max(state for state in (0, *claims.kept) if state < step)
    least = min((step - start for step, start in starts.items()), default=0)
    left = max(limit, least)
    stops: dict[int, int] = {}
    for step in np.random.default_rng(seed).permutation(list(starts)).tolist():
        start = starts[step]
        cost = max(0, step - stops.get(start, start))
        if cost <= left:
            stops[start] = max(step, stops.get(start, start))
            left -= cost
    return stops


def _retake(
    training: Training, metadata: RunMetadata, claims: _Claims, start: int, stop: int, tolerance: float
) -> Iterator[str]:
    """Take the steps after `start` to `stop` again, and yield what differs from what the run states of them."""
    experiment, total = training.experiment, metadata.experiment.train.steps
    last = max((*claims.steps, *claims.validations, *claims.kept))
    state = training.restore_or_init(start)
    for step, taken, metrics in training.take_steps(state, start, stop):
        state = taken
        due = next(each for each in reversed(metadata.intervals) if each.after < step)
        why, line = why_skipped(metrics), claims.steps.get(step)
        again = {name: float(x) for name, x in metrics.items() if name != "skipped_in_a_row"}
        again["tokens"] = step * experiment.train.batch_size * experiment.model.block_size
        if line is None:
            if why is not None or step % due.log_every == 0 or step == total:
                yield f"step {step}: is not in the log"
        elif why is not None or "skipped" in line:
            claimed = line.get("skipped")
            if None in (why, claimed) or (why != claimed and not tolerance):
                yield f"step {step}: skipped is {claimed} in the run, {why} here"
        else:
            claimed = {name: value for name, value in line.items() if name not in ("step", *TIMES)}
            yield from _compare(f"step {step}: ", claimed, again, tolerance)
        if step in claims.validations:
            yield from _validate(training, claims, step, state, tolerance)
        elif (step % due.eval_every == 0 and not step == last < total) or step == total:  # where a signal ended it
            yield f"step {step}: its validation loss is not in the log"
    if stop in claims.kept:
        kept = training.restore_or_init(stop)
        yield from _compare(f"checkpoint {stop}: ", _name_arrays(kept), _name_arrays(state), tolerance)


def _name_arrays(state: TrainState) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path({"params": state.params, "opt_state": state.opt_state})
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}


def _validate(training: Training, claims: _Claims, step: int, state: TrainState, tolerance: float) -> Iterator[str]:
    """Measure the validation loss after a step, and compare it with the log or the checkpoint."""
    val_loss, val_losses = training.measure_val_loss(training.trainer.merged_params(state))
    line = claims.validations.get(step, {"val_loss": claims.kept.get(step)})
    claimed = {"val_loss": line["val_loss"], **line.get("val_losses", {})}
    return _compare(f"step {step}: ", claimed, {"val_loss": val_loss, **val_losses}, tolerance)


def _compare(what: str, claimed: Json, again: Json, tolerance: float) -> Iterator[str]:
    """Yield the names whose numbers or arrays differ, or which only one has. None stands for one that is not finite."""
    for name in sorted({*claimed, *again}):
        if name not in claimed or name not in again:
            yield f"{what}{name} is {'not ' * (name not in claimed)}in the log"
            continue
        was, now = claimed[name], again[name]
        if was is None and not math.isfinite(now):
            continue
        x, y = np.asarray(was, np.float64), np.asarray(now, np.float64)  # None becomes NaN
        distance = float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))
        if not (np.array_equal(x, y, equal_nan=True) or distance <= tolerance):
            was, now = ("an array" if x.ndim else value for value in (was, now))
            yield f"{what}{name} is {was} in the run, {now} here, {distance:.1e} apart"
