"""Audit a run: do its files agree, and does the program give what its log claims?"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config.validate import check_count, check_whole
from jaxgpt.errors import UserError
from jaxgpt.files import is_there
from jaxgpt.runs.checkpoint import open_checkpoints
from jaxgpt.runs.find import find_run
from jaxgpt.runs.metadata import RunMetadata, read_metadata
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.runs.sessions import SessionRecord, describe_computation, read_sessions
from jaxgpt.runs.training import Training, reopen_training
from jaxgpt.tools.audit.consistency import Log, best_step, check_checkpoints, check_log
from jaxgpt.tools.audit.movement import find_largest_move
from jaxgpt.tools.audit.plan import AuditPlan, cost_of_validation, largest_false_share, make_plan
from jaxgpt.tools.audit.retake import BFLOAT16, FLOAT32, Comparison, Tolerance, retake

SHARE = 0.035  # of a run's steps to take again by default; with the start of the audit 5% of a run of five minutes
NO_STEPS = AuditPlan(stops={}, drawn=[], reachable=0, is_whole=False)
NOT_EXCLUDED = (
    "Not excluded: that this run was chosen from many, that its times are false, and a few false lines among those "
    "that were not re-taken."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Result of an audit."""

    run: str
    accepted: bool
    findings: list[str]  # claims that are false, with what was found; none if accepted
    steps: int  # of the run
    logged: int  # steps with a line in the log
    checkpoints: int
    validations: int  # in the log
    seed: int  # of the random draw
    retaken: int  # steps taken again
    drawn: int  # logged steps drawn at random, all re-taken
    reachable: int  # logged steps from which they were drawn
    is_whole: bool  # every step was re-taken
    is_final_retaken: bool  # the steps before the last checkpoint give its arrays
    last_interval: int  # steps from the checkpoint before the last one to it
    compared_lines: int
    compared_states: int
    compared_validations: int
    equal: int  # of all comparisons, those that are equal bit for bit
    tolerance: Tolerance | None  # None: equal bits are demanded
    tolerance_because: list[str]  # why they are not

    @property
    def verdict(self) -> str:
        """Return the verdict in words."""
        if not self.accepted:
            return "not accepted"
        is_shown = self.is_whole or (self.is_final_retaken and self.drawn)
        return "accepted" if is_shown else "accepted in part: nothing false was found where steps could be re-taken"


