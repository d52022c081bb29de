"""The training loop. It opens no directory, chooses no device and draws no page."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxgpt.batch import Batch
from jaxgpt.config.training import TrainConfig
from jaxgpt.errors import Diverged, Preempted
from jaxgpt.train import Metrics, TrainState, why_skipped

if TYPE_CHECKING:
    import jax

Line = dict[str, Any]  # what happened at a step: see `train`

# On CPU `configure_jax` turns asynchronous dispatch off, so that each step is done when it was dispatched. Elsewhere
# this many hide the host's work. More would only queue memory, and several fake devices on few cores hang when
# hundreds of steps are in flight.
IN_FLIGHT = 2
LOGGED = ("loss", "grad_norm", "learning_rate")
LONG_STEP = 1.0  # seconds: such steps are not left in flight, since a signal would have to wait for them
# Steps between two decisions of process 0 on how many steps may be in flight. All processes settle the same steps at
# the same time: when one raises, all have dispatched the same steps.
AGREE_EVERY = 100


def train(
    train_step: Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: Iterator[Batch],
    *,
    config: TrainConfig,
    key: jax.Array,
    max_skipped: int,
    start: int = 0,
    best: float = math.inf,
    log: Callable[[Line], None] = lambda line: None,
    validate: Callable[[int, TrainState], float | None] = lambda step, state: None,
    save: Callable[[int, TrainState, float | None], None] = lambda step, state, val_loss: None,
    stop: Callable[[int | None], str | None] = lambda step: None,
    agree: Callable[[int], int] = lambda number: number,
) -> TrainState:
    """Take steps start + 1 to config.steps, and return the last state.

    Args:
        train_step: compiled. It may donate the state.
        state: the state after step `start`.
        batches: the batches of the steps from start + 1 on.
        config: how many steps to take, and when to validate and save.
        key: the run's key, for dropout.
        max_skipped: skipped steps in a row that end the run.
        start: steps taken so far.
        best: the lowest validation loss of earlier checkpoints.
        log: takes a line for each step that is done, with "loss", "grad_norm", "learning_rate" and the loss's own metrics,
            or "skipped", the reason. The first step also has "compiled", its seconds. Each validation has "val_loss".
        validate: returns the validation loss, or None if a signal interrupted it.
        save: starts to save a checkpoint. Its loss is None if it was not measured at this step, or is not finite.
        stop: returns the signal that is to end the run, if any, on all processes. If step is None, only on this one.
        agree: returns the number of process 0 on all processes.

    Raises:
        Preempted: after a signal and a save.
        Diverged: after `max_skipped` skipped steps in a row, or if the last validation loss is not finite.
    """
    in_flight: deque[tuple[int, Metrics]] = deque()  # steps with metrics that are still on the device
    limit = 0  # the first steps are waited for: they compile, and show how long a step takes
    skipped_in_a_row, is_due = 0, False

    def settle(most: int) -> None:
        """Log the oldest steps until at most `most` are in flight: the loop's only wait for the device."""
        nonlocal skipped_in_a_row
        while len(in_flight) > most:
            done, metrics = in_flight.popleft()
            skipped_in_a_row = int(metrics["in_a_row"])
            if not skipped_in_a_row:
                own = sorted(metrics.keys() - {*LOGGED, "in_a_row"})  # the objective's metrics
                log({"step": done} | {name: float(metrics[name]) for name in (*LOGGED, *own)})
                continue
            log({"step": done, "skipped": why_skipped(metrics)})
            if skipped_in_a_row >= max_skipped:
                count = f"{skipped_in_a_row} steps in a row were skipped, up to step {done}"
                raise Diverged(f"{count}: {why_skipped(metrics)}")

    for step in range(start + 1, config.steps + 1):
        began = time.monotonic()
        state, metrics = train_step(state, next(batches), key)
        in_flight.append((step, metrics))
        settle(limit)
        seconds = time.monotonic() - began
        if step == start + 1:
            log({"step": step, "compiled": seconds})
        if step == start + 2 or step % AGREE_EVERY == 0:
            limit = agree(IN_FLIGHT if seconds < LONG_STEP else 0)

        signal, val_loss = stop(step), None
        if signal is None and is_eval_step(step, config):
            settle(0)
            val_loss = validate(step, state)
            signal = stop(None)
        if val_loss is not None:
            val_loss = log_validation(log, step, val_loss, config)
        if val_loss is not None and val_loss < best:
            best, is_due = val_loss, True
        if step % config.checkpoint_every == 0 or step == config.steps or signal is not None:
            is_due = True
        if is_due:
            settle(0)
            # After skipped steps the parameters may be bad, unless the validation loss is finite. They must not replace
            # good ones: the next step taken is saved instead.
            if not skipped_in_a_row or val_loss is not None or signal is not None:
                save(step, state, val_loss)
                is_due = False
        if signal is not None:
            raise Preempted(f"{signal}: saved step {step} of {config.steps}")
    return state


def is_eval_step(step: int, config: TrainConfig) -> bool:
    """Return whether the validation loss is measured after a step."""
    return step % config.eval_every == 0 or step == config.steps


def log_validation(log: Callable[[Line], None], step: int, val_loss: float, config: TrainConfig) -> float | None:
    """Log a validation loss. Return it if it is finite. If it is not, and is the run's last, raise `Diverged`."""
    log({"step": step, "val_loss": val_loss})
    if math.isfinite(val_loss):
        return val_loss
    if step == config.steps:
        raise Diverged(f"the last validation loss is {val_loss}")
    return None
