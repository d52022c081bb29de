"""A run that stands still ends, in words that say who holds it up; so does one that has lost a process.

Each process has a thread that watches the clock of its main thread. With several processes the threads also tell one
another, once a second, how far each has come: when an exchange between devices breaks or hangs, all processes stand
in the same call, and only those heartbeats tell whose fault it is.
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

STEPS = 20  # median steps without progress, after which a run is stuck
SLOW = 10  # the limit is multiplied by this during a slow operation, such as a save
INTERVAL = 1.0  # seconds between two heartbeats of a process
CROWD = 64  # processes from which on heartbeats grow rarer: each reads all of them, from process 0
GRACE = 5  # intervals of silence after which a process is gone, once an exchange with it has broken
ASLEEP = 5  # intervals between two looks of a thread, after which it was itself suspended


class Watchdog:
    """End the process where `beat` is not called in time. `directory` and `last_step`: for words on how to go on."""

    def __init__(self, seconds: float | None):
        """seconds: the least time without progress that counts as stuck; None or 0: none does."""
        self.directory: Path | None = None
        self.last_step: Callable[[], int | None] = lambda: None
        self._least = seconds
        processes, process = jax.process_count(), jax.process_index()
        self._interval = INTERVAL * max(1.0, processes / CROWD)
        self._me = Heartbeat(process=process, host=socket.gethostname(), pid=os.getpid(), processes=processes)
        self._peers = Peers()
        self.main = MainThread()
        self._turn = self._step = self._pulse = 0
        self._since = self._stepped = self._looked = time.monotonic()
        self._woke, self._slept = -math.inf, 0.0  # when this process was last suspended until, and for how long
        self._durations: deque[float] = deque(maxlen=101)  # of steps, with what lay between them
        self._patience = 1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, step: int, *, slow: bool = False) -> None:
        """Note that the main thread has got here. slow: what comes now may take many times longer than a step: a save."""
        now = time.monotonic()
        if step != self._step:
            if self._turn:
                self._durations.append(now - self._stepped)
            self._stepped = now
        self._patience = SLOW if slow else 1
        self._since, self._step = now, step
        self._turn += 1

    def _limit(self) -> float | None:
        """Return None until the first step is done: it holds compilation, and the devices' first meeting."""
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
            if self._me.processes > 1:
                self._peers.exchange(self._heartbeat())
            self._looked = time.monotonic()
            if ended := self._peers.find_ended():
                self._end(*ended)
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
        """Return the loss of another process that explains a broken exchange, in words, and the status to end with."""
        if ended := self._peers.find_ended():
            return ended
        gone, slept = self._peers.describe_gone(self._me, intervals * self._interval), self._recent_sleep()
        if gone is not None and slept:
            gone = self._say_slept(slept)
        return None if gone is None else (gone, 1)

    def _recent_sleep(self) -> float:
        """Return the seconds for which this process was suspended, 0 if it was not, or long ago."""
        now = time.monotonic()
        if not self._peers.is_asking and now - self._looked > ASLEEP * self._interval:  # the thread has yet to see it
            return now - self._looked
        return self._slept if now - self._woke < multihost.HEARTBEAT else 0.0

    def explain(self) -> tuple[str, int] | None:
        """Return what broke an exchange, if it was the loss of another process: it takes some silence to be sure."""
        deadline = time.monotonic() + (GRACE + 2) * self._interval
        while time.monotonic() < deadline:
            if cause := self._cause(GRACE):
                return cause
            time.sleep(self._interval / 5)
        return None

    def start(self) -> None:
        """Start to watch, where there is something to watch for."""
        if self._least or self._me.processes > 1:
            self._thread.start()

    def stop(self, words: str = "", status: int = 0) -> None:
        """Stop to watch. words: what the others are to say, and to end with; none: they may go on."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(GRACE * self._interval)  # else a last heartbeat of its own might follow this one
        if self._me.processes > 1:
            self._heartbeat().publish_end(words, status)

    def stop_by(self, error: BaseException) -> None:
        """Stop to watch, because of an error of this process alone."""
        if isinstance(error, UserError):
            self.stop(f"{self._me} refuses: {first_line(error)}", 2)
        else:
            self.stop(f"{self._me} has ended: " + f"{type(error).__name__}: {error}".splitlines()[0], 1)

    def on_abort(self) -> None:
        """End this process in JAX's place, which ends it because another is lost, but does not say so."""
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
        return f"{self._me} stood still for {seconds:.0f} s, and the others have ended without it"

    def _say_stuck(self, stuck: list[Heartbeat]) -> str:
        since = f"no progress for {stuck[0].idle:.0f} s, since step {stuck[0].step}"
        if 1 < len(stuck) == self._me.processes:
            return f"all {self._me.processes} processes are stuck in the same exchange: {since}"
        return f"{', '.join(map(str, stuck))} {'are' if len(stuck) > 1 else 'is'} stuck: {since}"

    def words(self, what: str) -> str:
        """Return a message with the last checkpoint and how to continue."""
        saved = None
        with contextlib.suppress(Exception):
            saved = self.last_step()
        command = shell_line("jaxgpt", "train", "--run-dir", self.directory) if self.directory else ""
        again = f" To continue: {command}" if command else ""
        everywhere = ", on every process." if again and self._me.processes > 1 else ""
        return f"{what}. The last checkpoint is {'none' if saved is None else f'step {saved}'}.{again}{everywhere}"

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
        if self._me.processes > 1:
            self._heartbeat().publish_end(what, status)
            multihost.exit_now(status)
        os._exit(status)


@contextlib.contextmanager
def watch(seconds: float | None) -> Iterator[Watchdog]:
    """Watch over what happens inside, in the thread that calls. Raises `ProcessLost` where another process is lost."""
    dog = Watchdog(seconds)
    dog.start()
    with contextlib.ExitStack() as stack:
        stack.enter_context(dog.main.listening())
        if multihost.is_multiprocess():
            stack.enter_context(_instead_of_abort(dog.on_abort))
        try:
            yield dog
        except RaisedOnAllProcesses:
            dog.stop()
            raise
        except BaseException as e:
            # What a broken exchange raises depends on who carried it.
            is_broken = isinstance(e, Exception) and not isinstance(e, UserError) and multihost.is_multiprocess()
            if is_broken and (cause := dog.explain()):
                dog.stop(*cause)
                raise ProcessLost(dog.words(cause[0]), cause[1]) from None
            dog.stop_by(e)
            raise
        dog.stop()


@contextlib.contextmanager
def _instead_of_abort(do: Callable[[], None]) -> Iterator[None]:
    """Call a function where JAX aborts the process because another is lost: its client has no setting against that.

    Python's handlers run in the main thread, later; this one runs where it happens, at once.
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
    cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar has hidden it
    with contextlib.suppress(OSError):  # stderr may be closed, or its disk full: the process ends all the same
        os.write(2, cursor + f"\njaxgpt: {words}\n".encode())
