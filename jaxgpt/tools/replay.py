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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from jaxgpt.config.validate import Count, Fraction, Interval, check_count, check_value
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, parse_json, render_json
from jaxgpt.parallel.jax_setup import first_device
from jaxgpt.parallel.trainer import fit_devices, gather_params
from jaxgpt.runs.autopsy import NonFiniteReport, debug_step, format_report
from jaxgpt.runs.checkpoint import CorruptCheckpoint, open_checkpoints
from jaxgpt.runs.directory import find_run, installed_versions, read_metadata
from jaxgpt.runs.metrics import parse_metrics, read_metrics
from jaxgpt.train import Metrics, TrainState, why_skipped
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
    logged: dict[str, Any] | None  # the line of this step in metrics.jsonl. None if it was not logged
    equal: bool | None  # loss equal bit for bit to the logged one, or the same reason to skip. None if not logged
    findings: NonFiniteReport | None  # None if the step is finite

    def to_json(self) -> dict[str, Any]:
        """Return the fields. A number that is not finite is a word, such as "nan"."""
        return parse_json(render_json(dataclasses.asdict(self), not_finite=str), "the replay")

    def __str__(self) -> str:
        logged = "not logged" if self.logged is None else str(self.logged.get("skipped", self.logged.get("loss")))
        verdict = {True: " (the same)", False: " (different)", None: ""}[self.equal]
        found = f"""\
step {self.step}, from {self.origin}: {f"skipped, {self.skipped}" if self.skipped else "taken"}
loss           {self.loss}
logged         {logged}{verdict}
gradient norm  {self.grad_norm}"""
        return found if self.findings is None else f"{found}\n{format_report(self.findings)}"


def replay(run: str | Path | None, step: int, *, say: Callable[[str], None] = lambda text: None) -> ReplayResult:
    """Repeat one training step of a run, writing nothing.

    Args:
        run: run directory, by default the newest under runs/
        step: the step to repeat, with all steps since the newest checkpoint before it, or the seed
        say: receives a line of text with the state that the replay starts from.

    Raises:
        UserError: the run, the step or its text does not exist.
    """
    directory = find_run(run)
    metadata = read_metadata(directory)
    step, steps = check_value("step", step, int), metadata.experiment.train.steps
    if not 1 <= step <= steps:
        raise UserError(f"--step {step}: needs one of the steps of {directory}, 1 to {steps}")
    remedy = "to replay a step, put that text back"
    training = open_training(fit_devices(metadata.experiment), directory, metadata, remedy=remedy)
    start = training.checkpoints.latest_valid(before=step) or 0
    origin = f"the checkpoint, after step {start}" if start else "the seed"
    trainer = training.trainer
    say(f"{trainer.strategy.name}: steps {start + 1} to {step}, from {origin}")
    taken = training.take_steps(training.restore_or_init(start), start, step)
    ((_, state, metrics),) = collections.deque(taken, maxlen=1)
    findings, loss, skipped = None, float(metrics["loss"]), why_skipped(metrics)
    # A skipped step leaves the parameters unchanged.
    if skipped is not None and (params := gather_params(trainer, state)) is not None:
        findings = debug_step(trainer, params, training.whole_batch(step, state), training.dropout_key, step)
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


