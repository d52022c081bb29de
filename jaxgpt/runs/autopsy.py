"""Write the autopsy of a step that was not finite: its batch, what made it so, and the state before it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.callbacks import Metrics
from jaxgpt.cluster import multihost
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import CheckpointSaveError, first_line, shell_line
from jaxgpt.files import render_json, write_whole
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.nan_debug import NonFiniteReport, debug_step, format_report, gather_params
from jaxgpt.runs.training import Training
from jaxgpt.skip import why_skipped
from jaxgpt.train import TrainState

MOST_ROWS = 32  # of a batch that a report shows; the others follow from data, seed and step


def state_before(run: Path, step: int) -> Path:
    """Return where the autopsy of a step has saved the state before it, if it could."""
    return _autopsy_directory(run, step) / "state"


def write_autopsy(
    training: Training, *, state: TrainState, step: int, metrics: Metrics, later: Sequence[Metrics]
) -> str:
    """Write `RUN/autopsy/step-N/`, once: report.json, report.txt and the state before the step. Return what to tell.

    state: the newest, after `step` and those whose metrics are `later`; where they were skipped too, it is in all but
    its counters the one that entered the step. Nothing here may end a run that goes on: what cannot
    be known, or written, is said instead.
    """
    run, trainer, key = training.directory, training.trainer, training.dropout_key
    place = _autopsy_directory(run, step)
    command, why = shell_line("jaxgpt", "replay", run, "--step", step), why_skipped(metrics)
    if (place / "report.json").is_file():
        return f"{why}: examined before, see {place}. To replay this step alone: {command}"
    exact = all(int(m["skipped"]) for m in later)
    of_step = step - 1 if exact else step + len(later)
    batch = training.whole_batch(step)
    found, unknown = _debug_step(trainer, state, batch, key, step)
    if not exact:
        lost = f"steps up to {of_step} had moved the parameters when this one was known to be bad"
    elif multihost.is_multiprocess():
        lost = "several processes write a state together or not at all"
    else:
        lost = _save_state(place / "state", trainer, _rewind(state, 1 + len(later)), step - 1)
    report = {
        "step": step,
        "why": why,
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "replay": command,
        "parameters_of_step": of_step,
        "findings": None if found is None else dataclasses.asdict(found),
        "why_no_findings": unknown,
        "why_no_state": lost,
        "seed": training.experiment.train.seed,
        "step_key": jax.random.key_data(jax.random.fold_in(key, step - 1)).tolist(),
        "batch": _rows(batch, training.dataset.tokenizer),
    }
    first = unknown if found is None else f"first not finite: {found.first or 'nothing, the second time'}"
    message = f"{why}; {first}" + ("" if exact else f" (with the parameters of step {of_step})")
    text = f"step {step}: {message}\n\n{'' if found is None else format_report(found)}\n\n{command}\n"
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / "report.txt", text)
        json = render_json(report, indent=1, ensure_ascii=False, not_finite=str)  # which it is, is the question
        write_whole(place / "report.json", json + "\n")
    except OSError as e:
        return f"{message}. The autopsy could not be written: {e}"
    return f"{message}. Autopsy in {place}; to replay this step alone: {command}"


def _debug_step(
    trainer: Trainer, state: TrainState, batch: Batch, key: jax.Array, step: int
) -> tuple[NonFiniteReport | None, str | None]:
    """Return (the report, None), or (None, why there is none)."""
    params = gather_params(trainer, state)
    if params is None:
        return None, "no process holds the whole of the parameters"
    try:
        return debug_step(trainer, params, batch, key, step), None
    except jax.errors.JaxRuntimeError as e:  # the whole model on one device, and without remat
        return None, f"the look at it failed: {first_line(e)}"


def _autopsy_directory(run: Path, step: int) -> Path:
    return run / "autopsy" / f"step-{step}"


def _rewind(state: TrainState, steps: int) -> TrainState:
    """Return the state before the last so many steps, all of them skipped."""
    skips = state.opt_state
    skips = dataclasses.replace(skips, skipped=skips.skipped - steps, in_a_row=skips.in_a_row - steps)
    return dataclasses.replace(state, step=state.step - steps, opt_state=skips)


def _save_state(directory: Path, trainer: Trainer, state: TrainState, step: int) -> str | None:
    """Save the state of a step. Return None, or why it could not be saved."""
    try:
        shutil.rmtree(directory, ignore_errors=True)  # of a session that was killed before its report
        checkpoints = Checkpoints(directory)
        try:
            checkpoints.save(trainer.strategy.to_checkpoint(state), step, None)
        finally:
            checkpoints.close()
    except CheckpointSaveError as e:
        return str(e)
    return None


def _rows(batch: Batch, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    rows = np.concatenate([batch.inputs_BT[:MOST_ROWS], batch.targets_BT[:MOST_ROWS, -1:]], axis=1)
    known = (rows >= 0) & (rows < tokenizer.vocab_size)
    return [
        {"row": i, "text": tokenizer.decode(row) if known[i].all() else None, "ids": row.tolist()}
        for i, row in enumerate(rows)
    ]
