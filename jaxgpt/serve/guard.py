"""The guard before the routes: plain ASGI middleware that refuses, bounds and times requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import time
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxgpt.serve.errors import RequestError
from jaxgpt.serve.metrics import Metrics
from jaxgpt.serve.responses import render_body, render_event

LARGEST_BODY = 2**20  # bytes
OPEN = ("/", "/health")  # the page has no secrets, and asks for the key itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard:
    """Check each request, read its body, and end it if the client leaves or if it takes too long."""

    app: ASGIApp
    metrics: Metrics
    paths: frozenset[str]  # that the metrics tell apart
    key: str | None  # None: everybody may ask
    hosts: frozenset[str]  # names by which the server may be called, beside localhost and addresses
    body_timeout: float = 10.0  # seconds
    timeout: float = 300.0  # seconds for the whole request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; pass the application's start and end on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._handle(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.responded(path, status, time.perf_counter() - start)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            self._check(scope)
            body = await self._read(scope, receive)
            if body is not None:
                await self._run(scope, body, receive, noting)
        except RequestError as e:
            if not begun:
                await _respond(e, send)
            else:  # a stream: its status is out
                with contextlib.suppress(TimeoutError):  # the client does not read
                    await asyncio.wait_for(send(_last(render_event(e.to_json()))), 1.0)

    def _check(self, scope: Scope) -> None:
        """Raise `RequestError` for a request from where none should come, or without the key."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if headers.keys() >= {b"content-length", b"transfer-encoding"}:  # a proxy may find another end of the request
            raise RequestError("Content-Length and Transfer-Encoding together: needs one of them", status=400)
        host = headers.get(b"host", "")
        if not self._is_known(host.lower()):
            # A page elsewhere whose name was made to point here (DNS rebinding) calls the server by that name.
            message = f"the server is not called {host[:80]!r}: use an address, or start it with --allowed-host"
            raise RequestError(message, status=403, code="host")
        is_post = scope["method"] not in ("GET", "HEAD")
        origin = headers.get(b"origin")
        if is_post and origin is not None and origin.partition("://")[2] != host:
            raise RequestError(f"a page of {origin[:80]!r} may not use this server", status=403, code="origin")
        if scope["method"] == "POST" and headers.get(b"content-type", "").split(";")[0].strip() != "application/json":
            raise RequestError("the Content-Type must be application/json", status=415)
        given = headers.get(b"authorization", "").removeprefix("Bearer ").strip()
        if (
            self.key is not None
            and scope["path"] not in OPEN
            and not hmac.compare_digest(given.encode(), self.key.encode())
        ):
            message = "the key is missing or wrong: send it as Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            ipaddress.ip_address(name)  # an address cannot be pointed elsewhere, as a name can
        except ValueError:
            return host.rpartition(":")[0] in self._names or host in self._names
        return True

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(name.lower() for name in self.hosts) | {"localhost"}

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, counted while it arrives; None if the client left."""
        headers, body = dict(scope["headers"]), bytearray()
        too_large = RequestError(f"the body is larger than {LARGEST_BODY:,} bytes, the limit", status=413)
        length = headers.get(b"content-length", b"0")
        if len(length) > 20 or int(length) > LARGEST_BODY:  # digits alone, or it would not have come so far
            raise too_large
        try:
            async with asyncio.timeout(self.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > LARGEST_BODY:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RequestError(f"the body took longer than {self.body_timeout:g} s", status=408) from None

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application until it ends, the client leaves, or the time is over."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # who waits for the end of the connection is cancelled below
            raise AssertionError

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work = asyncio.ensure_future(self.app(scope, replay, send))
        gone = asyncio.ensure_future(leave())
        try:
            await asyncio.wait({work, gone}, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif gone.done():
                self.metrics.disconnected += 1
            else:
                message = f"the request took longer than {self.timeout:g} s: ask for fewer tokens"
                raise RequestError(message, status=504, code="timeout")
        except asyncio.CancelledError:  # by uvicorn, where a request outlives the grace period
            raise RequestError("the server is stopping", status=503, code="stopping") from None
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def _respond(error: RequestError, send: Send) -> None:
    body = render_body(error.to_json())
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    raw = [(name.encode(), value.encode()) for name, value in {**headers, **error.headers()}.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send(_last(body))


def _last(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": False}