def audit(
    run: str | Path | None,
    *,
    steps: int | None = None,
    seed: int | None = None,
    data: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> AuditResult:
    """Compare what a run claims with itself and with what its steps give when they are taken again. Writes nothing.

    If the files agree with each other, steps are taken again. Losses, gradient norms, states and validation losses must
    be equal bit for bit where the run was computed as here, else within the tolerances in `retake`.

    Args:
        run: directory of the run, which must be complete. None means the newest under `runs/`.
        steps: most steps to take again; at least those from the seed to the first logged step after step 1. As many as
            the run has: all of them. None means 3.5% of them, less the time of validations.
        seed: of the random draw. None means a new one each time, which a forger cannot know.
        data: path of the text, if it is not where the run read it.
        say: receives a line of text before steps are taken.

    Raises:
        UserError: the run is imported, incomplete or damaged, or its text is missing or another.
    """
    metadata = read_metadata(find_run(run))
    steps = None if steps is None else check_count("steps", steps)
    seed = secrets.randbits(32) if seed is None else check_whole("seed", seed)
    training, log = _open(metadata, data)
    kept, total = training.checkpoints.steps(), training.experiment.train.steps
    sessions = read_sessions(metadata)
    because = _why_not_exact(metadata, training, sessions)
    comparison = Comparison(tolerance=_tolerance(metadata, training, sessions) if because else None)
    comparison.findings += check_log(log, training.experiment, sessions)
    comparison.findings += check_checkpoints(training.checkpoints, log, total)
    plan = NO_STEPS
    if not comparison.findings:
        plan = _retake(training, log, kept, steps, np.random.default_rng(seed), comparison, say)
    last = kept[-2] if len(kept) > 1 else 0
    return AuditResult(
        run=str(training.directory),
        accepted=not comparison.findings,
        findings=comparison.findings,
        steps=total,
        logged=len(log.steps),
        checkpoints=len(kept),
        validations=len(log.val_losses),
        seed=seed,
        retaken=plan.retaken,
        drawn=len(plan.drawn),
        reachable=plan.reachable,
        is_whole=plan.is_whole,
        is_final_retaken=plan.stops.get(last) == total,
        last_interval=total - last,
        compared_lines=comparison.lines,
        compared_states=comparison.states,
        compared_validations=comparison.validations,
        equal=comparison.equal,
        tolerance=comparison.tolerance,
        tolerance_because=because,
    )


def _open(metadata: RunMetadata, data: str | None) -> tuple[Training, Log]:
    """Return a complete run as it was trained, and its log. Raises `UserError` as `audit` does."""
    directory, config = metadata.directory, metadata.experiment.data
    if metadata.imported is not None:
        raise UserError(f"{directory} is an imported model: there is no training to audit")
    log, total = Log(read_metrics(directory / "metrics.jsonl")), metadata.experiment.train.steps
    reached = max(log.last, open_checkpoints(directory).steps()[-1])
    if reached < total:
        raise UserError(f"{directory} has {reached} of {total} steps: audit it when it is complete")
    if data is not None:
        if not is_there(Path(data), "Name another text with --data."):
            raise UserError(f"no file or folder at {data}: name another text with --data")
        config = dataclasses.replace(config, path=data)
    training = reopen_training(metadata, config, remedy="to audit it, name that text with --data")
    if training.weights is not None:
        training.weights()  # raises here if they are missing
    return training, log


def _retake(
    training: Training,
    log: Log,
    kept: list[int],
    steps: int | None,
    rng: np.random.Generator,
    comparison: Comparison,
    say: Callable[[str], None],
) -> AuditPlan:
    """Choose steps and validations, and take them again. Return the plan."""
    train, split = training.experiment.train, training.dataset.val
    best = best_step(log)
    validations = {kept[-1]} if best is None else {kept[-1], _kept_with(log, kept, best)}
    if steps is None:
        tokens = min(len(split), train.eval_tokens or len(split))
        cost = cost_of_validation(tokens, train.batch_size * training.experiment.model.block_size)
        steps = int(SHARE * train.steps) - cost * len(validations)
    plan = NO_STEPS
    try:
        unusual = find_largest_move(training, kept) if len(kept) > 2 and steps < train.steps else None
        plan = make_plan(sorted(log.steps), kept, budget=steps, unusual=unusual, rng=rng)
        if plan.is_whole:
            validations |= set(log.val_losses)
        say(f"re-taking {plan.retaken:,} of {train.steps:,} steps and {len(validations)} validations")
        retake(training, log, plan.stops, validations, comparison)
    except UserError as e:  # a checkpoint has other arrays than the model
        comparison.findings.append(str(e))
    return plan


def _kept_with(log: Log, kept: list[int], best: int) -> int:
    """Return the last kept step with the same validation loss as the best step."""
    return max(step for step in kept if log.val_losses.get(step) == log.val_losses[best])


def _why_not_exact(metadata: RunMetadata, training: Training, sessions: list[SessionRecord]) -> list[str]:
    """Return how this computation differs from those of the run's sessions: its bits may differ then."""
    here = describe_computation(training.experiment, training.trainer)
    devices = {metadata.device, here["device"]} - {"cpu"}
    found = [f"{name}: equal bits have been tested on CPUs only" for name in sorted(devices)]
    for session in sessions:
        if session.computation is None:
            found.append(f"the run, trained on {metadata.device}, does not record what it was computed with")
            continue
        there: dict[str, Any] = session.computation
        found += [f"{k}: {there.get(k)!r}, here {v!r}" for k, v in here.items() if there.get(k) != v]
    return list(dict.fromkeys(found))


def _tolerance(metadata: RunMetadata, training: Training, sessions: list[SessionRecord]) -> Tolerance:
    """Return the tolerance for the dtypes that the run was, or may have been, computed in."""
    unknown = "float32" if metadata.device == "cpu" else "bfloat16"
    dtypes = [unknown if s.computation is None else s.computation.get("dtype") for s in sessions]
    return FLOAT32 if {*dtypes, str(training.trainer.options.dtype)} == {"float32"} else BFLOAT16


def format_audit(found: AuditResult) -> str:
    """Return the result of `audit` as text: the verdict, the findings, what was compared, and how sure one may be."""
    return "\n".join(
        [
            f"{found.run}: {found.verdict}",
            *(f"  {finding}" for finding in found.findings),
            f"compared: {found.logged:,} logged steps, {found.validations:,} validations and {found.checkpoints:,} "
            f"checkpoints with each other; {found.retaken:,} of {found.steps:,} steps re-taken: {found.compared_lines:,} "
            f"logged steps, {found.compared_states:,} checkpoints, {found.compared_validations:,} validations",
            *_format_tolerance(found),
            *(_assurance(found) if found.accepted else ()),
        ]
    )


def _format_tolerance(found: AuditResult) -> list[str]:
    """Return lines with the tolerance and the reasons for it, none if equal bits are demanded."""
    if found.tolerance is None:
        return []
    limits = ", ".join(f"{name} {value:g}" for name, value in found.tolerance._asdict().items())
    return [f"to a tolerance ({limits}), not bit for bit:", *(f"  {reason}" for reason in found.tolerance_because)]


def _assurance(found: AuditResult) -> list[str]:
    """Return sentences that say how sure one may be that an accepted run is true."""
    compared = found.compared_lines + found.compared_states + found.compared_validations
    equal = "bit for bit" if found.equal == compared else f"{found.equal} of {compared} comparisons bit for bit"
    if found.is_whole:
        said = f"Every step was re-taken and is right, {equal}."
        return [said, "Not excluded: that this run was chosen from many, and that its times are false."]
    said = f"No logged step could be drawn at random with --steps {found.retaken}."
    if found.drawn:
        share = largest_false_share(found.drawn)
        said = (
            f"All {found.drawn} of {found.reachable:,} logged steps drawn at random are right, {equal}: if more than "
            f"{share:.0%} of them were false, this would be seen with 95% probability."
        )
    lines = [said]
    if found.reachable < found.logged:
        lines.append(
            f"{found.logged - found.reachable:,} of {found.logged:,} logged steps are too far from a kept checkpoint to "
            "be drawn: --steps allows more, and a run with --train.keep-every has more checkpoints."
        )
    if not found.is_final_retaken:
        lines.append(
            "The last parameters have the loss that is claimed, but they were not re-taken from an earlier checkpoint: "
            f"that takes {found.last_interval:,} steps (--steps {found.retaken + found.last_interval})."
        )
    return [*lines, NOT_EXCLUDED]
