"""The routes: an ASGI application over a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxgpt.data.tokenizer import find_start_token
from jaxgpt.errors import UserError
from jaxgpt.serve.errors import RequestError
from jaxgpt.serve.generation import Generation, iter_deltas, plan_chat, plan_completion
from jaxgpt.serve.metrics import Metrics
from jaxgpt.serve.parameters import (
    ChatParameters,
    CompletionParameters,
    DetokenizeParameters,
    Parameters,
    TokenizeParameters,
    parse,
    parse_object,
)
from jaxgpt.serve.playground import playground_page
from jaxgpt.serve.responses import DONE, Envelope, render_body, render_event
from jaxgpt.serve.scheduler import Scheduler, Ticket
from jaxgpt.serve.served import Served

Asked = TypeVar("Asked", bound=Parameters)
GRACE = 10.0  # seconds in which running requests may end, after a signal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """The handlers of the routes."""

    served: Served
    scheduler: Scheduler
    metrics: Metrics
    compilations: Callable[[], int]  # since the warm-up, for requests
    log: Callable[[str], None] | None = None  # prints prompts and completions; None: they are not printed

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        self._check_model(request.path_params["name"])
        return _json(self._model())

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        return await self._respond(*await self._plan(request, CompletionParameters, plan_completion))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._respond(*await self._plan(request, ChatParameters, plan_chat))

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of a text or of a conversation."""
        return await asyncio.to_thread(self._tokenize, await request.body())

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids."""
        return await asyncio.to_thread(self._detokenize, await request.body())

    async def tokenizer_info(self, request: Request) -> Response:
        """Describe the tokenizer, as lm-evaluation-harness asks for it."""
        tokenizer = self.served.run.tokenizer
        begin = tokenizer.decode(tokenizer.prefix[:1]) if tokenizer.prefix else None
        info = {"tokenizer_class": type(tokenizer).__name__, "vocab_size": tokenizer.vocab_size, "bos_token": begin}
        info |= {"eos_token": tokenizer.decode([find_start_token(tokenizer)[0]]), "pad_token": None}
        return _json(info | {"model_max_length": self.served.limits.block_size})

    async def playground(self, request: Request) -> Response:
        """Return the page."""
        page, policy = playground_page()
        return HTMLResponse(page, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})

    async def health(self, request: Request) -> Response:
        """Return whether the server works."""
        failed = self.scheduler.failure is not None
        return _json({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def measured(self, request: Request) -> Response:
        """Return the metrics."""
        scheduler = self.scheduler
        text = self.metrics.render(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            slots=self.served.limits.choices,
            compilations=self.compilations(),
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _tokenize(self, body: bytes) -> Response:
        p = parse(TokenizeParameters, parse_object(body))
        if p.prompt is None:
            ids = list(self.served.encode_messages(p.conversation))
        elif p.as_prompt:
            ids = list(self.served.encode(p.prompt)[0])
        else:
            ids = self.served.tokenize(p.prompt, prefix=p.add_special_tokens)
        texts = [self.served.text_of(i) for i in ids] if p.return_token_strs else None
        most = self.served.limits.block_size
        return _json({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts})

    def _detokenize(self, body: bytes) -> Response:
        p = parse(DetokenizeParameters, parse_object(body))
        if p.tokens is None:
            raise RequestError("tokens is missing: needs a list of token ids", param="tokens")
        return _json({"prompt": self.served.decode(p.tokens, "tokens")})

    def _model(self) -> dict:
        served = self.served
        own = {"context": served.limits.block_size, "chat": served.run.experiment.data.is_chat}
        own |= {"temperature": served.temperature, "slots": served.limits.choices, "step": served.run.step}
        own |= {"encoder": bool(served.run.model.config.n_encoder_layer)}
        own |= {"chat_stop_token_ids": served.chat_stop_tokens if own["chat"] else None}
        return {"id": served.name, "object": "model", "created": 0, "owned_by": "jaxgpt", "jaxgpt": own}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.served.name:
            message = f"there is no model {name[:80]!r} here: needs {self.served.name!r}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def _check(self, p: Parameters) -> None:
        self._check_model(p.model)
        p.check(self.served.limits)
        self.scheduler.check_room(p.n)

    async def _plan(
        self, request: Request, kind: type[Asked], plan: Callable[[Served, Asked], Generation]
    ) -> tuple[Asked, Generation]:
        """Return the parameters of a request and its choices. A thread reads them: a body of 1 MiB may take seconds."""

        def work(body: bytes) -> tuple[Asked, Generation]:
            p = parse(kind, parse_object(body))
            self._check(p)
            return p, plan(self.served, p)

        return await asyncio.to_thread(work, await request.body())

    async def _respond(self, p: Parameters, generation: Generation) -> Response:
        ticket = self.scheduler.submit(generation.rows)
        self.metrics.prompt_tokens += generation.prompt_tokens
        envelope = Envelope.make(generation.format, self.served.name, self.served.fingerprint)
        if p.stream:
            events = self._events(generation, ticket, envelope, include_usage=p.include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        deltas, cached = [[] for _ in generation.rows], [0] * len(generation.rows)
        async with contextlib.aclosing(iter_deltas(generation, ticket, self.metrics, cached)) as news:
            async for index, delta in news:
                deltas[index].append(delta)
        choices = [generation.format.choice(index, held) for index, held in enumerate(deltas)]
        usage = generation.usage(cached)
        self._done(generation, usage.cached, ["".join(delta.text for delta in held) for held in deltas])
        return _json(envelope.whole(choices, usage))

    async def _events(
        self, generation: Generation, ticket: Ticket, envelope: Envelope, *, include_usage: bool
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        form, no_usage = generation.format, {"usage": None} if include_usage else None
        texts, cached = [""] * len(generation.rows), [0] * len(generation.rows)
        try:
            async with contextlib.aclosing(iter_deltas(generation, ticket, self.metrics, cached)) as news:
                for index in range(len(texts)):
                    if (opening := form.opening(index)) is not None:
                        yield envelope.chunk([opening], no_usage)
                async for index, delta in news:
                    texts[index] += delta.text
                    for choice in form.chunks(index, delta):
                        yield envelope.chunk([choice], no_usage)
        except UserError as e:  # after the status 200
            yield render_event((e if isinstance(e, RequestError) else RequestError(str(e))).to_json())
            return
        usage = generation.usage(cached)
        if include_usage:
            yield envelope.chunk([], {"usage": usage.to_json()})
        self._done(generation, usage.cached, texts)
        yield DONE

    def _done(self, generation: Generation, cached: int, texts: list[str]) -> None:
        self.metrics.cached_tokens += cached
        if self.log is not None:
            for row, text in zip(generation.rows, texts, strict=True):
                self.log(f"{time.strftime('%H:%M:%S')} {self.served.run.tokenizer.decode(row.prompt)!r} -> {text!r}")


def make_app(service: Service) -> Starlette:
    """Return the application. Its shutdown waits for what runs."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.scheduler.close, GRACE)

    routes = [
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/detokenize", service.detokenize, methods=["POST"]),
        Route("/tokenizer_info", service.tokenizer_info),
        Route("/health", service.health),
        Route("/metrics", service.measured),
        Route("/", service.playground),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={UserError: _refuse, HTTPException: _refuse, Exception: _refuse},
    )


def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such path, or another method
        error = RequestError(f"{request.method} {request.url.path[:80]}: {error.detail}", status=error.status_code)
    elif not isinstance(error, RequestError):
        status = 400 if isinstance(error, UserError) else 500
        error = RequestError(str(error) if status == 400 else "an error of the server: see its log", status=status)
    return _json(error.to_json(), error.status, error.headers())


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(render_body(value), status, headers, media_type="application/json")
