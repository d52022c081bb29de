"""End a run of several processes that is stuck or has lost one, with a message that names the process at fault.

In each process, a thread measures the time since the main thread last made progress, and publishes it once a second: if
a collective fails or hangs, all processes are in the same call, and only these heartbeats identify the culprit. A run in
one process is never ended: whatever delays its step may pass, and nobody else waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
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

from jaxgpt.cluster import multihost
from jaxgpt.cluster.heartbeat import Heartbeat, Peers, find_stuck
from jaxgpt.cluster.main_thread import MainThread
from jaxgpt.cluster.multihost import ProcessLost
from jaxgpt.errors import RaisedOnAllProcesses, UserError, first_line, shell_line

STEPS = 20  # durations of a median step without progress after which a run is stuck
SLOW = 10  # factor of the limit during a slow operation, such as a save
INTERVAL = 1.0  # seconds between two heartbeats of a process
CROWD = 64  # processes above which heartbeats are less frequent: each process reads all of them from process 0
GRACE = 5  # intervals of silence after which a process is lost, once a collective has failed
ASLEEP = 5  # intervals between two iterations of a thread after which it must have been suspended


class Watchdog:
    """End the process if `beat` is not called in time."""

    def __init__(self, seconds: float | None):
        """Set the minimum of `seconds` without progress after which a run is stuck; None or 0: it never is."""
        self.directory: Path | None = None  # of the run, for the message on how to continue
        self.last_step: Callable[[], int | None] = lambda: None  # returns the step of the last checkpoint, if any
        self._least = seconds
        processes, process = jax.process_count(), jax.process_index()
        self._interval = INTERVAL * max(1.0, processes / CROWD)
        self._me = Heartbeat(process=process, host=socket.gethostname(), pid=os.getpid(), processes=processes)
        self._peers = Peers()
        self.main = MainThread()
        self._turn = self._step = self._pulse = 0
        self._since = self._stepped = self._looked = time.monotonic()
        self._woke, self._slept = -math.inf, 0.0  # end and duration of the last suspension
        self._durations: deque[float] = deque(maxlen=101)  # of steps, in seconds, from one beat to the next
        self._patience = 1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

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

    def _limit(self) -> float | None:
        """Return the limit in seconds. None until the first step is done, which includes compilation and connecting."""
        if not self._least or not self._durations:
            return None
        return self._patience * max(self._least, STEPS * statistics.median(list(self._durations)))

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            now = time.monotonic()
            if now - self._looked > ASLEEP * self._interval:  # Ctrl-Z, a closed laptop: no time has passed for us
                self._woke, self._slept = now, now - self._looked
                self._since = now
                self._peers.forgive_silence(now)
            elif self.main.is_compiling() or self.main.is_debugged():
                self._since = now
            self._pulse += 1
            self._peers.exchange(self._heartbeat())
            self._looked = time.monotonic()
            if ended := self._peers.find_ended():
                self._end(*ended, stacks=str(self._me) in ended[0])  # another process may find this one stuck first
            elif held_up := find_stuck([self._heartbeat(), *self._peers.heartbeats()]):
                self._end(self._say_stuck(held_up), 1, stacks=True)

    def _heartbeat(self) -> Heartbeat:
        return dataclasses.replace(
            self._me,
            pulse=self._pulse,
            turn=self._turn,
            step=self._step,
            idle=time.monotonic() - self._since,
            limit=self._limit(),
        )

    def _cause(self, intervals: float) -> tuple[str, int] | None:
        """Return a message on the lost process that made a collective fail, and the exit status; None if unknown."""
        if ended := self._peers.find_ended():
            return ended
        gone, slept = self._peers.describe_gone(self._me, intervals * self._interval), self._recent_sleep()
        if gone is not None and slept:
            gone = self._say_slept(slept)
        return None if gone is None else (gone, 1)

    def _recent_sleep(self) -> float:
        """Return the seconds for which this process was recently suspended, or 0."""
        now = time.monotonic()
        if not self._peers.is_asking and now - self._looked > ASLEEP * self._interval:  # not detected by the thread yet
            return now - self._looked
        return self._slept if now - self._woke < multihost.HEARTBEAT else 0.0

    def explain(self) -> tuple[str, int] | None:
        """Wait for signs that a collective failed because a process was lost. Return (message, exit status) or None."""
        deadline = time.monotonic() + (GRACE + 2) * self._interval
        while time.monotonic() < deadline:
            if cause := self._cause(GRACE):
                return cause
            time.sleep(self._interval / 5)
        return None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, words: str = "", status: int = 0) -> None:
        """Stop watching. The others end with `words` and `status`; if `words` is empty, they continue."""
        self._over.set()
        self._thread.join(GRACE * self._interval)  # otherwise its last heartbeat might overwrite this one
        self._heartbeat().publish_end(words, status)

    def stop_by(self, error: BaseException) -> None:
        """Stop watching because of an error in this process only; the others end."""
        is_mistake = isinstance(error, UserError)
        what = first_line(error) if is_mistake else f"{type(error).__name__}: {error}".splitlines()[0]
        self.stop(f"{self._me} has ended: {what}", 2 if is_mistake else 1)

    def on_abort(self) -> None:
        """End this process with a message, when JAX aborts it because another process is lost."""
        if slept := self._recent_sleep():
            otherwise = self._say_slept(slept)
        elif self._me.process:
            otherwise = f"{self._peers.leader(self._me)} is gone: its connection broke"
        else:
            otherwise = "another process is gone, see above"
        words, status = self._cause(GRACE / 2) or (otherwise, 1)
        _say(self.words(words))
        os._exit(status)

    def _say_slept(self, seconds: float) -> str:
        return f"{self._me} was suspended for {seconds:.0f} s, and the others have ended without it"

    def _say_stuck(self, stuck: list[Heartbeat]) -> str:
        since = f"no progress for {stuck[0].idle:.0f} s, since step {stuck[0].step}"
        if 1 < len(stuck) == self._me.processes:
            return f"all {self._me.processes} processes are stuck in the same collective: {since}"
        return f"{', '.join(map(str, stuck))} {'are' if len(stuck) > 1 else 'is'} stuck: {since}"

    def words(self, what: str) -> str:
        """Return a message with the last checkpoint and how to continue."""
        saved = None
        with contextlib.suppress(Exception):
            saved = self.last_step()
        last = "There is no checkpoint" if saved is None else f"The last checkpoint is step {saved}"
        command = shell_line("jaxgpt", "train", "--run-dir", self.directory) if self.directory else ""
        return f"{what}. {last}." + (f" To continue, on every process: {command}" if command else "")

    def _end(self, what: str, status: int, stacks: bool = False) -> None:
        if stacks:
            faulthandler.dump_traceback(2, all_threads=True)
            if self.directory is not None:
                with (
                    contextlib.suppress(OSError),
                    (self.directory / f"stacks.{self._me.process}.txt").open("w") as file,
                ):
                    faulthandler.dump_traceback(file, all_threads=True)
        _say(self.words(what))
        self._heartbeat().publish_end(what, status)
        multihost.exit_now(status)


@contextlib.contextmanager
def watch(seconds: float | None) -> Iterator[Watchdog]:
    """Watch the calling thread inside the context, if there are other processes. Raises `ProcessLost` if one is lost."""
    dog = Watchdog(seconds)
    if not multihost.is_multiprocess():
        yield dog
        return
    dog.start()
    with dog.main.listening(), _instead_of_abort(dog.on_abort):
        try:
            yield dog
        except RaisedOnAllProcesses:
            dog.stop()
            raise
        except BaseException as e:
            # The type of the error of a failed collective depends on the backend.
            is_broken = isinstance(e, Exception) and not isinstance(e, UserError)
            if is_broken and (cause := dog.explain()):
                dog.stop(*cause)
                raise ProcessLost(dog.words(cause[0]), cause[1]) from None
            dog.stop_by(e)
            raise
        dog.stop()


@contextlib.contextmanager
def _instead_of_abort(do: Callable[[], None]) -> Iterator[None]:
    """Call a function when JAX aborts the process because another is lost, which no option of its client prevents.

    Python's signal handlers run later, in the main thread; this one runs immediately, in the aborting thread.
    """
    if os.name != "posix":
        yield
        return
    set_handler: Any = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: do())
    before = set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGABRT, before)


def _say(words: str) -> None:
    """Write to stderr past Python's buffers, whose locks the main thread may hold."""
    cursor = b"\x1b[?25h" if os.isatty(2) else b""  # show it again: a progress bar hides it
    with contextlib.suppress(OSError):  # stderr may be closed, or its disk full; the process must end anyway
        os.write(2, cursor + f"\njaxgpt: {words}\n".encode())
