"""Catch Ctrl-C and SIGTERM: the loop checks for the first signal between steps, and a second one ends the process."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from jax.experimental import multihost_utils

from jaxgpt.parallel import multihost

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# (step) -> the name of a signal that any process has caught, for all processes at the same step, or None. With step
# None, only this process is asked.
Stop = Callable[[int | None], str | None]


@contextlib.contextmanager
def catch_signals() -> Iterator[Stop]:
    """Catch the first Ctrl-C or SIGTERM, and restore the previous handlers for the second."""
    caught: list[str] = []  # signals that this process has caught
    several = multihost.is_multiprocess()

    def stop(step: int | None) -> str | None:
        if caught:
            return caught[0]
        asked = step is not None and several
        return "SIGTERM" if asked and multihost_utils.reached_preemption_sync_point(step) else None

    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield stop
        return
    # With several processes, JAX handles SIGTERM and notifies all of them, if no other handler is installed.
    before = {number: signal.getsignal(number) for number in (STOP_SIGNALS[:1] if several else STOP_SIGNALS)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: object) -> None:
        restore()
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            caught.append(signal.Signals(number).name)

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
        is_first = True
        while number := os.read(read, 1):
            if number[0] not in STOP_SIGNALS:
                continue
            name = signal.Signals(number[0]).name
            if not is_first:
                say(f"{name}: stopped at once without saving. Finished checkpoints are intact.")
                os._exit(128 + number[0])
            say(f"{name}: stopping as soon as the progress is saved; a second signal stops at once")
            is_first = False

    threading.Thread(target=watch, daemon=True, name="signals").start()
    try:
        yield
    except KeyboardInterrupt as e:
        if type(e) is KeyboardInterrupt:  # perhaps by a second signal: then the thread ends the process meanwhile
            time.sleep(0.5)
        raise
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)  # ends the thread
