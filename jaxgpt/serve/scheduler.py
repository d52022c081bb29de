"""The thread that decodes: a bounded queue of rows in, updates out. All of JAX's work for requests is done here.

Every turn of its loop takes cancellations, scores at most one prompt, fills free slots, and decodes one burst, so that a
client waits for another by at most one burst and one prompt.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

import jax

from jaxgpt.errors import UserError
from jaxgpt.sample import Sampling
from jaxgpt.sample.engine import Piece, Request, prompt_key
from jaxgpt.sample.score import PromptScores
from jaxgpt.serve.errors import RequestError

BURST, BURST_SECONDS = 8, 0.05  # most tokens, and about the most time, between two looks at the queue
RETRY_AFTER = 1  # seconds, after which a client may try again


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One choice to generate."""

    prompt: tuple[int, ...]
    source: tuple[int, ...] | None = None  # for a model with an encoder
    seed: int
    earlier: int = 0  # equal prompts before it in its request, whose draws differ
    max_new_tokens: int  # 0: only the scores of the prompt
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    top_logprobs: int | None = None  # see `engine.Request`
    scored: bool = False  # whether the prompt's log-probabilities are needed


class Update(NamedTuple):
    """News of one row of a request."""

    row: int
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    finish: str | None  # see `engine.Piece`
    cached_tokens: int = 0  # prompt tokens whose keys and values were reused
    prompt: PromptScores | None = None  # in the first update of a scored row


class DecodingEngine(Protocol):
    """Interface of `jaxgpt.sample.engine.Engine`."""

    slots: int

    @property
    def num_free(self) -> int:
        """Return the number of slots without a request."""
        ...

    def submit(self, request: Request) -> int:
        """Put a request into a free slot."""
        ...

    def step(self, burst: int = 8) -> list[Piece]:
        """Read part of a prompt, and decode a burst."""
        ...

    def cancel(self, slot: int) -> None:
        """Free a slot."""
        ...

    def cached_tokens(self, slot: int) -> int:
        """Return the number of prompt tokens that were reused."""
        ...


class Ticket:
    """The rows of one request in the scheduler. Its methods belong to the event loop."""

    def __init__(self, rows: Sequence[Row], wake: Callable[[Ticket], None]):
        """Start with nothing done. wake: called once rows need not go on."""
        self.rows, self._wake = rows, wake
        self.finished = [False] * len(rows)  # written by the event loop, read by the scheduler's thread
        self._loop, self._updates = asyncio.get_running_loop(), asyncio.Queue[Update | Exception]()

    def deliver(self, update: Update | Exception) -> None:
        """Hand over an update, from another thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates until all rows have finished. Raises what went wrong in the scheduler's thread."""
        while not all(self.finished):
            update = await self._updates.get()
            if isinstance(update, Exception):
                raise update
            if self.finished[update.row]:
                continue
            self.finished[update.row] = update.finish is not None
            yield update

    def finish(self, row: int | None = None) -> None:
        """Free the slot of a row, or of all rows, within one burst."""
        if not all(self.finished if row is None else [self.finished[row]]):
            for number in range(len(self.rows)) if row is None else [row]:
                self.finished[number] = True
            self._wake(self)


