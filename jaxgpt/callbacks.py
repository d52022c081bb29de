"""Interfaces of the training loop, which do nothing by default; `runs.callbacks` implements them for runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from jaxgpt.train import TrainState

Metrics = dict[str, Any]  # of a step, from `train_step`


class Log:
    """Record what happens in a run."""

    def step(self, step: int, *, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Record a step that was taken."""

    def compiled(self, step: int, seconds: float) -> None:
        """Record how long the first step took."""

    def validation(self, step: int, val_loss: float) -> None:
        """Record a validation loss."""


class Callbacks:
    """Validate and save; keep processes in step and replicas of the state equal."""

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""

    def agree(self, number: int) -> int:
        """Return the number of process 0 on all processes."""
        return number

    def checksums(self, step: int, state: TrainState) -> jax.Array | None:
        """Return a checksum of each replica of the state, still on the device, or None if none is due."""

    def compare(self, step: int, checksums: jax.Array) -> None:
        """Raise if the checksums differ."""

    def skipped(self, step: int, metrics: Metrics, state: TrainState, later: Sequence[Metrics]) -> None:
        """Record a skipped step. state: the newest; later: metrics of the steps between the skipped one and it."""

    def stop_signal(self, step: int | None) -> str | None:
        """Return the signal that is to end the run, if any, on all processes; or on this one only if step is None."""

    def validate(self, step: int, state: TrainState) -> float | None:
        """Return the validation loss, or None if a signal interrupted it."""

    def save(self, step: int, state: TrainState, val_loss: float | None) -> None:
        """Start saving a checkpoint. val_loss: None if it was not measured at this step, or is not finite."""

    def raise_if_save_failed(self) -> None:
        """Raise if the last save is known to have failed."""

    def wait_for_save(self) -> None:
        """Wait until the last save is on disk."""


NO_LOG, NO_CALLBACKS = Log(), Callbacks()
