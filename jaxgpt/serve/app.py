"""Route requests: an ASGI application over a scheduler, and the page at `/` on which one tries the model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources

import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxgpt.errors import UserError
from jaxgpt.serve.requests import (
    ChatParameters,
    CompletionParameters,
    RequestError,
    Served,
    TokenizeParameters,
    parse,
)
from jaxgpt.serve.responses import Answer, refuse, respond
from jaxgpt.serve.scheduler import Scheduler
from jaxgpt.tools.html_page import hash_source, read_asset

GRACE = 10.0  # seconds in which running requests may end, after a signal


def make_app(served: Served, scheduler: Scheduler, log: Callable[[str], None] | None = None) -> Starlette:
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
    html, own, program = (
        resources.files("jaxgpt.serve").joinpath(f"playground.{kind}").read_text(encoding="utf-8")
        for kind in ("html", "css", "js")
    )
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
