"""A run that stands still ends, in words that say who holds it up; so does one that has lost a process.

Each process has a thread that watches the clock of its main thread. With several processes the threads also tell one
another, once a second, how far each has come: when an exchange between devices breaks or hangs, all processes stand
in the same call, and only those notes tell whose fault it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxgpt.cluster import multihost
from jaxgpt.cluster.main_thread import MainThread
from jaxgpt.cluster.multihost import ProcessLost
from jaxgpt.errors import RaisedOnAllProcesses, UserError, shell_line

T = TypeVar("T")

STEPS = 20  # median steps without progress, after which a run is stuck
SLOW = 10  # times as much patience with what is told to be slow: a save
INTERVAL = 1.0  # seconds between two notes of a process
CROWD = 64  # processes from which on the notes grow rarer: each reads all of them, from process 0
GRACE = 5  # intervals of silence after which a process is gone, once an exchange with it has broken
ASLEEP = 5  # intervals between two looks of a thread, after which it was itself suspended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """How far a process has come, as it says itself."""

    process: int
    host: str
    pid: int
    pulse: int = 0  # of its thread: stands still when the whole process does
    turn: int = 0  # calls of `beat` so far: the same in all processes that are at the same place
    step: int = 0
    idle: float = 0.0  # seconds since the last of them, without compilation, suspension and debugging
    limit: float | None = None  # of `idle`; None: not known yet
    ended: str | None = None  # why it has ended, as all are to say; empty: as it should
    status: int = 1  # with which it has ended

    @property
    def stuck(self) -> bool:
        return self.ended is None and self.limit is not None and self.idle > self.limit


def stuck(notes: Iterable[Note]) -> list[Note]:
    """Those who hold up a run in which nothing moves: the ones furthest behind, once each is over its own limit.

    Until then the others wait, however long: it may be compiling.
    """
    running = [note for note in notes if note.ended is None]
    behind = [note for note in running if note.turn == min(n.turn for n in running)]
    return behind if all(note.stuck for note in behind) else []


class Watchdog:
    """Fed by `beat`. `directory` and `last_step`, once known, let the last words say how to go on."""

    def __init__(self, seconds: float | None):
        """seconds: the least time without progress that counts as stuck; None or 0: none does."""
        self.directory: Path | None = None
        self.last_step: Callable[[], int | None] = lambda: None
        self._least = seconds
        self._processes, me = jax.process_count(), jax.process_index()
        self._interval = INTERVAL * max(1.0, self._processes / CROWD)
        self._me = Note(process=me, host=socket.gethostname(), pid=os.getpid())
        self.main = MainThread()
        self._turn = self._step = self._pulse = 0
        self._since = self._stepped = self._looked = self._answered = time.monotonic()
        self._woke, self._slept = -math.inf, 0.0  # when this process was last suspended until, and for how long
        self._asking = False
        self._durations: deque[float] = deque(maxlen=101)  # of steps, with what lay between them
        self._patience = 1
        self._heard: dict[int, tuple[Note, float]] = {}  # the last note of each other process, and when it came
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, step: int, *, slow: bool = False) -> None:
        """The main thread got here. slow: what comes now may take many times longer than a step, such as a save."""
        now = time.monotonic()
        if step != self._step:
            if self._turn:
                self._durations.append(now - self._stepped)
            self._stepped = now
        self._patience = SLOW if slow else 1
        self._since, self._step = now, step
        self._turn += 1

    def each(self, items: Iterable[T], step: int) -> Iterator[T]:
        """The items, with a beat before each."""
        for item in items:
            self.beat(step)
            yield item

    def _limit(self) -> float | None:
        """Unknown until the first step is done: it holds compilation, and the devices' first meeting."""
        if not self._least or not self._durations:
            return None
        return self._patience * max(self._least, STEPS * statistics.median(list(self._durations)))

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            now = time.monotonic()
            if now - self._looked > ASLEEP * self._interval:  # Ctrl-Z, a closed laptop: no time has passed for us
                self._woke, self._slept = now, now - self._looked
                self._since = self._answered = now
                self._heard = {process: (note, now) for process, (note, _) in self._heard.items()}
            elif self.main.is_compiling() or self.main.is_debugged():
                self._since = now
            self._pulse += 1
            if self._processes > 1:
                self._exchange()
            self._looked = time.monotonic()
            if (ended := self._ended()) is not None:
                self._end(ended.ended or "", ended.status)
            elif held_up := stuck(self._notes()):
                self._end(self._say_stuck(held_up), 1, stacks=True)

    def _exchange(self) -> None:
        self._asking = True
        try:
            self._publish(self._mine())
            notes = [Note(**json.loads(text)) for text in multihost.published("notes")]
        except jax.errors.JaxRuntimeError:  # process 0 does not answer: `_answered` stays behind
            return
        finally:
            self._asking = False
        self._answered = now = time.monotonic()
        for note in notes:
            before = self._heard.get(note.process)
            if note.process != self._me.process and (before is None or before[0] != note):
                self._heard[note.process] = (note, now)

    def _notes(self) -> list[Note]:
        """Of all: one that is silent has been idle all that time."""
        others = (dataclasses.replace(note, idle=note.idle + self._answered - at) for note, at in self._heard.values())
        return [self._mine(), *others]

    def _mine(self) -> Note:
        return dataclasses.replace(
            self._me,
            pulse=self._pulse,
            turn=self._turn,
            step=self._step,
            idle=time.monotonic() - self._since,
            limit=self._limit(),
        )

    def _publish(self, note: Note) -> None:
        multihost.publish(f"notes/{note.process}", json.dumps(dataclasses.asdict(note)))

    def _ended(self) -> Note | None:
        return next((note for note, _ in self._heard.values() if note.ended), None)

    def _gone(self, intervals: float) -> str | None:
        """Who has ended without a word, in words."""
        unanswered = time.monotonic() - self._answered
        if self._me.process and unanswered > intervals * self._interval:
            return f"{self._name(self._leader())} is gone: it has not answered for {unanswered:.0f} s"
        for note, at in self._heard.values():
            silent = self._answered - at
            if note.ended is None and silent > intervals * self._interval:
                return (
                    f"{self._name(note)} is gone: nothing was heard from it for {silent:.0f} s, since step {note.step}"
                )
        return None

    def _cause(self, intervals: float) -> tuple[str, int] | None:
        """The loss of another process that explains a broken exchange, in words, and the status to end with."""
        if (ended := self._ended()) is not None:
            return ended.ended or "", ended.status
        gone, slept = self._gone(intervals), self._recent_sleep()
        if gone is not None and slept:
            gone = self._say_slept(slept)
        return None if gone is None else (gone, 1)

    def _recent_sleep(self) -> float:
        now = time.monotonic()
        if not self._asking and now - self._looked > ASLEEP * self._interval:  # the thread has yet to see it
            return now - self._looked
        return self._slept if now - self._woke < multihost.HEARTBEAT else 0.0

    def explain(self) -> tuple[str, int] | None:
        """What broke an exchange, if it was the loss of another process: it takes some silence to be sure."""
        deadline = time.monotonic() + (GRACE + 2) * self._interval
        while time.monotonic() < deadline:
            if cause := self._cause(GRACE):
                return cause
            time.sleep(self._interval / 5)
        return None

    def start(self) -> None:
        if self._least or self._processes > 1:  # else there is nothing to watch for
            self._thread.start()

    def stop(self, words: str = "", status: int = 0) -> None:
        """words: what the others are to say, and to end with; none: they may go on."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(GRACE * self._interval)  # else a last note of its own might follow this one
        if self._processes > 1:
            self._say_goodbye(words, status)

    def stop_by(self, error: BaseException) -> None:
        """Of an error of this process alone."""
        what = str(error).splitlines() or [""]
        if isinstance(error, UserError):
            self.stop(f"{self._name(self._me)} refuses: {what[0]}", 2)
        else:
            self.stop(f"{self._name(self._me)} has ended: {type(error).__name__}: {what[0]}", 1)

    def on_abort(self) -> None:
        """JAX ends this process because another is lost; it knows that, but not how to say it."""
        if slept := self._recent_sleep():
            otherwise = self._say_slept(slept)
        elif self._me.process:
            otherwise = f"{self._name(self._leader())} is gone: its connection broke"
        else:
            otherwise = "another process is gone, see above"
        words, status = self._cause(GRACE / 2) or (otherwise, 1)
        _say(self.words(words))
        os._exit(status)

    def _leader(self) -> Note:
        return (
            self._heard[0][0] if 0 in self._heard else dataclasses.replace(self._me, process=0, host="unknown", pid=0)
        )

    def _name(self, note: Note) -> str:
        if self._processes == 1:
            return "this process"
        return f"process {note.process} of {self._processes} (host {note.host}, pid {note.pid})"

    def _say_slept(self, seconds: float) -> str:
        return f"{self._name(self._me)} stood still for {seconds:.0f} s, and the others have ended without it"

    def _say_stuck(self, notes: list[Note]) -> str:
        since = f"no progress for {notes[0].idle:.0f} s, since step {notes[0].step}"
        if 1 < len(notes) == self._processes:
            return f"all {self._processes} processes are stuck in the same exchange: {since}"
        names = ", ".join(self._name(note) for note in notes)
        return f"{names} {'are' if len(notes) > 1 else 'is'} stuck: {since}"

    def words(self, what: str) -> str:
        saved = None
        with contextlib.suppress(Exception):
            saved = self.last_step()
        command = shell_line("jaxgpt", "train", "--run-dir", self.directory) if self.directory else ""
        again = f" To continue: {command}" if command else ""
        everywhere = ", on every process." if again and self._processes > 1 else ""
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
        if self._processes > 1:
            self._say_goodbye(what, status)
            multihost.exit_now(status)
        os._exit(status)

    def _say_goodbye(self, words: str, status: int) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 may have ended before
            self._publish(dataclasses.replace(self._mine(), ended=words, status=status))


@contextlib.contextmanager
def watch(seconds: float | None) -> Iterator[Watchdog]:
    """A watchdog over what happens inside, in the thread that calls. Raises `ProcessLost` where another one is."""
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
        except Exception as e:  # what a broken exchange raises depends on who carried it
            alone = isinstance(e, UserError) or not multihost.is_multiprocess()
            if cause := None if alone else dog.explain():
                dog.stop(*cause)
                raise ProcessLost(dog.words(cause[0]), cause[1]) from None
            dog.stop_by(e)
            raise
        except BaseException as e:
            dog.stop_by(e)
            raise
        dog.stop()


@contextlib.contextmanager
def _instead_of_abort(do: Callable[[], None]) -> Iterator[None]:
    """JAX's client aborts the process from a thread of its own when another is lost, and has no setting against it.

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
    """Past Python's buffers, whose locks the main thread may hold."""
    cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar has hidden it
    with contextlib.suppress(OSError):  # stderr may be closed, or its disk full: the process ends all the same
        os.write(2, cursor + f"\njaxgpt: {words}\n".encode())
