"""Serve a run: open the port, compile everything, route and guard requests, and answer until a signal.

The application is an ASGI application over a scheduler, with a page at `/` on which one tries the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hmac
import ipaddress
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal
from urllib.parse import quote

import jax
import prometheus_client
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxgpt.errors import UserError, reason_of
from jaxgpt.files import Say, render_json
from jaxgpt.run import Run
from jaxgpt.sample.engine import Engine, prompt_key
from jaxgpt.sample.programs import MAX_TOP
from jaxgpt.sample.score import prompt_widths, score_prompt
from jaxgpt.serve import ServeOptions
from jaxgpt.serve.requests import (
    MAX_STOP_TOKENS,
    ChatParameters,
    CompletionParameters,
    RequestError,
    Served,
    TokenizeParameters,
    parse,
)
from jaxgpt.serve.responses import Answer, refuse, render_event, respond
from jaxgpt.serve.scheduler import Scheduler
from jaxgpt.tools.html_page import hash_source, read_asset

LARGEST_BODY = 2**20  # bytes
CONNECTIONS = 256
GRACE = 10.0  # seconds in which running requests may end, after a signal
KEEP_ALIVE = 30  # seconds for which an idle connection stays open. Clients give theirs up after fewer
HOST = re.compile(r"(\[.*\]|[^:]*)(?::[0-9]*)?")  # an address or a name, and perhaps a port
LONGEST_PATH = 200  # characters of a path in the log
OPEN = ("/", "/health")  # the page has no secrets, and asks for the key itself
COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's event, seen in 0.10.2


def make_server(
    run: Run, options: ServeOptions, *, key: str | None = None, log: Callable[..., None]
) -> tuple[ASGIApp, Callable[..., None]]:
    """Return the ASGI application of a run, which answers 503 at first, and a function that compiles everything for it.

    That calls what it is given with the name of each program. key: what clients must send, if any. log: of `make_log`.
    """
    served = Served(run, options)
    (model, params), vocab_size = run.decode_params, run.tokenizer.vocab_size
    engine = Engine(
        model,
        params,
        slots=options.slots,
        vocab_size=vocab_size,
        cache_dtype=options.cache_dtype,
        max_stops=MAX_STOP_TOKENS + len({*served.stop_tokens, *(served.chat_stop_tokens or ())}),
        prefix_bytes=options.prefix_cache_mb * 1_000_000,
        resizes=not options.reproducible,
        reproducible=options.reproducible,
    )
    score = functools.partial(score_prompt, model, params, top=MAX_TOP, vocab_size=vocab_size)
    scheduler = Scheduler(engine, score, queue=served.queue, log=log)
    scheduler.status = "starting"

    def compile_all(begin: Say) -> None:
        start = time.perf_counter()
        engine.warm_up(begin)
        prompt_key(jax.random.key(0), (0,))
        for width in prompt_widths(model)[:5]:  # to 1,024 tokens: 8,192 take a minute on two cores
            begin(f"the scores of a prompt of {width} tokens")
            score([0] * width)
        log(f"{run.directory}: compiled in {time.perf_counter() - start:.1f} s, {options.slots} slots")
        scheduler.status = "ok"

    def count_compilation(event: str, duration_secs: float, **_: Any) -> None:
        thread = threading.current_thread()  # asyncio's plan requests, and derive their keys
        if event == COMPILED and (thread is scheduler.thread or thread.name.startswith("asyncio_")):
            scheduler.metrics.compilations.inc()

    jax.monitoring.register_event_duration_secs_listener(count_compilation)
    app = make_app(served, scheduler, log if options.log_prompts else None)
    return guard(app, scheduler, options, key=key, log=log), compile_all


def make_log(write: Say, form: Literal["text", "json"] = "text") -> Callable[..., None]:
    """Return a function that writes a line, which is a text or has the fields of a request that has ended.

    form: in JSON, each line is an object with the time.
    """

    def log(text: str = "", **fields: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        if form == "json":
            write(render_json({"time": now} | (fields or {"message": text})))
        else:
            write(text or " ".join([now, *(f"{name}={value}" for name, value in fields.items())]))

    return log


def make_app(served: Served, scheduler: Scheduler, log: Say | None = None) -> Starlette:
    """Return the application. Its shutdown waits for what runs.

    log: prints prompts and completions. None prints nothing. Threads read the bodies: 1 MiB may take seconds.
    """
    run, is_chat = served.run, served.run.experiment.data.is_chat
    own = {"context": served.block_size, "chat": is_chat, "temperature": served.temperature, "slots": served.slots}
    own |= {"step": run.step, "chat_stop_token_ids": served.chat_stop_tokens if is_chat else None}
    described = {"object": "model", "created": 0, "owned_by": "jaxgpt", "jaxgpt": own}

    def completes(kind: type[CompletionParameters] | type[ChatParameters]) -> Callable[[Request], Awaitable[Response]]:
        def plan(raw: bytes) -> Answer:
            p = parse(kind, raw, served.temperature)
            scheduler.check_room(1)  # before the prompts are encoded
            return Answer(served, p, served.plan(p))

        async def complete(request: Request) -> Response:
            request.state.answer = answer = await asyncio.to_thread(plan, await request.body())
            deltas = answer.deltas(scheduler.submit(answer.rows), scheduler, log)
            if answer.parameters.stream:
                headers = {"cache-control": "no-cache"}
                return StreamingResponse(answer.events(deltas), headers=headers, media_type="text/event-stream")
            return respond(await answer.whole(deltas))

        return complete

    async def tokenize(request: Request) -> Response:
        raw = await request.body()
        return respond(await asyncio.to_thread(lambda: served.tokenize(parse(TokenizeParameters, raw))))

    async def models(request: Request) -> Response:
        return respond({"object": "list", "data": [{"id": name, **described} for name in served.names]})

    async def model(request: Request) -> Response:
        served.check_name(request.path_params["name"])
        return respond({"id": request.path_params["name"], **described})

    async def health(request: Request) -> Response:
        status = scheduler.status
        return respond({"status": status}, 200 if status == "ok" else 503)

    async def metrics(request: Request) -> Response:
        text = prometheus_client.generate_latest(scheduler.metrics.registry)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def page(request: Request) -> Response:
        html, policy = playground_page()
        return HTMLResponse(html, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(scheduler.close, GRACE)

    routes = [
        *(Route(path, models) for path in ("/v1/models", "/v1/models/")),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completes(CompletionParameters), methods=["POST"]),
        Route("/v1/chat/completions", completes(ChatParameters), methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/", page),
    ]
    handlers = dict.fromkeys((UserError, HTTPException, Exception), _explain)
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def _explain(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such path, or another method
        error = RequestError(f"{request.method} {request.url.path[:80]}: {error.detail}", status=error.status_code)
    elif not isinstance(error, UserError):
        error = RequestError("an error of the server: see its log", status=500)
    return refuse(error if isinstance(error, RequestError) else RequestError(str(error)))


def playground_page() -> tuple[str, str]:
    """Return the page as HTML, and its Content-Security-Policy, which allows requests only to its own server."""
    html, own, program = (read_asset(f"playground.{kind}", "jaxgpt.serve") for kind in ("html", "css", "js"))
    style, program = read_asset("page.css"), read_asset("page.js") + program
    for mark, text in (("/*page.css*/", style), ("/*playground.css*/", own), ("/*playground.js*/", program)):
        html = html.replace(mark, text)
    styles = " ".join(f"'{hash_source(text)}'" for text in (style, own))
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src {styles}; "
        f"script-src '{hash_source(program)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return html, policy


def guard(
    app: Starlette, scheduler: Scheduler, options: ServeOptions, *, key: str | None, log: Callable[..., None]
) -> ASGIApp:
    """Return an application behind a `Guard`. Pages of the allowed origins may use it, and "*" means all."""
    guarded, origins = Guard(app, scheduler, options, key, log), options.allowed_origin
    allowed = {"allow_origins": origins, "allow_headers": ["*"], "expose_headers": ["x-request-id"]}
    return CORSMiddleware(guarded, allow_methods=["GET", "POST"], **allowed) if origins else guarded


def serve(app: ASGIApp, compile_all: Callable[..., None], listener: socket.socket, say: Say) -> None:
    """Serve until SIGINT or SIGTERM, which let running requests end, or the program that is being compiled.

    app, compile_all: from `make_server`. A thread answers requests, and this one compiles. say: prints a line.
    """
    server, is_compiled = make_uvicorn(app), threading.Event()

    def stop(number: int, frame: Any) -> None:
        server.handle_exit(number, frame)
        if not is_compiled.is_set():
            sys.exit()  # the compiler cannot be interrupted: this is raised once it returns

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    thread = threading.Thread(target=server.run, args=([listener],), name="serving")
    thread.start()
    say(f"{url} answers 503 until everything is compiled")
    try:
        compile_all(lambda program: say(f"compiling {program}"))
        is_compiled.set()
        say(url)
        thread.join()
    finally:
        server.should_exit = True  # also after an error of the compiler
        thread.join()
        say("stopped")


def make_uvicorn(app: ASGIApp) -> uvicorn.Server:
    """Return uvicorn with its limits."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_level="error",
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(GRACE),
    )
    return uvicorn.Server(config)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises `UserError` if its address is taken or not one of this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, dualstack_ipv6=family == socket.AF_INET6)
    except (OSError, UnicodeError) as e:
        message = f"cannot listen on {host} port {port}: {reason_of(e)}. Name another with --host or --port"
        raise UserError(message) from None


