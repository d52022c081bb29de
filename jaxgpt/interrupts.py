"""Ctrl-C and SIGTERM, told to the loop between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from jaxgpt.parallel import multihost


@contextlib.contextmanager
def signals() -> Iterator[list[signal.Signals]]:
    """A list that Ctrl-C or SIGTERM fills; a second one takes its usual course at once."""
    caught: list[signal.Signals] = []
    # Python handles signals only in the main thread; with several processes JAX does, and tells all of them.
    if threading.current_thread() is not threading.main_thread() or multihost.several():
        yield caught
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: object) -> None:
        caught.append(signal.Signals(number))
        restore()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield caught
    finally:
        restore()
