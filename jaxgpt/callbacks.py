"""What the training loop calls. These do nothing, so that it can train in memory; `session` hands in those of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from jaxgpt.train import TrainState

Metrics = dict[str, Any]  # of a step, as `train_step` returns them
# (a skipped step, its metrics, the newest state, the metrics of the steps from the skipped one to that state) -> nothing
OnSkipped = Callable[[int, Metrics, "TrainState", Sequence[Metrics]], None]


class Log:
    """Record what happens in a run."""

    def step(self, step: int, *, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Record a step that was taken."""

    def compiled(self, step: int, seconds: float) -> None:
        """Record how long the first step took."""

    def validation(self, step: int, val_loss: float) -> None:
        """Record a validation loss."""


class Saver:
    """Save checkpoints."""

    def save(self, state: TrainState, step: int, val_loss: float | None) -> None:
        """Begin to save. val_loss: of this step; None: not measured, or not finite."""

    def raise_if_failed(self) -> None:
        """Raise if the last save is known to have failed."""

    def wait(self) -> None:
        """Wait until the last save is on disk."""


class Processes:
    """Keep the processes of a run in step, and the copies of the state that their devices hold equal."""

    def beat(self, step: int) -> None:
        """Tell a watchdog that a step begins."""

    def agree(self, number: int) -> int:
        """Return in all processes the number of process 0."""
        return number

    def checksums(self, step: int, state: TrainState) -> jax.Array | None:
        """Return a checksum of each copy of the state, still on the device. None: not after this step."""

    def compare(self, step: int, checksums: jax.Array) -> None:
        """Raise if the checksums differ."""


NO_LOG, NO_SAVER, ONE_PROCESS = Log(), Saver(), Processes()
