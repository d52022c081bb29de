"""Load a run, compile everything, and serve it until a signal."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxgpt.cluster.signals import STOP_SIGNALS
from jaxgpt.config import Precision
from jaxgpt.errors import UserError
from jaxgpt.run import Run
from jaxgpt.sample import Sampling
from jaxgpt.sample.engine import Engine
from jaxgpt.sample.score import PromptScores, prompt_widths, score_prompt
from jaxgpt.serve.app import GRACE, Service, make_app
from jaxgpt.serve.guard import Guard
from jaxgpt.serve.metrics import Metrics
from jaxgpt.serve.parameters import MAX_LOGPROBS, MAX_STOP_TOKENS
from jaxgpt.serve.scheduler import Row, Scheduler, make_request
from jaxgpt.serve.served import serve_run

HEAD_TIMEOUT = 10.0  # seconds for the request line and the headers
READ_TIMEOUT, LEAST_READ = 10.0, 2**16  # seconds in which a client reads so many bytes, or all that there are
QUEUE = 4  # rows that may wait, for each slot
CONNECTIONS = 256
KEEP_ALIVE = 30  # seconds for which an idle connection stays open; clients give theirs up after fewer
COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's event, seen in 0.10.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line decides."""

    host: str
    port: int
    slots: int
    key: str | None
    hosts: tuple[str, ...]
    cache_dtype: Precision | None
    prefix_bytes: int
    timeout: float  # seconds for a whole request


def serve(run: Run, options: Options, *, say: Callable[[str], None], log: Callable[[str], None] | None = None) -> None:
    """Serve a run until SIGINT or SIGTERM, which let running requests end.

    say: prints a line. log: prints prompts and completions; None: they are not printed.
    """
    listener = bind(options.host, options.port)
    server = Server(make_server(run, options, say=say, log=log), listener, say)
    for number in STOP_SIGNALS:  # uvicorn raises the signal once more after the end, which is a success here
        signal.signal(number, lambda *_: None)
    server.run([listener])
    say("stopped")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises `UserError` if its address is taken or not one of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LEAST_READ)  # else megabytes wait in the system
            listener.bind(address)
            listener.listen()  # at once: until one of them listens, another server can bind the address too
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"cannot listen on {host} port {port}: {reason}. Name another with --host or --port") from None
    return listener


def make_server(
    run: Run, options: Options, *, say: Callable[[str], None], log: Callable[[str], None] | None = None
) -> Guard:
    """Return the ASGI application of a run, with everything compiled and its decoding thread started."""
    start, queue = time.perf_counter(), QUEUE * options.slots
    served = serve_run(run, slots=options.slots, queue=queue)
    model, params = run.decode_params
    vocab_size = run.tokenizer.vocab_size
    engine = Engine(
        model,
        params,
        slots=options.slots,
        vocab_size=vocab_size,
        cache_dtype=options.cache_dtype,
        max_stops=MAX_STOP_TOKENS + len({*served.stop_tokens, *(served.chat_stop_tokens or ())}),
        prefix_bytes=options.prefix_bytes,
    )
    engine.warm_up()

    def score(ids: Any) -> PromptScores:
        return score_prompt(model, params, ids, top=MAX_LOGPROBS, vocab_size=vocab_size)

    make_request(Row(prompt=(0,), seed=0, max_new_tokens=1, sampling=Sampling(), stop_tokens=()))  # derives a key
    for width in () if model.config.n_encoder_layer else prompt_widths(model):  # which has no echo
        score([0] * width)
    scheduler = Scheduler(engine, score, queue=queue, log=say)
    compilations = count_compilations(scheduler.thread)
    say(f"{run.directory}: compiled in {time.perf_counter() - start:.1f} s, {options.slots} slots")
    metrics = Metrics()
    app = make_app(Service(served=served, scheduler=scheduler, metrics=metrics, compilations=compilations, log=log))
    paths = frozenset(getattr(route, "path", "") for route in app.routes)
    return Guard(
        app=app, metrics=metrics, paths=paths, key=options.key, hosts=frozenset(options.hosts), timeout=options.timeout
    )


def count_compilations(thread: threading.Thread) -> Callable[[], int]:
    """Return a function that returns how many programs a thread has compiled from now on."""
    found = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED and threading.current_thread() is thread:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: len(found)


class Server(uvicorn.Server):
    """A server that prints its address once it listens."""

    def __init__(self, app: Guard, listener: socket.socket, say: Callable[[str], None]):
        """Configure uvicorn. listener: where `run` will listen. say: prints a line."""
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=Deadlines,
                ws="none",
                lifespan="on",
                log_level="error",
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=int(GRACE),
            )
        )
        self._say = say
        host, port = listener.getsockname()[:2]
        self._address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._say(self._address)


class Deadlines(H11Protocol):
    """HTTP with deadlines for the head of each request and for the client's reading, which uvicorn does not have."""

    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start to wait for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # any byte that is not sent pauses writing, also while closing
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start to wait for the client to read."""
        super().pause_writing()
        self._check_reading(math.inf)

    def resume_writing(self) -> None:
        """Stop waiting: the client has read everything."""
        if self._reading is not None:
            self._reading.cancel()
        super().resume_writing()

    def _check_reading(self, before: float) -> None:
        """Drop a client that reads too slowly: it would hold one of the connections. before: bytes not sent then."""
        left = self.transport.get_write_buffer_size()
        if before - left < LEAST_READ:
            self.transport.abort()
        else:
            self._reading = self.loop.call_later(READ_TIMEOUT, self._check_reading, left)

    def data_received(self, data: bytes) -> None:
        """Wait no longer once the head is whole."""
        before = self.cycle
        if self._deadline is None and before is not None and before.response_complete:
            self._wait()
        super().data_received(data)
        if self.cycle is not before:
            self._stop()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that turns out not to be HTTP; what the application answers to its head is dropped."""
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT, self._give_up)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
