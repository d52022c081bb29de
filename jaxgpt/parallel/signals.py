"""Catch Ctrl-C and SIGTERM: the loop checks for the first signal between steps; a second one ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from jax.experimental import multihost_utils

from jaxgpt.parallel import multihost

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A check for Ctrl-C or SIGTERM, in this process or any other; all processes see it at the same step."""

    def __init__(self) -> None:
        """Start without a signal."""
        self.caught: signal.Signals | None = None  # by this process

    def __call__(self, step: int | None) -> str | None:
        """Return the name of the signal, or None. With `step` None, only this process is checked, not the others."""
        if self.caught is not None:
            return self.caught.name
        asked = step is not None and multihost.is_multiprocess()
        return "SIGTERM" if asked and multihost_utils.reached_preemption_sync_point(step) else None


@contextlib.contextmanager
def catch_signals() -> Iterator[Stop]:
    """Catch the first Ctrl-C or SIGTERM, and restore the previous handlers for the second."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield stop
        return
    several = multihost.is_multiprocess()
    # With several processes, JAX handles SIGTERM and notifies all of them, if no other handler is installed.
    numbers = (signal.SIGINT,) if several else STOP_SIGNALS
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: object) -> None:
        restore()
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            stop.caught = stop.caught or signal.Signals(number)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()


@contextlib.contextmanager
def second_leaves_at_once(say: Callable[[str], None]) -> Iterator[None]:
    """Acknowledge the first signal to a command, by `say`, and end the process on the second.

    A thread does both, because Python's handlers run only after the main thread has left a compilation or a step.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        seen = 0
        while number := os.read(read, 1):
            if number[0] not in STOP_SIGNALS:
                continue
            seen += 1
            name = signal.Signals(number[0]).name
            if seen == 1:
                say(f"{name}: stopping as soon as the progress is saved; a second signal stops at once")
                continue
            say(f"{name}: stopped at once without saving. Finished checkpoints are intact.")
            os._exit(128 + number[0])

    threading.Thread(target=watch, daemon=True, name="signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)  # ends the thread
