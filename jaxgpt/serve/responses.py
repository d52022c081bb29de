"""JSON of OpenAI's responses: completions, chat completions, and their streams."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jaxgpt.files import render_json
from jaxgpt.sample.engine import UNFINISHED
from jaxgpt.serve.choice import Delta, Token

DONE = b"data: [DONE]\n\n"


class Usage(NamedTuple):
    """Tokens of a request."""

    prompt: int
    completion: int
    cached: int  # of the prompt's

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's form."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Format(Protocol):
    """JSON of one kind of completion."""

    name: str
    chunk_name: str
    prefix: str  # of the ids of responses

    def choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a whole choice."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice of a stream's first chunk, if it has no text."""
        ...

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of the chunks that carry a delta."""
        ...


class CompletionFormat(Format):
    """Texts: log-probabilities are four lists, and two of ids."""

    name = chunk_name = "text_completion"
    prefix = "cmpl"

    def __init__(self, logprobs: int | None):
        """Choose the number of alternatives for each token. None means no log-probabilities."""
        self._logprobs = logprobs

    def choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a whole choice."""
        tokens = [token for delta in deltas for token in delta.tokens]
        text, finish = "".join(delta.text for delta in deltas), deltas[-1].finish
        return {"index": index, "text": text, "logprobs": self._render(tokens), "finish_reason": finish}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return None: the first chunk has text."""
        return None

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return one chunk's choice."""
        return [self.choice(index, [delta])]

    def _render(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Return the older form of log-probabilities, with the ids of the tokens beside it.

        Several tokens may have one text: in `top_logprobs` the most probable of them has it. The three lists whose
        names begin with `top_token` have all alternatives, best first.
        """
        if self._logprobs is None:
            return None
        some: dict[str, Any] = {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens] if self._logprobs else None,
            "text_offset": [token.offset for token in tokens],
            "token_ids": [token.id for token in tokens],
        }
        if self._logprobs:
            for at, name in enumerate(("ids", "texts", "logprobs")):
                some[f"top_token_{name}"] = [[best[at] for best in token.top] for token in tokens]
        return some


class ChatFormat(Format):
    """Messages: log-probabilities are a list of objects."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, logprobs: bool):
        """Choose whether log-probabilities are in it."""
        self._logprobs = logprobs

    def choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a whole choice."""
        tokens = [token for delta in deltas for token in delta.tokens]
        message = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
        finish = deltas[-1].finish
        return {"index": index, "message": message, "logprobs": self._render(tokens), "finish_reason": finish}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the role."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return a chunk's choice with the text, and one with the reason of the end."""
        parts = []
        if delta.text or delta.tokens:
            parts.append(self._chunk(index, {"content": delta.text}, self._render(delta.tokens), None))
        if delta.finish is not None:
            parts.append(self._chunk(index, {}, None, delta.finish))
        return parts

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _render(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            _entry(token.text, token.logprob) | {"top_logprobs": [_entry(text, p) for _, text, p in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class Envelope(NamedTuple):
    """What the response to a request, or every chunk of it, has in common."""

    format: Format
    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str

    @classmethod
    def make(cls, form: Format, model: str, fingerprint: str) -> Envelope:
        """Return one with a new id."""
        return cls(form, f"{form.prefix}-{secrets.token_hex(12)}", int(time.time()), model, fingerprint)

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the response that is not a stream."""
        return self._body(self.format.name, choices) | {"usage": usage.to_json()}

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """Return an event of a stream. usage: entries for it."""
        return render_event(self._body(self.format.chunk_name, choices) | (usage or {}))

    def _body(self, name: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        body = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return body | {"system_fingerprint": self.fingerprint, "choices": list(choices)}


def render_body(value: Any) -> bytes:
    """Return strict JSON in UTF-8. Numbers that are not finite become null, half a surrogate pair an escape."""
    return render_json(value, ensure_ascii=False).encode("utf-8", errors="backslashreplace")


def render_event(value: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + render_body(value) + b"\n\n"


def _by_text(token: Token) -> dict[str, float] | None:
    """Return log-probabilities by text, the token's own included; None for a first token without context."""
    found: dict[str, float] = {}
    for _, text, logprob in token.top:
        found.setdefault(text, logprob)
    if token.top:
        found.setdefault(token.text, token.logprob)
    return found or None


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # Parts of characters have no bytes of their own in a decoded text.
    return {"token": text, "logprob": logprob, "bytes": None if UNFINISHED in text else list(text.encode())}
