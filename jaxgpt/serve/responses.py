"""Turn the scheduler's updates into the texts of choices, and these into OpenAI's JSON and streams of it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, NamedTuple

from starlette.responses import Response

from jaxgpt.files import Json, Say, render_json
from jaxgpt.sample.engine import UNFINISHED, Detokenizer
from jaxgpt.sample.score import PromptScores
from jaxgpt.serve.requests import ChatParameters, CompletionParameters, RequestError, Row, Served
from jaxgpt.serve.scheduler import Scheduler, Update

DONE = b"data: [DONE]\n\n"
LATER = {"retry-after": "1"}  # seconds, when the queue was full or the server not ready
HEADERS = {401: {"www-authenticate": "Bearer"}, 429: LATER, 503: LATER}  # by status


class Token(NamedTuple):
    """One token of a choice, with its log-probability in nats."""

    id: int
    text: str
    offset: int  # position of its first character in the text of the choice
    logprob: float  # nan for a first token without context
    top: list[tuple[int, str, float]]  # (id, text, logprob) of the most probable tokens in its place, best first


# What a choice has gained: its text, and its tokens if log-probabilities were asked for.
Deltas = AsyncGenerator[tuple["Choice", str, list[Token]]]


class Choice:
    """The text of one choice as it grows: characters and stop strings whole, and for each token its place."""

    def __init__(self, served: Served, p: CompletionParameters | ChatParameters, row: Row):
        """Start with no text. p: the parameters, from which `row` was planned."""
        self.row = row
        self.text, self.tokens = "", list[Token]()  # what has been returned
        self.finish: str | None = None  # "stop", "length" or "tool_calls" with the last addition
        self.content, self.calls = "", list[Json]()  # the text without calls of tools, and these
        self.num_tokens = self.num_cached = 0  # tokens generated, and tokens of the prompt that were not computed again
        self._served, self._has_many_calls = served, p.parallel_tool_calls
        self._echo = isinstance(p, CompletionParameters) and p.echo  # the prompt is the beginning of the text
        context = () if row.prompt == "" else row.request.prompt
        self._detokenizer = Detokenizer(served.run.tokenizer, p.stop, context)
        self._start = 0  # characters of the text before the completion
        self._held: list[Token] = []  # tokens with text that is not out yet

    def push(self, update: Update) -> tuple[str, list[Token]]:
        """Return the text and the tokens that an update adds."""
        piece, text, tokens = update.piece, "", []
        self.num_cached = max(self.num_cached, update.num_cached)
        if self._echo:
            self._echo = False
            text, tokens = self._repeat_prompt(update.prompt)
            self._start = len(text)
        for number, i in enumerate(piece.tokens):
            if self.row.request.top_logprobs is not None:
                offset = self._start + self._detokenizer.length
                self._held.append(self._token(i, offset, piece.logprobs[number], piece.top[number]))
            text += self._detokenizer.push([i])
            self.num_tokens += 1
            if self._detokenizer.stopped:
                break
        if piece.finish is not None:
            text += self._detokenizer.rest()
        self.text, self.finish = self.text + text, "stop" if self._detokenizer.stopped else piece.finish
        text = self._take_calls()
        # A stop string takes the tokens after it along. Without one, a last token without text counts.
        is_last = self.finish is not None and not self._detokenizer.stopped
        out = [token for token in self._held if is_last or token.offset < len(self.text)]
        self._held = self._held[len(out) :]
        self.tokens += tokens + out
        return text, tokens + out

    def _take_calls(self) -> str:
        """Return what is new of the content. With the end of the text, read the calls."""
        offer, before = self.row.offer, len(self.content)
        if offer is None:
            self.content = self.text
        elif self.finish is None:
            self.content = self.text[: offer.hold(self.text, before)]
        else:
            self.content, calls = offer.read(self.text)
            self.calls = calls if self._has_many_calls else calls[:1]
            self.finish = "tool_calls" if self.calls else self.finish
        return self.content[before:]

    def _repeat_prompt(self, scores: PromptScores | None) -> tuple[str, list[Token]]:
        tokenizer, ids, first, text = self._served.run.tokenizer, self.row.request.prompt, 0, self.row.prompt
        if isinstance(text, str):
            first = len(ids) - len(tokenizer.encode(text))  # those before it are a prefix
        else:
            text = tokenizer.decode(ids)
        if scores is None:
            return text, []
        places, tokens, most = Detokenizer(tokenizer), [], self.row.request.top_logprobs
        for number, i in enumerate(ids):
            offset = min(places.length, len(text))
            tokens.append(self._token(i, offset, scores.logprobs[number], scores.top[number][:most]))
            if number >= first:
                places.push([i])
        return text, tokens

    def _token(self, i: int, offset: int, logprob: float, top: Sequence[tuple[int, float]]) -> Token:
        text_of = self._served.text_of
        return Token(i, text_of(i), offset, logprob, [(j, text_of(j), p) for j, p in top])


class Answer:
    """The response to one request, as its choices grow."""

    def __init__(self, served: Served, p: CompletionParameters | ChatParameters, rows: Sequence[Row]):
        """Start with no text, under a new id. p: the parameters, from which `rows` were planned."""
        self.parameters, self.rows, self._served = p, rows, served
        self._is_chat = isinstance(p, ChatParameters)
        self._choices = [Choice(served, p, row) for row in rows]
        self._head: Json = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": served.fingerprint,
        }

    async def deltas(self, news: asyncio.Queue[Update | Exception], scheduler: Scheduler, log: Say | None) -> Deltas:
        """Yield each choice with what is new. The slots are freed when the iterator is closed.

        log: prints prompts and completions. None prints nothing.
        """
        start, last, metrics = time.perf_counter(), dict[Row, float](), scheduler.metrics
        metrics.prompt_tokens.inc(self.usage()["prompt_tokens"])
        try:
            while not all(row.is_finished for row in self.rows):
                update = await news.get()
                if isinstance(update, Exception):
                    raise update
                row, now, count = update.row, time.perf_counter(), len(update.piece.tokens)
                if row.is_finished:
                    continue
                if count:
                    metrics.completion_tokens.inc(count)
                    if row not in last:
                        metrics.first_token.observe(now - start)
                    else:
                        for _ in range(count):
                            metrics.between_tokens.observe((now - last[row]) / count)
                    last[row] = now
                choice = self._choices[row.index]
                text, tokens = choice.push(update)
                row.is_finished = update.piece.finish is not None
                if choice.finish is not None:
                    scheduler.finish([row])  # a stop string, which the engine does not know
                if text or tokens or choice.finish:
                    yield choice, text, tokens
        finally:
            scheduler.finish(self.rows)
        metrics.cached_tokens.inc(self.usage()["prompt_tokens_details"]["cached_tokens"])
        if log is not None:
            for choice in self._choices:
                prompt = self._served.run.tokenizer.decode(choice.row.request.prompt)
                log(f"{time.strftime('%H:%M:%S')} {prompt!r} -> {choice.text!r}")

    async def events(self, deltas: Deltas) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        chunk = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})
        has_usage = (self.parameters.stream_options or {}).get("include_usage")

        def render(choice: Choice, content: Json, tokens: list[Token] | None, finish: str | None) -> bytes:
            usage = {"usage": None} if has_usage else {}
            return render_event(chunk | {"choices": [self._render(choice, content, tokens, finish)]} | usage)

        try:
            async with contextlib.aclosing(deltas):
                for choice in self._choices if self._is_chat else ():
                    yield render(choice, {"delta": {"role": "assistant", "content": ""}}, None, None)
                async for choice, text, tokens in deltas:
                    if not self._is_chat:
                        yield render(choice, {"text": text}, tokens, choice.finish)
                    elif text or tokens:
                        yield render(choice, {"delta": {"content": text}}, tokens, None)
                    if choice.calls:
                        calls = [{"index": index, **call} for index, call in enumerate(choice.calls)]
                        yield render(choice, {"delta": {"tool_calls": calls}}, None, None)
                    if self._is_chat and choice.finish is not None:
                        yield render(choice, {"delta": {}}, None, choice.finish)
        except RequestError as e:  # after the status 200
            yield render_event(e.to_json())
            return
        if has_usage:
            yield render_event(chunk | {"choices": [], "usage": self.usage()})
        yield DONE

    async def whole(self, deltas: Deltas) -> Json:
        """Return the response that is not a stream."""
        async with contextlib.aclosing(deltas):
            async for _ in deltas:
                pass
        found = []
        for choice in self._choices:
            calls = {"content": choice.content or None, "tool_calls": choice.calls} if choice.calls else {}
            message = {"role": "assistant", "content": choice.content, **calls}
            content = {"message": message} if self._is_chat else {"text": choice.text}
            found.append(self._render(choice, content, choice.tokens, choice.finish))
        return self._head | {"choices": found, "usage": self.usage()}

    def usage(self) -> Json:
        """Return the numbers of tokens so far."""
        each = self._choices[:: self.parameters.n]  # each prompt once
        prompt = sum(len(choice.row.request.prompt) for choice in each)
        completion = sum(choice.num_tokens for choice in self._choices)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return usage | {"prompt_tokens_details": {"cached_tokens": sum(choice.num_cached for choice in each)}}

    def _render(self, choice: Choice, content: Json, tokens: list[Token] | None, finish: str | None) -> Json:
        """Return a choice. Its log-probabilities are objects in a chat, and otherwise OpenAI's older lists.

        If tokens have one text, `top_logprobs` has the likeliest. The lists `top_token_...` have all, best first.
        """
        top = choice.row.request.top_logprobs  # 0 wants the tokens' own
        if tokens is None or top is None:
            logprobs = None
        elif self._is_chat:
            logprobs = {"content": [_describe(token) for token in tokens]}
        else:
            places = enumerate(("ids", "texts", "logprobs")) if top else ()
            logprobs = {
                "tokens": [token.text for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [_by_text(token) for token in tokens],
                "text_offset": [token.offset for token in tokens],
                "token_ids": [token.id for token in tokens],
                **{f"top_token_{name}": [[best[at] for best in token.top] for token in tokens] for at, name in places},
            }
        return {"index": choice.row.index, **content, "logprobs": logprobs, "finish_reason": finish}


def render_body(value: Any) -> bytes:
    """Return strict JSON in UTF-8. Numbers that are not finite become null, half a surrogate pair an escape."""
    return render_json(value, ensure_ascii=False).encode("utf-8", errors="backslashreplace")


def render_event(value: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + render_body(value) + b"\n\n"


def respond(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response in JSON, with the headers of its status."""
    headers = HEADERS.get(status, {}) | (headers or {})
    return Response(render_body(value), status, headers, media_type="application/json")


def refuse(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """Return the response that says what is wrong."""
    return respond(error.to_json(), error.status, headers)


def _by_text(token: Token) -> dict[str, float] | None:
    """Return log-probabilities by text, the token's own included, or None for a first token without context."""
    found: dict[str, float] = {}
    for _, text, logprob in (*token.top, (token.id, token.text, token.logprob)):
        found.setdefault(text, logprob)
    return None if math.isnan(token.logprob) else found


def _describe(token: Token) -> Json:
    best = [_entry(text, logprob) for _, text, logprob in token.top]
    return _entry(token.text, token.logprob) | {"top_logprobs": best}


def _entry(text: str, logprob: float) -> Json:
    # Parts of characters have no bytes of their own in a decoded text.
    return {"token": text, "logprob": logprob, "bytes": None if UNFINISHED in text else list(text.encode())}