@dataclasses.dataclass(kw_only=True)
class AuditResult:
    """Result of an audit."""

    run: str
    tolerance: float  # relative difference that is accepted, 0 for none
    steps: int  # steps that the run has
    seed: int  # seed of the random draw
    elsewhere: list[str]  # how the place where the run was started differs from here: the last bits may differ
    findings: list[str] = dataclasses.field(default_factory=list)  # what differs from what was written, by how much
    retaken: int = 0  # steps repeated
    compared_steps: int = 0  # lines of the log
    compared_checkpoints: int = 0
    compared_validations: int = 0
    verified_checkpoints: int = 0  # checkpoints with files that have their SHA-256

    @property
    def accepted(self) -> bool:
        """Return whether nothing differs."""
        return not self.findings

    @property
    def is_whole(self) -> bool:
        """Return whether every step was repeated."""
        return self.retaken == self.steps

    def compare(self, what: str, claimed: Any, again: Any) -> None:
        """Add a finding unless two numbers or arrays are equal. A number that is not finite is written as None."""
        if claimed is None:
            equal, by = not math.isfinite(again), ""
        else:
            x, y = np.asarray(claimed, np.float64), np.asarray(again, np.float64)
            distance = float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))
            equal = np.array_equal(x, y, equal_nan=True) or distance <= self.tolerance
            by = f", {distance:.1e} apart"
        if not equal:
            was, now = ("an array" if isinstance(value, np.ndarray) else value for value in (claimed, again))
            self.findings.append(f"{what} is {was} in the run, {now} here{by}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the verdict."""
        return dataclasses.asdict(self) | {"accepted": self.accepted, "is_whole": self.is_whole}

    def __str__(self) -> str:
        more = len(self.findings) - MOST_PRINTED
        exact = f"within {self.tolerance:g}" if self.tolerance else "bit for bit"
        lines = [
            f"{self.run}: {'accepted' if self.accepted else 'not accepted'}",
            *(f"  {finding}" for finding in self.findings[:MOST_PRINTED]),
            *([f"  and {more:,} more"] if more > 0 else []),
            f"{self.retaken:,} of {self.steps:,} steps re-taken and compared {exact}: {self.compared_steps:,} lines of "
            f"the log, {self.compared_checkpoints:,} checkpoints, {self.compared_validations} validation losses; "
            f"{self.verified_checkpoints:,} checkpoints, configuration and data have their SHA-256",
        ]
        if self.accepted and self.is_whole:
            lines.append(f"Every step was re-taken and is right, {exact}.")
        if not self.accepted and self.elsewhere:
            lines.append(
                f"The run was computed elsewhere ({'; '.join(self.elsewhere)}), where the last bits may differ: "
                "--tolerance 1e-3 accepts that"
            )
        return "\n".join(lines)


def audit(
    run: str | Path | None,
    *,
    steps: Count | None = None,
    seed: Annotated[int, Interval(ge=0, lt=2**32)] | None = None,
    data: str | None = None,
    tolerance: Fraction = 0.0,
    say: Callable[[str], None] = lambda text: None,
) -> AuditResult:
    """Check a run's numbers by taking random steps again.

    They are compared with the log and the checkpoints, bit for bit. The SHA-256 of configuration, data and checkpoints
    are compared, and the validation losses of these steps and of the last checkpoint are measured again. A line that
    the run should have and lacks, or has and should not, is a finding too. Exit status 1: something differs.

    Args:
        run: run directory, by default the newest under runs/
        steps: most steps to repeat, which are all if the run has no more, by default 3.5% of them
        seed: seed of the random draw, by default a new one each time
        data: the text, if it is elsewhere now, by default where the run read it
        tolerance: relative difference to accept, for a run of other hardware or versions. 0 accepts only equal bits
        say: receives a line of text before steps are repeated.

    Raises:
        UserError: the run is imported or has no checkpoint, or its configuration or data have changed or are missing.
    """
    metadata = read_metadata(find_run(run))
    config, total = metadata.experiment.data, metadata.experiment.train.steps
    left = int(SHARE * total) if steps is None else check_count("steps", steps)
    seed = secrets.randbits(32) if seed is None else check_value("seed", seed, int)
    if metadata.imported is not None:
        raise UserError(f"{metadata.directory} is an imported model: there is no training to audit")
    open_checkpoints(metadata.directory)  # refused without any
    if data is not None:
        if not is_there(Path(data), "Name another text with --data."):
            raise UserError(f"no file or folder at {data}: name another text with --data")
        config = dataclasses.replace(config, path=data)
    experiment = dataclasses.replace(metadata.experiment, data=config)
    remedy = "to audit it, name that text with --data"
    training = open_training(fit_devices(experiment), metadata.directory, metadata, remedy=remedy)
    here, there = (
        installed_versions() | {"device": first_device().device_kind},
        metadata.versions | {"device": metadata.device},
    )
    elsewhere = [f"{name} {there.get(name)}, here {value}" for name, value in here.items() if there.get(name) != value]
    found = AuditResult(run=str(metadata.directory), tolerance=tolerance, steps=total, seed=seed, elsewhere=elsewhere)
    claims = _read_claims(training, found)
    last = max((*claims.steps, *claims.validations, *claims.kept), default=0)
    starts = {
        step: max(state for state in (0, *claims.kept) if state < step)
        for step in sorted({*claims.steps, *claims.validations, *claims.kept})
    }
    least = min((step - start for step, start in starts.items()), default=0)
    if steps is not None and left < least:
        raise UserError(
            f"steps={steps}: the nearest logged step is {least} steps after a checkpoint: give at least {least}"
        )
    left = max(left, least)
    stops: dict[int, int] = {}  # {step to start from, 0 for the seed: the last step to take from there}
    for step in np.random.default_rng(seed).permutation(list(starts)).tolist():
        start = starts[step]
        cost = max(0, step - stops.get(start, start))
        if cost <= left:
            stops[start] = max(step, stops.get(start, start))
            left -= cost
    found.retaken = sum(stop - start for start, stop in stops.items())
    say(f"re-taking {found.retaken:,} of {total:,} steps")
    measured: set[int] = set()

    def measure(step: int, state: TrainState) -> None:
        """Measure the validation loss after a step, and compare it with the log and with the checkpoint's."""
        val_loss, val_losses = training.measure_val_loss(training.trainer.merged_params(state))
        line = claims.validations.get(step, {"val_loss": claims.kept.get(step)})
        claimed = {"val_loss": line["val_loss"], **line.get("val_losses", {})}
        again = {"val_loss": val_loss, **val_losses}
        _compare_names(found, step, claimed, again)
        measured.add(step)

    for start, stop in sorted(stops.items()):
        state = training.restore_or_init(start)
        for step, taken, metrics in training.take_steps(state, start, stop):
            state = taken
            due = next(each for each in reversed(metadata.intervals) if each.after < step)
            is_logged = step % due.log_every == 0 or step == total
            _compare_line(found, claims.steps.get(step), step, metrics, training, is_logged=is_logged)
            if step in claims.validations:
                measure(step, state)
            elif (step % due.eval_every == 0 and not step == last < total) or step == total:  # where a signal ended it
                found.findings.append(f"step {step}: its validation loss is not in the log")
        if stop in claims.kept:
            found.compared_checkpoints += 1
            claimed = training.restore_or_init(stop)
            for item in ("params", "opt_state"):
                arrays = jax.tree.leaves_with_path(getattr(claimed, item))
                for (path, x), y in zip(arrays, jax.tree.leaves(getattr(state, item)), strict=True):
                    what = f"checkpoint {stop}: {item}{jax.tree_util.keystr(path)}"
                    found.compare(what, np.asarray(x), np.asarray(y))
    newest = max((step for step, val_loss in claims.kept.items() if val_loss is not None), default=None)
    if newest is not None and newest not in measured:
        measure(newest, training.restore_or_init(newest))
    found.compared_validations = len(measured)
    return found


@dataclasses.dataclass(frozen=True)
class _Claims:
    """The numbers that a run states for its steps."""

    steps: dict[int, dict[str, Any]]  # the lines of metrics.jsonl with a loss or a reason to skip
    validations: dict[int, dict[str, Any]]  # the lines with a validation loss
    kept: dict[int, float | None]  # the validation loss of each undamaged checkpoint


def _read_claims(training: Training, found: AuditResult) -> _Claims:
    """Return what a run claims. What cannot be true, whatever its steps give, is a finding."""
    lines, damaged = parse_metrics(training.directory / "metrics.jsonl")
    claims = _Claims({}, {}, {})
    found.findings += [damaged] if damaged else []
    impossible = f"is in the run, which has the steps 1 to {found.steps}"
    for line in lines:
        step, kinds = line["step"], [name for name in ("loss", "skipped", "val_loss") if name in line]
        claimed = claims.validations if kinds == ["val_loss"] else claims.steps
        if len(kinds) != 1:
            found.findings.append(f"step {step}: a line of the log has {' and '.join(kinds) or 'no loss'}")
        elif not 1 <= step <= found.steps:
            found.findings.append(f"step {step}: {impossible}")
        elif step in claimed:
            found.findings.append(f"step {step}: a second line of the log has {kinds[0]}")
        else:
            claimed[step] = line
    for step in training.checkpoints.steps():
        try:
            training.checkpoints.verify(step)
        except (CorruptCheckpoint, OSError) as e:
            found.findings.append(str(e))
            continue
        if not 1 <= step <= found.steps:
            found.findings.append(f"checkpoint {step}: {impossible}")
            continue
        claims.kept[step] = training.checkpoints.val_loss(step)
        logged = claims.validations.get(step, {}).get("val_loss")
        if claims.kept[step] != logged:
            found.findings.append(f"checkpoint {step}: its val_loss is {claims.kept[step]}, and {logged} in the log")
    found.verified_checkpoints = len(claims.kept)
    return claims


def _compare_line(
    found: AuditResult,
    line: dict[str, Any] | None,
    step: int,
    metrics: Metrics,
    training: Training,
    *,
    is_logged: bool,
) -> None:
    """Compare the line of a training step with what the step gives here. is_logged: whether it needs a line."""
    why, experiment = why_skipped(metrics), training.experiment
    if line is None:
        if why is not None or is_logged:
            found.findings.append(f"step {step}: is not in the log{'' if why is None else f', skipped here: {why}'}")
        return
    found.compared_steps += 1
    claimed = line.get("skipped")
    if why is not None or claimed is not None:
        if None in (why, claimed) or (why != claimed and not found.tolerance):
            found.findings.append(f"step {step}: skipped is {claimed} in the run, {why} here")
        return
    known = {name: value for name, value in metrics.items() if name != "in_a_row"}
    known["tokens"] = step * experiment.train.batch_size * experiment.model.block_size
    _compare_names(found, step, {name: value for name, value in line.items() if name not in ("step", *TIMES)}, known)


def _compare_names(found: AuditResult, step: int, claimed: dict[str, Any], again: dict[str, Any]) -> None:
    """Compare the numbers of a line, which has exactly the names that are found here."""
    for name in sorted({*claimed, *again}):
        if name in claimed and name in again:
            found.compare(f"step {step}: {name}", claimed[name], float(again[name]))
        else:
            found.findings.append(f"step {step}: {name} is {'not ' * (name not in claimed)}in the log")
