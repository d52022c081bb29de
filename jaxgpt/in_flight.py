"""Steps that are dispatched to the devices and not yet finished."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from jaxgpt.callbacks import Callbacks, Log, Metrics
from jaxgpt.errors import Diverged
from jaxgpt.skip import why_skipped

if TYPE_CHECKING:
    import jax

    from jaxgpt.train import TrainState

# On CPU `configure_jax` turns asynchronous dispatch off, so that each step is done when it was dispatched. Elsewhere
# enough to hide the host's work; more would only queue memory, and several fake devices on few cores hang when hundreds
# of steps are in flight.
IN_FLIGHT = 2
LONG_STEP = 1.0  # seconds: such steps are not left in flight, since a signal would have to wait for them


class StepsInFlight:
    """Dispatched steps whose metrics are still on the device, oldest first."""

    def __init__(self, log: Log, callbacks: Callbacks, max_skipped: int):
        """Begin with no steps. max_skipped: skipped steps in a row that end the run."""
        self.limit = 0  # the loop waits for the first steps, which compile and show how long a step takes
        self.skipped_in_a_row = 0  # up to the last step that was settled
        self._log, self._callbacks, self._max_skipped = log, callbacks, max_skipped
        self._steps: deque[tuple[int, Metrics, jax.Array | None]] = deque()

    def add(self, step: int, metrics: Metrics, checksums: jax.Array | None) -> None:
        """Add a step that was just dispatched."""
        self._steps.append((step, metrics, checksums))

    def choose_limit(self, seconds: float) -> None:
        """Choose how many steps may be in flight, the same on all processes. seconds: duration of a step."""
        self.limit = self._callbacks.agree(IN_FLIGHT if seconds < LONG_STEP else 0)

    def settle(self, limit: int, state: TrainState) -> None:
        """Log the oldest steps until at most `limit` are in flight: the loop's only wait for the device.

        state: the newest. Raises `Diverged` after too many skipped steps.
        """
        while len(self._steps) > limit:
            step, metrics, checksums = self._steps.popleft()
            if checksums is not None:
                self._callbacks.compare(step, checksums)
            self.skipped_in_a_row = int(metrics["in_a_row"])
            if not self.skipped_in_a_row:
                numbers = {name: float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")}
                self._log.step(step, **numbers)
                continue
            self._callbacks.skipped(step, metrics, state, [later for _, later, _ in self._steps])
            if self.skipped_in_a_row >= self._max_skipped:
                count = f"{self.skipped_in_a_row} steps in a row were skipped, up to step {step}"
                raise Diverged(f"{count}: {why_skipped(metrics)}")
