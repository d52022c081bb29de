"""Decode in a thread: a bounded queue of rows in, updates out. All of JAX's work for requests but their keys is done here.

In every turn its loop takes cancellations, scores at most one prompt, fills free slots, and decodes one burst. A client
thus waits for another by at most one burst and one prompt.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import prometheus_client

from jaxgpt.errors import UserError
from jaxgpt.files import Say
from jaxgpt.sample.engine import Engine, Piece
from jaxgpt.sample.score import PromptScores
from jaxgpt.serve.requests import RequestError, Row

BURST, BURST_SECONDS = 8, 0.05  # most tokens, and about the most time, between two looks at the queue
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
FAILED = "decoding has failed: the server's log has the reason"


class Metrics:
    """What is counted from one start to the end."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # a time of creation for each counter and histogram
        self.registry = prometheus_client.CollectorRegistry()
        common = {"namespace": "jaxgpt", "registry": self.registry}
        counter = functools.partial(prometheus_client.Counter, **common)
        gauge = functools.partial(prometheus_client.Gauge, **common)
        histogram = functools.partial(prometheus_client.Histogram, buckets=SECONDS, **common)
        self.responses = counter("http_requests_total", "Requests by path and status.", ["path", "status"])
        self.disconnects = counter("disconnects_total", "Clients that left before the end.")
        self.prompt_tokens = counter("prompt_tokens_total", "Tokens of prompts.")
        self.cached_tokens = counter("cached_tokens_total", "Tokens of prompts that were not computed again.")
        self.completion_tokens = counter("completion_tokens_total", "Generated tokens.")
        self.waiting = gauge("waiting", "Completions that wait for a slot.")
        self.slots_used = gauge("slots_used", "Slots in use.")
        self.slots = gauge("slots", "Slots.")
        self.compilations = counter("compilations_total", "Programs compiled for requests since the warm-up.")
        self.first_token = histogram("first_token_seconds", "Time to the first token.")
        self.between_tokens = histogram("between_tokens_seconds", "Time between tokens.")
        self.requests = histogram("request_seconds", "Time of a whole request.")


class Update(NamedTuple):
    """News of one row of a request."""

    row: Row
    piece: Piece
    num_cached: int = 0  # prompt tokens with keys and values that were reused
    prompt: PromptScores | None = None  # in the first update of a scored row


class Scheduler:
    """Decode the rows of many requests in the slots of one engine."""

    def __init__(self, engine: Engine, score: Callable[[Sequence[int]], PromptScores], *, queue: int, log: Say):
        """Start the thread. queue: most rows that wait for a slot. log: prints a line."""
        self._engine, self._score, self._limit, self._log = engine, score, queue, log
        self.waiting: collections.deque[Row] = collections.deque()  # rows without a slot
        self.running: dict[int, Row] = {}  # by slot
        self._changed = threading.Condition()
        self._closing = False
        self._burst = 1
        self.status = "ok"  # or "starting" until everything is compiled, or "failed" after an error ended the thread
        self.metrics = Metrics()
        self.metrics.slots.set(engine.slots)
        self.metrics.waiting.set_function(lambda: len(self.waiting))
        self.metrics.slots_used.set_function(lambda: len(self.running))
        self.thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self.thread.start()

    def check_room(self, rows: int) -> None:
        """Raise `RequestError` if so many rows would not fit into the queue now, or if the thread has ended."""
        if self.status == "failed":
            raise RequestError(FAILED, status=503, code="failed")
        if self._closing:
            raise RequestError("the server is stopping", status=503, code="stopping")
        free = self._engine.slots - len(self.running)
        if len(self.waiting) + rows > self._limit + max(free, 0):
            message = f"{len(self.waiting)} completions wait for {self._engine.slots} slots: try again later"
            raise RequestError(message, status=429, code="queue_full")

    def submit(self, rows: Sequence[Row]) -> asyncio.Queue[Update | Exception]:
        """Queue the rows of a request, all or none, and return where their news arrive: see `check_room`."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Update | Exception]()

        def deliver(update: Update | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
                loop.call_soon_threadsafe(news.put_nowait, update)

        with self._changed:
            self.check_room(len(rows))
            for row in rows:
                row.deliver = deliver
            self.waiting.extend(rows)
            self._changed.notify()
        return news

    def finish(self, rows: Sequence[Row]) -> None:
        """Free the slots of rows within one burst."""
        if not all(row.is_finished for row in rows):
            for row in rows:
                row.is_finished = True
            with self._changed:
                self.waiting = collections.deque(row for row in self.waiting if not row.is_finished)
                self._changed.notify()

    def close(self, timeout: float) -> None:
        """Refuse new rows, wait up to `timeout` seconds for the others, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self.thread.join(timeout)

    def _work(self) -> None:
        """Decode until the end, or until the first failure, after which the engine's state may be lost."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self.waiting or self.running or self._closing)
                    if not (self.waiting or self.running):
                        return
                for slot, row in list(self.running.items()):
                    if row.is_finished:
                        self._engine.cancel(slot)
                        del self.running[slot]
                self._admit()
                if self.running:
                    self._step()
        except Exception as e:
            self._log("".join(traceback.format_exception(e)))
            with self._changed:
                self.status = "failed"
                rows = [*self.waiting, *self.running.values()]
                self.waiting.clear()
                self.running.clear()
            for row in rows:
                row.deliver(RequestError(FAILED, status=500, code="failed"))

    def _admit(self) -> None:
        """Fill the free slots. Stop after a prompt that had to be scored."""
        has_scored = False
        while self._engine.num_free and not has_scored:
            with self._changed:
                if not self.waiting:
                    return
                row = self.waiting.popleft()
            has_scored, is_decoded = row.is_scored, row.request.max_new_tokens > 0
            try:
                scores = self._score(row.request.prompt) if has_scored else None
                if has_scored or not is_decoded:
                    nothing = Piece(-1, [], [], [], None if is_decoded else "length")
                    row.deliver(Update(row, nothing, prompt=scores))
                if is_decoded:
                    self.running[self._engine.submit(row.request)] = row
            except UserError as e:
                row.deliver(RequestError(str(e)))

    def _step(self) -> None:
        start = time.perf_counter()
        pieces = self._engine.step(self._burst)
        if longest := max((len(piece.tokens) for piece in pieces), default=0):
            self._burst = max(1, min(BURST, int(BURST_SECONDS * longest / (time.perf_counter() - start))))
        for piece in pieces:
            row = self.running[piece.slot]
            if piece.finish is not None:
                del self.running[piece.slot]
            row.deliver(Update(row, piece, self._engine.cached_tokens[piece.slot]))
