"""Heartbeats: each process of a run publishes its progress once a second in the key-value store of process 0."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterable

import jax

from jaxgpt.cluster import multihost

FOLDER = "heartbeats"  # of keys in the store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The progress of one process."""

    process: int
    host: str
    pid: int
    processes: int = 1  # of the run
    pulse: int = 0  # iterations of its watchdog's thread: constant only if the process is suspended
    turn: int = 0  # calls of `Watchdog.beat` so far: equal in all processes at the same point of the program
    step: int = 0
    idle: float = 0.0  # seconds since the last `beat`, without compilation, suspension and debugging
    limit: float | None = None  # of `idle`, in seconds; None: not known yet
    ended: str | None = None  # message on why it has ended; empty: it is done; None: it is running
    status: int = 1  # exit status, if it has ended

    def __str__(self) -> str:
        """Return the process's name for messages."""
        return f"process {self.process} of {self.processes} (host {self.host}, pid {self.pid})"

    def publish(self) -> None:
        """Publish this heartbeat to the other processes. Raises `JaxRuntimeError` if process 0 does not answer."""
        multihost.publish(f"{FOLDER}/{self.process}", json.dumps(dataclasses.asdict(self)))

    def publish_end(self, words: str, status: int) -> None:
        """Publish why this process ends and its exit status, if process 0 still answers. Empty `words`: it is done."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            dataclasses.replace(self, ended=words, status=status).publish()


def find_stuck(heartbeats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """Return the processes that block a run: those furthest behind, once each of them is over its limit.

    Until then the others wait without a limit, since a process that is behind may be compiling.
    """
    running = [beat for beat in heartbeats if beat.ended is None]
    behind = [beat for beat in running if beat.turn == min(b.turn for b in running)]
    return behind if all(beat.limit is not None and beat.idle > beat.limit for beat in behind) else []


class Peers:
    """The other processes of a run, as known from their heartbeats."""

    def __init__(self) -> None:
        """Start without heartbeats."""
        self.answered = time.monotonic()  # when process 0 last answered
        self.is_asking = False  # whether a call to process 0 is in progress
        self._heard: dict[int, tuple[Heartbeat, float]] = {}  # the last heartbeat of each, and when it arrived

    def exchange(self, mine: Heartbeat) -> None:
        """Publish this process's heartbeat and read the others'. `answered` is updated only if process 0 answers."""
        self.is_asking = True
        try:
            mine.publish()
            heartbeats = [Heartbeat(**json.loads(text)) for text in multihost.read_published(FOLDER)]
        except jax.errors.JaxRuntimeError:
            return
        finally:
            self.is_asking = False
        self.answered = time.monotonic()
        for beat in heartbeats:
            before = self._heard.get(beat.process)
            if beat.process != mine.process and (before is None or before[0] != beat):
                self._heard[beat.process] = (beat, self.answered)

    def forgive_silence(self, now: float) -> None:
        """Count the others' silence from `now` on, after this process was suspended."""
        self.answered = now
        self._heard = {process: (beat, now) for process, (beat, _) in self._heard.items()}

    def heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeat of each, with the time since then added to `idle`."""
        return [dataclasses.replace(beat, idle=beat.idle + self.answered - at) for beat, at in self._heard.values()]

    def find_ended(self) -> tuple[str, int] | None:
        """Return the message and exit status of a process that ended abnormally; None if none did."""
        return next(((beat.ended, beat.status) for beat, _ in self._heard.values() if beat.ended), None)

    def leader(self, mine: Heartbeat) -> Heartbeat:
        """Return the last heartbeat of process 0."""
        unknown = dataclasses.replace(mine, process=0, host="unknown", pid=0)
        return self._heard[0][0] if 0 in self._heard else unknown

    def describe_gone(self, mine: Heartbeat, seconds: float) -> str | None:
        """Return a message about a process that has been silent for more than `seconds`; None if there is none."""
        unanswered = time.monotonic() - self.answered
        if mine.process and unanswered > seconds:
            return f"{self.leader(mine)} is gone: it has not answered for {unanswered:.0f} s"
        for beat, at in self._heard.values():
            silent = self.answered - at
            if beat.ended is None and silent > seconds:
                return f"{beat} is gone: nothing was heard from it for {silent:.0f} s, since step {beat.step}"
        return None