class Guard:
    """ASGI middleware that checks each request, reads its body, and ends it if the client leaves or it takes too long."""

    def __init__(
        self, app: Starlette, scheduler: Scheduler, options: ServeOptions, key: str | None, log: Callable[..., None]
    ):
        """Guard an application. key: what clients must send, if any. log: is given the fields of each request."""
        self._app, self._key, self._timeout, self._origins = app, key, options.timeout, set(options.allowed_origin)
        self._scheduler, self._metrics, self._log = scheduler, scheduler.metrics, log
        self._paths = {getattr(route, "path", "") for route in app.routes}  # the paths that the metrics tell apart
        self._names = {"localhost", *(name.lower() for name in options.allowed_host)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Pass the application's start and end on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        scope.setdefault("state", {})  # where the application leaves its answer
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if re.fullmatch(rb"[\w.:-]{1,128}", given) else secrets.token_hex(16).encode()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            self._check(scope)
            body = await self._read(receive)
            if body is not None:
                await self._run(scope, body, receive, sending)
        except RequestError as e:
            if not status:
                await refuse(e, {"connection": "close"})(scope, receive, sending)
            else:  # a stream: its status is out
                last = {"type": "http.response.body", "body": render_event(e.to_json()), "more_body": False}
                with contextlib.suppress(TimeoutError):  # the client does not read
                    await asyncio.wait_for(send(last), 1.0)
        finally:
            seconds, path = time.perf_counter() - start, scope["path"]
            self._metrics.responses.labels(path if path in self._paths else "other", status).inc()
            self._metrics.requests.observe(seconds)
            usage = scope["state"]["answer"].usage() if "answer" in scope["state"] else {}
            tokens = {name: usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")}
            asked = {"method": scope["method"], "path": quote(path)[:LONGEST_PATH], "status": status}
            self._log(**asked, **tokens, seconds=round(seconds, 3), id=request_id.decode())

    def _check(self, scope: Scope) -> None:
        """Raise `RequestError` for a request from a host or an origin that is not allowed, or without the key."""
        headers = Headers(scope=scope)
        # A proxy may find another end of such a request.
        if "content-length" in headers and "transfer-encoding" in headers:
            raise RequestError("Content-Length and Transfer-Encoding together: give one of them")
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if not self._is_known(host):
            message = f"the server is not called {host[:80]!r}: use an address, or start it with --allowed-host"
            raise RequestError(message, status=403, code="host")
        is_read = scope["method"] in ("GET", "HEAD")
        is_known = origin is None or origin.lower().partition("://")[2] == host or {origin, "*"} & self._origins
        if not is_read and not is_known:
            message = f"a page of {origin[:80]!r} may not use this server: start it with --allowed-origin"
            raise RequestError(message, status=403, code="origin")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise RequestError("the Content-Type must be application/json", status=415)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip().encode() if scheme.lower() == "bearer" else b""
        if self._key is not None and scope["path"] not in OPEN and not hmac.compare_digest(given, self._key.encode()):
            message = "the key is missing or wrong: send it as Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")
        if self._scheduler.status == "starting" and scope["path"] != "/health":
            raise RequestError("the server is still compiling: try again later", status=503, code="starting")

    def _is_known(self, host: str) -> bool:
        """Return whether a Host header has an address or a name of the server.

        A page elsewhere, under a name that was made to point here (DNS rebinding), calls the server by that name. An
        address cannot be pointed elsewhere.
        """
        found = HOST.fullmatch(host)
        name = found[1] if found else ""
        with contextlib.suppress(ValueError):
            ipaddress.IPv6Address(name[1:-1]) if name.startswith("[") else ipaddress.IPv4Address(name)
            return True
        return bool({host, name} & self._names)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body, counted while it arrives, or None if the client left."""
        body, message = bytearray(), {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > LARGEST_BODY:
                raise RequestError(f"the body is larger than {LARGEST_BODY:,} bytes, the limit", status=413)
        return bytes(body)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application until it ends, the client leaves, or the time is over."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            # Who waits for the end of the connection is cancelled below.
            return messages.pop() if messages else await asyncio.Future()

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work, gone = asyncio.ensure_future(self._app(scope, replay, send)), asyncio.ensure_future(leave())
        try:
            await asyncio.wait({work, gone}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif gone.done():
                self._metrics.disconnects.inc()
            else:
                message = f"the request took longer than {self._timeout:g} s: ask for fewer tokens"
                raise RequestError(message, status=504, code="timeout")
        except asyncio.CancelledError:  # uvicorn ends a request that outlives the grace period
            raise RequestError("the server is stopping", status=503, code="stopping") from None
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
