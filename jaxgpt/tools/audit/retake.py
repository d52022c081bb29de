"""Take steps of a run again and compare them with its log and checkpoints."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.parallel.trainer import mean_loss
from jaxgpt.runs.checkpoint_index import finite_or_none
from jaxgpt.runs.training import Training
from jaxgpt.tools.audit.consistency import Line, Log
from jaxgpt.tools.audit.movement import norm_of_difference
from jaxgpt.train import TrainState, why_skipped


class Tolerance(NamedTuple):
    """Relative differences that another processor may make, since it sums in another order."""

    loss: float
    grad_norm: float
    val_loss: float  # of the same parameters
    move: float  # norm of the parameters' difference, relative to how far the steps moved them


# Compiled for AVX2 instead of AVX-512, 50 steps of the quickstart differed by up to 1.2e-6 (losses), 6e-6 (norms) and 1e-5
# (moves) in float32, and by 1.4e-3, 0.04 and 0.09 in bfloat16.
FLOAT32 = Tolerance(loss=1e-4, grad_norm=1e-3, val_loss=1e-5, move=1e-2)
BFLOAT16 = Tolerance(loss=1e-2, grad_norm=0.2, val_loss=1e-3, move=0.5)


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """Collects comparisons of claimed values with those found."""

    tolerance: Tolerance | None  # None: demand equal bits
    lines: int = 0  # of the log, compared
    states: int = 0  # at the ends of intervals, compared
    validations: int = 0
    equal: int = 0  # of all these, those that are equal bit for bit
    findings: list[str] = dataclasses.field(default_factory=list)

    def matches(self, name: str, claimed: Any, found: float) -> bool:
        """Return whether a claimed number is the one found, bit for bit or within the tolerance of that name."""
        if self.tolerance is None or not (isinstance(claimed, float | int) and math.isfinite(found)):
            return claimed == found
        return abs(claimed - found) <= getattr(self.tolerance, name) * abs(found)

    def compare_line(self, step: int, claimed: Line | None, metrics: dict[str, Any]) -> None:
        """Compare a step with its line in the log, None for a step that needs none."""
        skipped = why_skipped(metrics) if int(metrics["skipped"]) else None
        if claimed is None and skipped is None:
            return
        self.lines += 1
        if claimed is None or (skipped is None) != ("skipped" not in claimed):
            logged = "taken" if claimed is None or "skipped" not in claimed else "skipped"
            self.findings.append(f"step {step}: {logged} in the log, found {'taken' if skipped is None else 'skipped'}")
            return
        if skipped is not None:
            found: dict[str, Any] = {"skipped": skipped}
            wrong = [name for name in found if self.tolerance is None and claimed[name] != skipped]
        else:
            found = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
            wrong = [name for name, value in found.items() if not self.matches(name, claimed[name], value)]
        self.findings += [f"step {step}: {name} {claimed[name]} logged, found {found[name]}" for name in wrong]
        self.equal += all(claimed[name] == value for name, value in found.items())

    def compare_validation(self, step: int, claimed: float | None, found: float) -> None:
        """Compare a validation loss with the logged one."""
        self.validations += 1
        logged = finite_or_none(found)
        self.equal += claimed == logged
        if claimed != logged and not self.matches("val_loss", claimed, found):
            self.findings.append(f"step {step}: val_loss {claimed} logged, found {found}")

    def compare_states(self, step: int, claimed: list[np.ndarray], found: list[np.ndarray], before: Any) -> None:
        """Compare the arrays of two states after `step`, parameters first. before: the parameters at the start."""
        self.states += 1
        different = [
            n for n, pair in enumerate(zip(claimed, found, strict=True)) if pair[0].tobytes() != pair[1].tobytes()
        ]
        self.equal += not different
        if not different:
            return
        distance, moved = norm_of_difference(claimed[: len(before)], found), norm_of_difference(before, found)
        # not (a <= b), since either may be NaN
        if self.tolerance is None or not distance <= self.tolerance.move * moved:
            self.findings.append(
                f"checkpoint {step}: {len(different)} of {len(found)} arrays are not those that the steps before it "
                f"give; the parameters differ by {distance:.3g}, where those steps move them by {moved:.3g}"
            )


def retake(training: Training, log: Log, stops: dict[int, int], validations: set[int], comparison: Comparison) -> None:
    """Take steps again from kept states, and compare all that the run claims about them.

    Args:
        training: the run.
        log: its lines.
        stops: see `AuditPlan`.
        validations: steps whose validation loss is measured again; those that are not passed, from their checkpoints.
        comparison: collects the results.
    """
    kept, left = set(training.checkpoints.steps()), set(validations)
    for start, stop in stops.items():
        state = _restore(training, start, log, comparison)
        if state is None:
            continue
        before = [np.array(x) for x in jax.tree.leaves(state.params)]  # copies: the first step donates the state
        taken = state
        for step, taken, metrics in training.take_steps(state, start, stop):
            comparison.compare_line(step, log.steps.get(step), metrics)
            if step in left:
                left.remove(step)
                comparison.compare_validation(step, log.val_losses.get(step), _validate(training, taken))
        if stop in kept and (claimed := _restore(training, stop, log, comparison)) is not None:
            comparison.compare_states(stop, _arrays(claimed), _arrays(taken), before)
    for step in sorted(left):
        if (state := _restore(training, step, log, comparison)) is not None:
            comparison.compare_validation(step, log.val_losses.get(step), _validate(training, state))


def _restore(training: Training, step: int, log: Log, comparison: Comparison) -> TrainState | None:
    """Return the state of a checkpoint, or None with a finding if it is not one of this run after that step."""
    state = training.restore_or_init(step)
    skipped = sum(at <= step for at in log.skipped)
    claims = {"step": (step, state.step), "number of skipped steps": (skipped, state.opt_state.skipped)}
    wrong = [
        f"checkpoint {step}: its state has {name} {int(found)}, {claimed} by its name and the log"
        for name, (claimed, found) in claims.items()
        if int(found) != claimed
    ]
    comparison.findings += [finding for finding in wrong if finding not in comparison.findings]
    return None if wrong else state


def _validate(training: Training, state: TrainState) -> float:
    trainer = training.trainer
    return mean_loss(trainer.eval_step, trainer.merged_params(state), training.validation_windows())[0]


def _arrays(state: TrainState) -> list[np.ndarray]:
    """Return the arrays of a state that a checkpoint holds, the parameters first."""
    return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]
