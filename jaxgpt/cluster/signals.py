"""Catch Ctrl-C and SIGTERM: the loop learns of the first between two steps, and the second ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from jax.experimental import multihost_utils

from jaxgpt.cluster import multihost

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Tell whether Ctrl-C or SIGTERM has reached this process or, at the same step in all of them, another one."""

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None  # by this process

    def __call__(self, step: int | None) -> str | None:
        """Return the name of the signal, None without one. step: all processes are asked; None: this one alone."""
        if self.caught is not None:
            return self.caught.name
        asked = step is not None and multihost.is_multiprocess()
        return "SIGTERM" if asked and multihost_utils.reached_preemption_sync_point(step) else None


@contextlib.contextmanager
def catch_signals() -> Iterator[Stop]:
    """Catch the first Ctrl-C or SIGTERM; a second one takes its usual course."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield stop
        return
    several = multihost.is_multiprocess()
    # With several processes JAX handles SIGTERM and tells all of them, as long as nobody else does.
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
    """Acknowledge the first signal, and end the process on the second, for a command.

    A thread does both, because Python's own handlers wait as long as the main thread is in a compilation or a step.
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
                say(f"{name}: leaving as soon as what is done is saved; a second one leaves at once")
                continue
            say(f"{name}: left at once, nothing more was saved. The checkpoints that were finished stand.")
            os._exit(128 + number[0])

    threading.Thread(target=watch, daemon=True, name="signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)  # which ends the thread
