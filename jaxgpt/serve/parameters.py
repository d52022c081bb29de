"""Parameters of requests: JSON of unknown origin in, frozen values out. Each is checked, and none is ignored silently."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

from jaxgpt.config.validate import LARGEST_SIZE, Interval, check_value, short
from jaxgpt.data.chat.template import MARKS, ROLES, Message
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json
from jaxgpt.sample import FILTERS, Sampling
from jaxgpt.sample.state import MAX_TOP
from jaxgpt.serve.errors import RequestError

# They change nothing here, and clients send them unasked.
IGNORED = ("user", "store", "metadata", "service_tier", "parallel_tool_calls")
# What there is not, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
MAX_LOGPROBS = MAX_TOP
MAX_STOPS, LONGEST_STOP = 4, 256  # strings, characters
MAX_STOP_TOKENS = 16
MAX_MESSAGES = 2048  # that a conversation may have

Prompt = str | tuple[int, ...]  # a text, or token ids
Fields = TypeVar("Fields")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that depend on the model and on the server."""

    block_size: int  # tokens
    choices: int  # most choices of one prompt: the slots of the engine
    rows: int  # most choices of all prompts of a request: the length of the queue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of every completion. None means the server's default."""

    model: str | None = None
    n: Annotated[int, Interval(ge=1)] = 1
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] | None = None
    stop: str | tuple[str, ...] = ()
    stream: bool = False
    stream_options: dict | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, temperature: float) -> Sampling:
        """Return the filters. temperature: the default."""
        filters = {name: getattr(self, name) for name in FILTERS}
        if self.temperature is None:
            filters["temperature"] = temperature
        try:
            return Sampling(**filters)
        except UserError as e:
            raise RequestError(str(e), param=str(e).partition("=")[0]) from None

    def check(self, limits: Limits) -> None:
        """Raise `RequestError` for values beyond the limits."""
        self.sampling(1.0)
        if self.n > limits.choices:
            raise RequestError(
                f"n={short(self.n)}: this server has {limits.choices} slots, needs at most as many", param="n"
            )
        if len(self.stops) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stops)} strings: needs at most {MAX_STOPS}", param="stop")
        for stop in self.stops:
            if not 1 <= len(stop) <= LONGEST_STOP:
                raise RequestError(
                    f"stop has a string of {len(stop)} characters: needs 1 to {LONGEST_STOP}", param="stop"
                )
        options = self.stream_options or {}
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for streams: needs stream=true", param="stream_options")
        if set(options) - {"include_usage"} or not isinstance(options.get("include_usage", False), bool):
            raise RequestError(
                f"stream_options={short(options)}: needs include_usage alone, true or false", param="stream_options"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionParameters(Parameters):
    """Parameters of `/v1/completions`."""

    prompt: Any = dataclasses.field(default=None)
    max_tokens: Annotated[int, Interval(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[int, Interval(ge=0, le=MAX_LOGPROBS)] | None = None
    stop_token_ids: tuple[int, ...] = ()  # further ones, beside the model's own

    def check(self, limits: Limits) -> None:
        """Raise `RequestError` for values beyond the limits."""
        super().check(limits)
        _check_length("max_tokens", self.max_tokens, limits)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            message = f"stop_token_ids has {len(self.stop_token_ids)} ids: needs at most {MAX_STOP_TOKENS}"
            raise RequestError(message, param="stop_token_ids")
        if any(not 0 <= i < LARGEST_SIZE for i in self.stop_token_ids):
            message = f"stop_token_ids={short(self.stop_token_ids)}: needs ids of tokens"
            raise RequestError(message, param="stop_token_ids")
        if not self.max_tokens and not self.echo:
            raise RequestError("max_tokens=0: needs at least 1, or echo=true", param="max_tokens")
        if (rows := self.n * len(self.prompts)) > limits.rows:
            raise RequestError(
                f"{len(self.prompts)} prompts with n={self.n} are {rows} choices: needs at most {limits.rows}",
                param="prompt",
            )

    @property
    def prompts(self) -> list[Prompt]:
        """Return the prompts. Raises `RequestError` for another shape, in which the client sent them."""
        match self.prompt:
            case str():
                return [self.prompt]
            case [_, *_] if _are_ids(self.prompt):
                return [tuple(self.prompt)]
            case [_, *_] if all(isinstance(prompt, str) or (_are_ids(prompt) and prompt) for prompt in self.prompt):
                return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in self.prompt]
        raise RequestError(
            f"prompt={short(self.prompt)}: needs a text, a list of texts, token ids, or a list of lists of token ids; "
            "none of the lists empty",
            param="prompt",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatParameters(Parameters):
    """Parameters of `/v1/chat/completions`."""

    messages: Any = dataclasses.field(default=None)
    max_tokens: Annotated[int, Interval(ge=1)] | None = None  # None: what the context holds
    max_completion_tokens: Annotated[int, Interval(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Interval(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """Return the limit under its newer or its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self, limits: Limits) -> None:
        """Raise `RequestError` for values beyond the limits."""
        super().check(limits)
        for name in ("max_tokens", "max_completion_tokens"):
            _check_length(name, getattr(self, name) or 0, limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(f"top_logprobs={self.top_logprobs}: needs logprobs=true", param="top_logprobs")
        _ = self.conversation

    @property
    def conversation(self) -> list[Message]:
        """Return the messages that `check_messages` has checked."""
        return check_messages(self.messages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeParameters:
    """Parameters of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = dataclasses.field(default=None)
    add_special_tokens: bool = True
    as_prompt: bool = False  # the ids that `/v1/completions` continues
    return_token_strs: bool = False

    @property
    def conversation(self) -> list[Message]:
        """Return the messages that `check_messages` has checked."""
        return check_messages(self.messages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetokenizeParameters:
    """Parameters of `/detokenize`."""

    model: str | None = None
    tokens: tuple[int, ...] | None = None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that a body holds. Raises `RequestError` for anything else."""
    try:
        body = parse_json(raw, "the body")
    except UserError as e:
        raise RequestError(str(e)) from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {short(body)}: needs a JSON object")
    return body


def parse(kind: type[Fields], body: dict[str, Any], *, others: Sequence[str] = ()) -> Fields:
    """Return the parameters in a body, as a dataclass of that kind. null means the default.

    Raises `RequestError` for an unknown parameter, and for a value of another type or out of bounds.
    others: further parameters that are ignored.
    """
    hints, given = get_type_hints(kind, include_extras=True), {}
    for name, value in body.items():
        if name in IGNORED or name in others or value is None:
            continue
        if name in UNSUPPORTED and name not in hints:
            if any(value == neutral and type(value) in (type(neutral), float) for neutral in UNSUPPORTED[name]):
                continue
            raise RequestError(f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
        if name not in hints:
            known = ", ".join(sorted(hints))
            message = f"unknown parameter {short(name)}: there are {known}"
            raise RequestError(message, param=name[:80], code="unknown_parameter")
        try:
            held = tuple(value) if isinstance(value, list) and hints[name] is not Any else value
            given[name] = value if hints[name] is Any else check_value(name, held, hints[name])
        except UserError as e:
            raise RequestError(str(e), param=name) from None
    return kind(**given)


def check_messages(messages: Any) -> list[Message]:
    """Return the messages of a conversation. Raises `RequestError` for what is not text."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages={short(messages)}: needs a list of at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        message = f"there are {len(messages):,} messages: needs at most {MAX_MESSAGES:,}, leave out the oldest"
        raise RequestError(message, param="messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def _check_length(name: str, value: int, limits: Limits) -> None:
    if value > limits.block_size:
        message = (
            f"{name}={short(value)}: the context of this model is {limits.block_size} tokens, needs at most as many"
        )
        raise RequestError(message, param=name)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestError(f"{where} is {short(message)}: needs a role, {', '.join(ROLES)}, and a content", param=where)
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        parts = [part.get("text") for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise RequestError(f"{where} has the content {short(content)}: needs a text", param=where)
    if others := [
        key for key, value in message.items() if key not in ("role", "content", "name") and value is not None
    ]:
        raise RequestError(f"{where} has {short(others[0])}: needs role and content alone", param=where)
    if bad := next((c for c in content if c in MARKS or "\ud800" <= c <= "\udfff"), None):
        raise RequestError(f"{where} has U+{ord(bad):04X} in its content, which is not a character", param=where)
    return {"role": message["role"], "content": content}
