"""Ctrl-C and SIGTERM, told to the loop between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from jaxgpt.parallel import multihost


@contextlib.contextmanager
def signals() -> Iterator[list[signal.Signals]]:
    """A list that Ctrl-C or SIGTERM fills; a second one takes its usual course at once."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield caught
        return
    several = multihost.several()
    # With several processes JAX handles SIGTERM and tells all of them, as long as nobody else does.
    numbers = (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: object) -> None:
        restore()
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            caught.append(signal.Signals(number))

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield caught
    finally:
        restore()