class Scheduler:
    """Decode the rows of many requests in the slots of one engine."""

    def __init__(
        self,
        engine: DecodingEngine,
        score: Callable[[Sequence[int]], PromptScores],
        *,
        queue: int,
        log: Callable[[str], None],
    ):
        """Start the thread.

        engine: compiled. score: returns the log-probabilities of a prompt. queue: most rows that wait for a slot.
        log: prints a line.
        """
        self._engine, self._score, self._limit, self._log = engine, score, queue, log
        self._waiting: collections.deque[tuple[Ticket, int]] = collections.deque()
        self._running: dict[int, tuple[Ticket, int]] = {}  # by slot
        self._scores: dict[int, PromptScores] = {}  # of rows whose first update is not out, by slot
        self._changed = threading.Condition()
        self._closing = False
        self._burst = 1
        self.failure: Exception | None = None  # that ended the thread
        self.thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self.thread.start()

    @property
    def num_waiting(self) -> int:
        """Return the number of rows that wait for a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Return the number of slots in use."""
        return len(self._running)

    def check_room(self, rows: int) -> None:
        """Raise `RequestError` if so many rows would not fit into the queue now, or if the thread has ended."""
        if self.failure is not None:
            raise RequestError("decoding has failed: the server's log has the reason", status=503, code="failed")
        if self._closing:
            raise RequestError("the server is stopping", status=503, code="stopping")
        free = self._engine.slots - len(self._running)
        if len(self._waiting) + rows > self._limit + max(free, 0):
            raise RequestError(
                f"{len(self._waiting)} completions wait for {self._engine.slots} slots: try again later",
                status=429,
                code="queue_full",
                wait=RETRY_AFTER,
            )

    def submit(self, rows: Sequence[Row]) -> Ticket:
        """Queue the rows of a request, all or none. Raises `RequestError` as `check_room`."""
        with self._changed:
            self.check_room(len(rows))
            ticket = Ticket(rows, self._wake)
            self._waiting.extend((ticket, number) for number in range(len(rows)))
            self._changed.notify()
        return ticket

    def close(self, timeout: float) -> None:
        """Refuse new rows, wait up to `timeout` seconds for the others, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self.thread.join(timeout)

    def _wake(self, ticket: Ticket) -> None:
        with self._changed:
            self._waiting = collections.deque(
                (other, row) for other, row in self._waiting if other is not ticket or not other.finished[row]
            )
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._wait():
                self._cancel()
                self._admit()
                if self._running:
                    self._step()
        except Exception as e:
            self._fail(e)

    def _wait(self) -> bool:
        """Wait for rows. Return whether there are any; otherwise the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._closing)
            return bool(self._waiting or self._running)

    def _cancel(self) -> None:
        for slot, (ticket, row) in list(self._running.items()):
            if ticket.finished[row]:
                self._engine.cancel(slot)
                self._forget(slot)

    def _admit(self) -> None:
        """Fill the free slots; stop after a prompt that had to be scored."""
        scored = False
        while self._engine.num_free and not scored:
            with self._changed:
                if not self._waiting:
                    return
                ticket, number = self._waiting.popleft()
            row = ticket.rows[number]
            try:
                scores = self._score(row.prompt) if row.scored else None
                scored = row.scored
                if row.max_new_tokens:
                    slot = self._engine.submit(make_request(row))
                    self._running[slot] = ticket, number
                    if scores is not None:
                        self._scores[slot] = scores
                else:
                    ticket.deliver(Update(number, [], [], [], "length", prompt=scores))
            except UserError as e:
                ticket.deliver(e)

    def _step(self) -> None:
        start = time.perf_counter()
        pieces = self._engine.step(self._burst)
        if longest := max((len(piece.tokens) for piece in pieces), default=0):
            self._burst = max(1, min(BURST, int(BURST_SECONDS * longest / (time.perf_counter() - start))))
        for piece in pieces:
            ticket, number = self._running[piece.slot]
            scores, cached = self._scores.pop(piece.slot, None), self._engine.cached_tokens(piece.slot)
            if piece.finish is not None:
                self._forget(piece.slot)
            ticket.deliver(Update(number, piece.tokens, piece.logprobs, piece.top, piece.finish, cached, scores))

    def _forget(self, slot: int) -> None:
        del self._running[slot]
        self._scores.pop(slot, None)

    def _fail(self, failure: Exception) -> None:
        """Refuse everything from now on: the engine's state may be lost."""
        self._log("".join(traceback.format_exception(failure)))
        with self._changed:
            self.failure = failure
            tickets = {ticket for ticket, _ in [*self._waiting, *self._running.values()]}
            self._waiting.clear()
            self._running.clear()
        for ticket in tickets:
            ticket.deliver(
                RequestError("decoding has failed: the server's log has the reason", status=500, code="failed")
            )


def make_request(row: Row) -> Request:
    """Return what the engine is asked. The key is that of the row in a batch with the equal prompts before it."""
    return Request(
        prompt=row.prompt,
        source=row.source,
        key=prompt_key(jax.random.key(row.seed), row.prompt, row.source, earlier=row.earlier),
        max_new_tokens=row.max_new_tokens,
        sampling=row.sampling,
        stop_tokens=row.stop_tokens,
        top_logprobs=row.top_logprobs,
    )
