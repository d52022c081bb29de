"""What the training loop asks of the processes of a run and their devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jaxgpt import callbacks
from jaxgpt.cluster import multihost
from jaxgpt.cluster.replicas import check
from jaxgpt.cluster.watchdog import Watchdog
from jaxgpt.train import TrainState


class Processes(callbacks.Processes):
    """Feed the watchdog, agree through process 0, and compare the copies of the state."""

    def __init__(
        self,
        watchdog: Watchdog,
        devices: Sequence[jax.Device],
        compute_checksums: Callable[[TrainState], jax.Array] | None,
        *,
        every: int | None,
        start: int,
    ):
        """compute_checksums: None: there is one copy. every: steps between comparisons; None: only before a save."""
        self._watchdog, self._devices = watchdog, devices
        self._compute, self._every, self._compared = compute_checksums, every, start

    def beat(self, step: int) -> None:
        """Tell the watchdog that a step begins."""
        self._watchdog.beat(step)

    def agree(self, number: int) -> int:
        """Return in all processes the number of process 0."""
        return multihost.on_process_0(lambda: number)

    def checksums(self, step: int, state: TrainState) -> jax.Array | None:
        """Return a checksum of each copy of the state, still on the device. None: not after this step."""
        is_due = self._compute and self._every and step % self._every == 0
        return self._compute(state) if self._compute and is_due else None

    def compare(self, step: int, checksums: jax.Array) -> None:
        """Raise `ReplicasDiffer` if the checksums differ."""
        check(checksums, self._devices, self._compared, step)
        self._compared = step

    def compare_before_save(self, step: int, state: TrainState) -> None:
        """Raise `ReplicasDiffer` if the copies of the state differ, unless that is known of this step."""
        if self._compute and self._compared < step:
            self.compare(step, self._compute(state))
