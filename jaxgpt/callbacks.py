"""Callbacks of the training loop that do nothing, to train in memory; `runs.callbacks` has those of a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from jaxgpt.train import TrainState

Metrics = dict[str, Any]  # of a step, as `train_step` returns them


class Log:
    """Record what happens in a run."""

    def step(self, step: int, *, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Record a step that was taken."""

    def compiled(self, step: int, seconds: float) -> None:
        """Record how long the first step took."""

    def validation(self, step: int, val_loss: float) -> None:
        """Record a validation loss."""


class Callbacks:
    """Validate and save; keep the processes of a run in step, and the copies of its state equal."""

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""

    def agree(self, number: int) -> int:
        """Return in all processes the number of process 0."""
        return number

    def checksums(self, step: int, state: TrainState) -> jax.Array | None:
        """Return a checksum of each copy of the state, still on the device. None: not after this step."""

    def compare(self, step: int, checksums: jax.Array) -> None:
        """Raise if the checksums differ."""

    def skipped(self, step: int, metrics: Metrics, state: TrainState, later: Sequence[Metrics]) -> None:
        """Record a step that was skipped. state: the newest; later: metrics of the steps between this one and it."""

    def stop_signal(self, step: int | None) -> str | None:
        """Return the name of the signal that is to end the run. step: all processes are asked; None: this one alone."""

    def validate(self, step: int, state: TrainState) -> float | None:
        """Return the validation loss. None: it is not measured, since a signal came between."""

    def save(self, step: int, state: TrainState, val_loss: float | None) -> None:
        """Begin to save a checkpoint. val_loss: of this step; None: not measured, or not finite."""

    def raise_if_save_failed(self) -> None:
        """Raise if the last save is known to have failed."""

    def wait_for_save(self) -> None:
        """Wait until the last save is on disk."""


NO_LOG, NO_CALLBACKS = Log(), Callbacks()
