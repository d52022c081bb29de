"""End a run of several processes that is stuck or has lost one, with a message that names the process at fault.

If a collective fails or hangs, all processes are in the same call. Each then says in process 0's key-value store how far
it has come: those that say nothing are gone, and those furthest behind are stuck. A run in one process is never ended:
whatever delays its step may pass, and nobody else waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import math
import os
import signal
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxgpt.errors import RaisedOnAllProcesses, UserError, first_line, shell_line
from jaxgpt.parallel import multihost
from jaxgpt.parallel.multihost import ProcessLost

STEPS = 20  # durations of a median step without progress after which a run is stuck
SLOW = 10  # factor of the limit during a slow operation, such as a save or a first validation, which compiles
INTERVAL = 1.0  # seconds between two looks of the thread
GRACE = 5  # intervals in which every process that is not gone says how far it has come


class Watchdog:
    """End the process if `beat` is not called in time, or if another process has ended."""

    def __init__(self, seconds: float | None):
        """Set the minimum of `seconds` without progress after which a run is stuck; None or 0: it never is."""
        self.directory: Path | None = None  # of the run, for the message on how to continue
        self.last_step: Callable[[], int | None] = lambda: None  # returns the step of the last checkpoint, if any
        self._least = seconds
        self.process, self.processes = jax.process_index(), jax.process_count()
        self.name = f"process {self.process} of {self.processes} (host {socket.gethostname()}, pid {os.getpid()})"
        self._turn = self._step = 0
        self._since = self._stepped = time.monotonic()
        self._durations: deque[float] = deque(maxlen=101)  # of steps, in seconds, from one beat to the next
        self._patience = 1
        self._over = threading.Event()

    def beat(self, step: int, *, slow: bool = False) -> None:
        """Record progress of the main thread. `slow`: what follows, such as a save, may take far longer than a step."""
        now = time.monotonic()
        if step != self._step:
            if self._turn:
                self._durations.append(now - self._stepped)
            self._stepped = now
        self._patience = SLOW if slow else 1
        self._since, self._step = now, step
        self._turn += 1

    def _watch(self) -> None:
        asked = 0  # processes that look for a culprit
        while not self._over.wait(INTERVAL):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone: JAX ends this one
                if ended := multihost.read_published("ended"):
                    words, status = json.loads(ended[0])
                    self._end(words, status, stacks=words.startswith(self.name))
                # There is no limit before the first step is done, which includes compilation and connecting.
                typical = statistics.median([*self._durations] or [math.inf])
                idle = time.monotonic() - self._since
                if self._least and idle > self._patience * max(self._least, STEPS * typical):
                    gone, stuck = self.find_culprit()
                    self._end(f"{gone or stuck}: no progress for {idle:.0f} s, since step {self._step}", 1, stacks=True)
                if asked < (asked := len(multihost.read_published("turns"))):
                    self._publish_turn()

    def _publish_turn(self) -> None:
        multihost.publish(f"turns/{self.process}", json.dumps([self.process, self.name, self._turn]))

    def find_culprit(self) -> tuple[str | None, str | None]:
        """Ask all processes how far they have come. Return messages on those that are gone, and on those that are stuck."""
        try:
            self._publish_turn()
            time.sleep(GRACE * INTERVAL)
            turns = {
                process: (name, turn) for process, name, turn in map(json.loads, multihost.read_published("turns"))
            }
        except jax.errors.JaxRuntimeError:
            return f"process 0 of {self.processes} is gone: it does not answer", None
        if gone := [str(process) for process in range(self.processes) if process not in turns]:
            return f"process {', '.join(gone)} of {self.processes} {'are' if len(gone) > 1 else 'is'} gone", None
        least = min(turn for _, turn in turns.values())
        stuck = [name for name, turn in turns.values() if turn == least]
        if len(stuck) == len(turns):
            return None, f"all {self.processes} processes are stuck in the same collective"
        return None, f"{', '.join(stuck)} {'are' if len(stuck) > 1 else 'is'} stuck"

    def stop(self, words: str = "", status: int = 0) -> None:
        """Stop watching. The others end with `words` and `status`; if `words` is empty, they continue."""
        self._over.set()
        if words:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                multihost.publish(f"ended/{self.process}", json.dumps([words, status]))

    def explain(self) -> tuple[str, int] | None:
        """Return (message, exit status) if a collective failed because another process has ended or is gone."""
        gone, _ = self.find_culprit()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if ended := multihost.read_published("ended"):
                words, status = json.loads(ended[0])
                return words, status
        return None if gone is None else (gone, 1)

    def say(self, what: str) -> None:
        """Write a message to stderr, past Python's buffers, whose locks the main thread may hold."""
        cursor = b"\x1b[?25h" if os.isatty(2) else b""  # show it again: a progress bar hides it
        with contextlib.suppress(OSError):  # stderr may be closed, or its disk full; the process must end anyway
            os.write(2, cursor + f"\njaxgpt: {self.words(what)}\n".encode())

    def words(self, what: str) -> str:
        """Return a message with the last checkpoint and how to continue."""
        saved = None
        with contextlib.suppress(Exception):
            saved = self.last_step()
        last = "There is no checkpoint" if saved is None else f"The last checkpoint is step {saved}"
        command = shell_line("jaxgpt", "train", "--run-dir", self.directory) if self.directory else ""
        return f"{what}. {last}." + (f" To continue, on every process: {command}" if command else "")

    def _end(self, what: str, status: int, *, stacks: bool) -> None:
        if stacks:
            faulthandler.dump_traceback(2, all_threads=True)
        self.say(what)
        self.stop(what, status)
        multihost.exit_now(status)


@contextlib.contextmanager
def watch(seconds: float | None) -> Iterator[Watchdog]:
    """Watch the calling thread inside the context, if there are other processes. Raises `ProcessLost` if one is lost."""
    dog = Watchdog(seconds)
    if not multihost.is_multiprocess():
        yield dog
        return
    threading.Thread(target=dog._watch, name="watchdog", daemon=True).start()
    with _instead_of_abort(dog):
        try:
            yield dog
        except RaisedOnAllProcesses:
            raise
        except BaseException as e:
            # The type of the error of a failed collective depends on the backend.
            if isinstance(e, Exception) and not isinstance(e, UserError) and (cause := dog.explain()):
                dog.stop(*cause)
                raise ProcessLost(dog.words(cause[0]), cause[1]) from None
            is_mistake = isinstance(e, UserError)
            what = first_line(e) if is_mistake else f"{type(e).__name__}: {e}".splitlines()[0]
            dog.stop(f"{dog.name} has ended: {what}", 2 if is_mistake else 1)
            raise
        finally:
            dog.stop()


@contextlib.contextmanager
def _instead_of_abort(dog: Watchdog) -> Iterator[None]:
    """End the process with a message when JAX aborts it because another is lost, which no option of its client prevents.

    Python's signal handlers run later, in the main thread; this one runs immediately, in the aborting thread.
    """
    if os.name != "posix":
        yield
        return

    def end(_: int) -> None:
        dog.say("another process is gone, or did not hear of this one: see above")
        os._exit(1)

    set_handler: Any = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    before = set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGABRT, before)
