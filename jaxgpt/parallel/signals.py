"""Catch Ctrl-C and SIGTERM: the loop checks for the first signal between steps, and a second one ends the process."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from jax.experimental import multihost_utils

from jaxgpt.parallel import multihost

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# (step) -> the name of a signal that any process has caught, for all processes at the same step, or None. With step
# None, only this process is asked.
Stop = Callable[[int | None], str | None]


@contextlib.contextmanager
def catch_signals() -> Iterator[Stop]:
    """Catch the first Ctrl-C or SIGTERM. A second one ends the process at once, without Python's help.

    In an interactive session, such as a notebook, the second one has its usual effect instead.
    """
    caught = []  # signals that this process has caught
    several = multihost.is_multiprocess()

    def stop(step: int | None) -> str | None:
        if step is not None and several and multihost_utils.reached_preemption_sync_point(step):
            return "SIGTERM"
        return next(iter(caught), None)

    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield stop
        return
    # With several processes, JAX handles SIGTERM and notifies all of them, if no other handler is installed.
    before = {number: signal.getsignal(number) for number in (STOP_SIGNALS[:1] if several else STOP_SIGNALS)}

    def on_signal(number: int, frame: object) -> None:
        for each, handler in before.items():
            signal.signal(each, handler if hasattr(sys, "ps1") else signal.SIG_DFL)
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            caught.append(signal.Signals(number).name)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
