"""Checks of a run's log and checkpoints that take no step: are they complete, and do they agree with each other?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Experiment
from jaxgpt.optim import learning_rate
from jaxgpt.runs.checkpoint_index import CheckpointIndex
from jaxgpt.runs.manifest import CorruptCheckpoint
from jaxgpt.runs.sessions import SessionRecord

LR_ROUNDING = 1e-6  # of the peak: a schedule in float32, compiled or not
MOST_NAMED = 3  # steps that a finding names

Line = dict[str, Any]  # of metrics.jsonl


class Log:
    """The lines of a run's metrics.jsonl, by step."""

    def __init__(self, lines: Sequence[Line]):
        """Sort lines into those of steps and those of validations. The first of several lines of a step counts."""
        self.step_lines = [line for line in lines if "val_loss" not in line]
        self.validation_lines = [line for line in lines if "val_loss" in line]
        self.steps: dict[int, Line] = {line["step"]: line for line in reversed(self.step_lines)}
        self.val_losses: dict[int, float | None] = {x["step"]: x["val_loss"] for x in reversed(self.validation_lines)}
        self.last = max((line["step"] for line in lines), default=0)

    @property
    def skipped(self) -> list[int]:
        """Return the steps that were skipped, in order."""
        return sorted(step for step, line in self.steps.items() if "skipped" in line)


def check_log(log: Log, experiment: Experiment, sessions: Sequence[SessionRecord]) -> list[str]:
    """Return what is wrong with the lines of a complete run by themselves: missing steps and false arithmetic."""
    total = experiment.train.steps
    findings = []
    for what, lines in (("steps", log.step_lines), ("validations", log.validation_lines)):
        steps = [line["step"] for line in lines]
        findings += _name(f"{what} out of order or twice", (b for a, b in itertools.pairwise(steps) if b <= a))
        findings += _name(f"{what} beyond train.steps={total}", (step for step in steps if not 0 < step <= total))
    taken = {step for step, line in log.steps.items() if "skipped" not in line}
    expected, _ = _expected([(s.step, s.log_every) for s in sessions], total)
    findings += _name("steps that are not logged", expected - set(log.steps))
    ends = set(experiment.optim.horizons)  # the last steps before the run was extended
    findings += _name("steps logged between those of train.log_every", taken - expected - ends)
    expected, optional = _expected([(s.step, s.eval_every) for s in sessions], total)
    findings += _name("validations that are not logged", expected - optional - set(log.val_losses))
    findings += _name(
        "validations logged between those of train.eval_every", set(log.val_losses) - expected - optional - ends
    )
    return findings + _check_numbers(log, experiment)


def _check_numbers(log: Log, experiment: Experiment) -> list[str]:
    """Return the lines whose tokens, learning rate or time are not those of their step."""
    train, taken = experiment.train, [line for line in log.step_lines if "skipped" not in line]
    names = ("tokens", "loss", "grad_norm", "learning_rate", "seconds")
    broken = [line["step"] for line in taken if any(line.get(name) is None for name in names)]
    if broken:
        return _name(f"lines without {', '.join(names)}", broken)
    steps = np.array([line["step"] for line in taken], int)
    tokens = steps * train.batch_size * experiment.model.block_size
    findings = _name(
        f"lines whose tokens are not the step times {train.batch_size * experiment.model.block_size:,}",
        (line["step"] for line, right in zip(taken, tokens, strict=True) if line["tokens"] != right),
    )
    counts = np.maximum(steps - 1 - np.searchsorted(log.skipped, steps), 0)
    rates = np.broadcast_to(learning_rate(experiment.optim, train.steps)(jnp.asarray(counts)), counts.shape)
    wrong = np.abs([line["learning_rate"] for line in taken] - rates) > LR_ROUNDING * experiment.optim.learning_rate
    for line, rate in [(line, rate) for line, rate, bad in zip(taken, rates, wrong, strict=True) if bad][:MOST_NAMED]:
        findings.append(
            f"step {line['step']}: learning_rate {line['learning_rate']} logged, the schedule has {float(rate)}"
        )
    pairs = itertools.pairwise(taken)
    return findings + _name("lines before whose time", (b["step"] for a, b in pairs if b["seconds"] < a["seconds"]))


def check_checkpoints(checkpoints: CheckpointIndex, log: Log, total: int) -> list[str]:
    """Return what is wrong with the checkpoints: changed files, other validation losses than logged, missing ones."""
    steps, findings = checkpoints.steps(), []
    for step in steps:
        try:
            checkpoints.verify(step)
        except (CorruptCheckpoint, OSError) as e:
            findings.append(str(e))
            continue
        claimed, logged = checkpoints.val_loss(step), log.val_losses.get(step)
        if claimed != logged:
            findings.append(f"checkpoint {step}: validation loss {claimed} in its manifest, {logged} logged")
    if total not in steps:
        findings.append(f"the checkpoint of the last step, {total}, is missing")
    findings += _name(f"checkpoints beyond train.steps={total}", (step for step in steps if step > total))
    best = best_step(log)
    if best is not None and log.val_losses[best] not in [log.val_losses.get(step) for step in steps]:
        findings.append(f"the checkpoint of the lowest validation loss, step {best}, is missing")
    return findings


def best_step(log: Log) -> int | None:
    """Return the step with the lowest validation loss, the last of several, or None if none is finite."""
    losses = {step: loss for step, loss in log.val_losses.items() if loss is not None}
    return min(losses, key=lambda step: (losses[step], -step)) if losses else None


def _expected(sessions: list[tuple[int, int]], total: int) -> tuple[set[int], set[int]]:
    """Return the steps that are multiples of each session's interval and the last one; and those between sessions.

    sessions: (step, interval). Between two sessions a validation may belong to either of them, or to none.
    """
    ends = [step for step, _ in sessions[1:]] + [total]
    expected = {total}
    for (start, every), end in zip(sessions, ends, strict=True):
        expected.update(range((start // every + 1) * every, end + 1, every))
    return expected, set(ends[:-1])


def _name(what: str, steps: Iterable[int]) -> list[str]:
    """Return one finding that names the first steps, or none."""
    found = sorted(set(steps))
    more = f" and {len(found) - MOST_NAMED:,} more" if len(found) > MOST_NAMED else ""
    return [f"{what}: {', '.join(str(step) for step in found[:MOST_NAMED])}{more}"] if found else []
