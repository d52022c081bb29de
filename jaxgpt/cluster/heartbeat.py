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
    pulse: int = 0  # of its watchdog's thread: stands still when the whole process does
    turn: int = 0  # beats of its main thread so far: the same in all processes that are at the same place
    step: int = 0
    idle: float = 0.0  # seconds since the last of them, without compilation, suspension and debugging
    limit: float | None = None  # of `idle`; None: not known yet
    ended: str | None = None  # why it has ended, as all are to say; empty: as it should
    status: int = 1  # with which it has ended

    def __str__(self) -> str:
        if self.processes == 1:
            return "this process"
        return f"process {self.process} of {self.processes} (host {self.host}, pid {self.pid})"

    def publish(self) -> None:
        """Tell the other processes. Raises `JaxRuntimeError` if process 0 does not answer."""
        multihost.publish(f"{FOLDER}/{self.process}", json.dumps(dataclasses.asdict(self)))

    def publish_end(self, words: str, status: int) -> None:
        """Tell the other processes why this one ends, if process 0 still answers. words: empty: as it should."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            dataclasses.replace(self, ended=words, status=status).publish()


def find_stuck(heartbeats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """Return the processes that hold up a run in which nothing moves: those furthest behind, once each is over its limit.

    Until then the others wait, however long: one that is behind may be compiling.
    """
    running = [beat for beat in heartbeats if beat.ended is None]
    behind = [beat for beat in running if beat.turn == min(b.turn for b in running)]
    return behind if all(beat.limit is not None and beat.idle > beat.limit for beat in behind) else []


class Peers:
    """The other processes of a run."""

    def __init__(self) -> None:
        self.answered = time.monotonic()  # when process 0 last answered
        self.is_asking = False  # it, now
        self._heard: dict[int, tuple[Heartbeat, float]] = {}  # the last heartbeat of each, and when it came

    def exchange(self, mine: Heartbeat) -> None:
        """Publish this process's heartbeat, and read the others'. Where process 0 is silent, `answered` stays behind."""
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
        """Count the others' silence from now on: this process has slept."""
        self.answered = now
        self._heard = {process: (beat, now) for process, (beat, _) in self._heard.items()}

    def heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeats. One that has been silent since has been idle all that time."""
        return [dataclasses.replace(beat, idle=beat.idle + self.answered - at) for beat, at in self._heard.values()]

    def find_ended(self) -> tuple[str, int] | None:
        """Return why one of them has ended otherwise than it should, and the status to end with."""
        return next(((beat.ended, beat.status) for beat, _ in self._heard.values() if beat.ended), None)

    def leader(self, mine: Heartbeat) -> Heartbeat:
        """Return the last heartbeat of process 0."""
        unknown = dataclasses.replace(mine, process=0, host="unknown", pid=0)
        return self._heard[0][0] if 0 in self._heard else unknown

    def describe_gone(self, mine: Heartbeat, seconds: float) -> str | None:
        """Return a message about a process whose last heartbeat is older than `seconds`; None if there is none."""
        unanswered = time.monotonic() - self.answered
        if mine.process and unanswered > seconds:
            return f"{self.leader(mine)} is gone: it has not answered for {unanswered:.0f} s"
        for beat, at in self._heard.values():
            silent = self.answered - at
            if beat.ended is None and silent > seconds:
                return f"{beat} is gone: nothing was heard from it for {silent:.0f} s, since step {beat.step}"
        return None
