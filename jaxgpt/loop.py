"""The training loop. It opens no directory, chooses no device and draws no page."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jaxgpt.batch import Batch
from jaxgpt.callbacks import NO_CALLBACKS, NO_LOG, Callbacks, Log, Metrics
from jaxgpt.config import TrainConfig
from jaxgpt.errors import Diverged, Preempted
from jaxgpt.in_flight import StepsInFlight

if TYPE_CHECKING:
    import jax

    from jaxgpt.train import TrainState

# Steps between two decisions of process 0 on how many steps may be in flight. All processes settle the same steps at
# the same time: when one raises, all have dispatched the same steps.
AGREE_EVERY = 100


@dataclasses.dataclass
class SaveSchedule:
    """Decide after which steps a checkpoint is due. It stays due until `is_due` is reset."""

    config: TrainConfig
    best: float  # the lowest validation loss of a checkpoint so far
    is_due: bool = False

    def update(self, step: int, val_loss: float | None, *, stopping: bool) -> bool:
        """Return whether a checkpoint is due: every checkpoint_every steps, at the best loss so far, and at the end."""
        is_best = val_loss is not None and val_loss < self.best
        if is_best:
            self.best = val_loss
        is_regular = step % self.config.checkpoint_every == 0 or step == self.config.steps
        self.is_due = self.is_due or is_regular or is_best or stopping
        return self.is_due


def train(
    train_step: Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: Iterator[Batch],
    *,
    config: TrainConfig,
    max_skipped: int,
    key: jax.Array,
    start: int = 0,
    best: float = math.inf,
    log: Log = NO_LOG,
    callbacks: Callbacks = NO_CALLBACKS,
) -> TrainState:
    """Take steps start + 1 to config.steps, and return the last state.

    `train_step` is compiled, and may donate the state. `key` is the run's, for dropout. `best` is the lowest validation
    loss of earlier checkpoints. Raises `Preempted` after a signal and a save, and `Diverged` after `max_skipped`
    skipped steps in a row, or if the last validation loss is not finite.
    """
    in_flight, schedule = StepsInFlight(log, callbacks, max_skipped), SaveSchedule(config, best)
    for step in range(start + 1, config.steps + 1):
        began = time.monotonic()
        batch = next(batches)
        callbacks.begin_step(step)
        state, metrics = train_step(state, batch, key)
        in_flight.add(step, metrics, callbacks.checksums(step, state))
        in_flight.settle(in_flight.limit, state)
        seconds = time.monotonic() - began
        if step == start + 1:
            log.compiled(step, seconds)
        if step == start + 2 or step % AGREE_EVERY == 0:
            in_flight.choose_limit(seconds)
        callbacks.raise_if_save_failed()

        signal, val_loss = callbacks.stop_signal(step), None
        if signal is None and is_eval_step(step, config):
            in_flight.settle(0, state)
            val_loss = callbacks.validate(step, state)
            signal = callbacks.stop_signal(None)
        if val_loss is not None:
            val_loss = log_validation(log, step, val_loss, config)
        if schedule.update(step, val_loss, stopping=signal is not None):
            in_flight.settle(0, state)
            # After skipped steps the parameters may be bad, unless the validation loss is finite. They must not replace
            # good ones: the next step taken is saved instead.
            if not in_flight.skipped_in_a_row or val_loss is not None or signal is not None:
                callbacks.save(step, state, val_loss)
                schedule.is_due = False
        if signal is not None:
            callbacks.wait_for_save()
            raise Preempted(f"{signal}: saved step {step} of {config.steps}")
    callbacks.wait_for_save()
    return state


def is_eval_step(step: int, config: TrainConfig) -> bool:
    """Return whether the validation loss is measured after a step."""
    return step % config.eval_every == 0 or step == config.steps


def log_validation(log: Log, step: int, val_loss: float, config: TrainConfig) -> float | None:
    """Log a validation loss. Return it if it is finite; raise `Diverged` if it is not, and the run's last."""
    log.validation(step, val_loss)
    if math.isfinite(val_loss):
        return val_loss
    if step == config.steps:
        raise Diverged(f"the last validation loss is {val_loss}")
    return None
