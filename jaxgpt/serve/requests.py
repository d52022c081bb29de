"""Requests: JSON of unknown origin in, rows for the scheduler out. Each value is checked; none is ignored silently."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

from jaxgpt.config.validate import LARGEST_SIZE, Interval, check_value, field_hints, short
from jaxgpt.data.template import MARKS, ROLES, Message
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json
from jaxgpt.run import Run
from jaxgpt.sample import Sampling
from jaxgpt.sample.state import MAX_TOP, check_ids

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
# What a request may say of `Sampling`; greedy is a temperature of 0.
FILTERS = {name: hint for name, hint in field_hints(Sampling).items() if name != "greedy"}
MAX_STOPS, LONGEST_STOP = 4, 256  # strings, characters
MAX_STOP_TOKENS = 16
MAX_MESSAGES = 2048  # that a conversation may have

Prompt = str | tuple[int, ...]  # a text, or token ids
Fields = TypeVar("Fields")


class RequestError(UserError):
    """A request that is refused, or that cannot be finished."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        """Name the reason.

        message: what was got, and what is needed. status: of HTTP. param: the parameter at fault. code: a word for
        programs.
        """
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response, in OpenAI's form."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of every completion."""

    model: str | None = None
    n: Annotated[int, Interval(ge=1)] = 1
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] | None = None
    stop: str | tuple[str, ...] = ()
    stream: bool = False
    stream_options: dict | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)  # in a request, each of its fields by itself

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return bool((self.stream_options or {}).get("include_usage"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionParameters(Parameters):
    """Parameters of `/v1/completions`."""

    prompt: Any = None
    max_tokens: Annotated[int, Interval(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[int, Interval(ge=0, le=MAX_TOP)] | None = None
    stop_token_ids: tuple[int, ...] = ()  # further ones, beside the model's own

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
        needed = "a text, a list of texts, token ids, or a list of lists of token ids; none of the lists empty"
        raise RequestError(f"prompt={short(self.prompt)}: needs {needed}", param="prompt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatParameters(Parameters):
    """Parameters of `/v1/chat/completions`."""

    messages: Any = None
    max_tokens: Annotated[int, Interval(ge=1)] | None = None  # None: what the context holds
    max_completion_tokens: Annotated[int, Interval(ge=1)] | None = None  # its newer name
    logprobs: bool = False
    top_logprobs: Annotated[int, Interval(ge=0, le=MAX_TOP)] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeParameters:
    """Parameters of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    as_prompt: bool = False  # the ids that `/v1/completions` continues
    return_token_strs: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetokenizeParameters:
    """Parameters of `/detokenize`."""

    model: str | None = None
    tokens: tuple[int, ...] | None = None


def parse(kind: type[Fields], raw: bytes, temperature: float = 1.0) -> Fields:
    """Return the parameters in a body, as a dataclass of that kind. null means the default.

    Raises `RequestError` for what is not a JSON object, for an unknown parameter, and for a value of another type or
    out of bounds. temperature: the default.
    """
    try:
        body = parse_json(raw, "the body")
    except UserError as e:
        raise RequestError(str(e)) from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {short(body)}: needs a JSON object")
    hints, given = dict(field_hints(kind)), {}
    if has_sampling := hints.pop("sampling", None) is not None:
        hints |= FILTERS
    for name, value in body.items():
        if name in IGNORED or value is None:
            continue
        if name in UNSUPPORTED and name not in hints:
            if any(value == neutral and type(value) in (type(neutral), float) for neutral in UNSUPPORTED[name]):
                continue
            raise RequestError(f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
        if name not in hints:
            message = f"unknown parameter {short(name)}: there are {', '.join(sorted(hints))}"
            raise RequestError(message, param=name[:80], code="unknown_parameter")
        with _naming(name):
            value = tuple(value) if isinstance(value, list) and hints[name] is not Any else value
            given[name] = value if hints[name] is Any else check_value(name, value, hints[name])
    if has_sampling:
        filters: dict[str, Any] = {"temperature": temperature}
        filters |= {name: given.pop(name) for name in FILTERS if name in given}
        try:
            given["sampling"] = Sampling(**filters)
        except UserError as e:
            raise RequestError(str(e), param=str(e).partition("=")[0]) from None
    return kind(**given)


def check_messages(messages: Any) -> list[Message]:
    """Return the messages of a conversation. Raises `RequestError` for what is not text."""
    is_list = isinstance(messages, list) and bool(messages)
    _need(is_list, "messages", f"messages={short(messages)}: needs a list of at least one message")
    many = f"there are {len(messages):,} messages: needs at most {MAX_MESSAGES:,}, leave out the oldest"
    _need(len(messages) <= MAX_MESSAGES, "messages", many)
    checked: list[Message] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            needed = f"needs a role, {', '.join(ROLES)}, and a content"
            raise RequestError(f"{where} is {short(message)}: {needed}", param=where)
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            parts = [part.get("text") for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str):
            raise RequestError(f"{where} has the content {short(content)}: needs a text", param=where)
        for name, value in message.items():
            is_known = name in ("role", "content", "name") or value is None
            _need(is_known, where, f"{where} has {short(name)}: needs role and content alone")
        for bad in (c for c in content if c in MARKS or "\ud800" <= c <= "\udfff"):
            raise RequestError(f"{where} has U+{ord(bad):04X} in its content, which is not a character", param=where)
        checked.append({"role": message["role"], "content": content})
    return checked


@dataclasses.dataclass(kw_only=True, eq=False)
class Row:
    """One choice to generate."""

    index: int  # in its request
    prompt: tuple[int, ...]
    text: str | None = None  # from which the prompt was encoded; None: ids were given, or messages
    seed: int
    earlier: int = 0  # equal prompts before it in its request, whose draws differ
    max_new_tokens: int  # 0: only the scores of the prompt
    sampling: Sampling
    stop_tokens: tuple[int, ...] = ()
    top_logprobs: int | None = None  # alternatives of each token; None: no log-probabilities
    is_scored: bool = False  # whether the prompt's log-probabilities are needed
    is_finished: bool = False  # written by the event loop, read by the scheduler's thread


class Served:
    """A run as it is served, with its limits. Any thread may call its methods."""

    def __init__(self, run: Run, *, slots: int, queue: int):
        """Fix the defaults. slots: rows that are decoded together. queue: rows that may wait."""
        self.run, self.slots, self.queue = run, slots, queue
        self.name = run.directory.resolve().name
        self.fingerprint = f"step-{run.step}"  # under another one the same seed may give another text
        self.block_size = run.model.config.block_size
        self.temperature = run.experiment.train.sample_temperature
        self.stop_tokens = tuple(run.prompt_format.stop_tokens(chat=False))
        self.chat_stop_tokens: tuple[int, ...] | None = None  # None: no chat
        try:
            self.chat_stop_tokens = tuple(run.prompt_format.stop_tokens(chat=True))
        except UserError as e:  # characters or tokens of the template that the tokenizer lacks
            self._why_no_chat = str(e)
        tokenizer = run.tokenizer

        @functools.lru_cache(maxsize=2**16)
        def text_of(i: int) -> str:
            # After itself, since some decoders drop the space of a first token.
            return tokenizer.decode([i, i])[len(tokenizer.decode([i])) :]

        self.text_of = text_of  # of one id: U+FFFD for a part of a character

    def check_name(self, name: str | None) -> None:
        """Raise `RequestError` for the name of another model."""
        if name is not None and name != self.name:
            message = f"there is no model {name[:80]!r} here: needs {self.name!r}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def check(self, p: CompletionParameters | ChatParameters) -> None:
        """Raise `RequestError` for parameters that contradict each other, or are beyond the limits of the server."""
        self.check_name(p.model)
        _need(p.n <= self.slots, "n", f"n={short(p.n)}: this server has {self.slots} slots, needs at most as many")
        _need(len(p.stops) <= MAX_STOPS, "stop", f"stop has {len(p.stops)} strings: needs at most {MAX_STOPS}")
        for size in map(len, p.stops):
            is_right = 1 <= size <= LONGEST_STOP
            _need(is_right, "stop", f"stop has a string of {size} characters: needs 1 to {LONGEST_STOP}")
        options, name = p.stream_options or {}, "stream_options"
        _need(p.stream or p.stream_options is None, name, f"{name} is for streams: needs stream=true")
        is_known = not set(options) - {"include_usage"} and isinstance(options.get("include_usage", False), bool)
        _need(is_known, name, f"{name}={short(options)}: needs include_usage alone, true or false")
        lengths = {"max_tokens": p.max_tokens or 0}
        if isinstance(p, ChatParameters):
            lengths["max_completion_tokens"] = p.max_completion_tokens or 0
        for name, length in lengths.items():
            most = f"the context of this model is {self.block_size} tokens, needs at most as many"
            _need(length <= self.block_size, name, f"{name}={short(length)}: {most}")
        if isinstance(p, ChatParameters):
            is_right = p.top_logprobs is None or p.logprobs
            _need(is_right, "top_logprobs", f"top_logprobs={p.top_logprobs}: needs logprobs=true")
            check_messages(p.messages)
            return
        ids, name = p.stop_token_ids, "stop_token_ids"
        _need(len(ids) <= MAX_STOP_TOKENS, name, f"{name} has {len(ids)} ids: needs at most {MAX_STOP_TOKENS}")
        _need(all(0 <= i < LARGEST_SIZE for i in ids), name, f"{name}={short(ids)}: needs ids of tokens")
        _need(p.max_tokens > 0 or p.echo, "max_tokens", "max_tokens=0: needs at least 1, or echo=true")
        count = len(p.prompts)
        many = f"{count} prompts with n={p.n} are {count * p.n} choices: needs at most {self.queue}"
        _need(count * p.n <= self.queue, "prompt", many)

    def plan(self, p: CompletionParameters | ChatParameters) -> list[Row]:
        """Return the choices to generate: n of the first prompt, n of the second, and so on."""
        if isinstance(p, ChatParameters):
            prompts = [(None, self.encode_messages(p.messages))]
            length = p.max_tokens if p.max_completion_tokens is None else p.max_completion_tokens
            length, stop_tokens = length or self.block_size, self.chat_stop_tokens or ()
            top, is_scored = (p.top_logprobs or 0) if p.logprobs else None, False
        else:
            prompts = [(prompt if isinstance(prompt, str) else None, self.encode(prompt)) for prompt in p.prompts]
            length, stop_tokens = p.max_tokens, (*self.stop_tokens, *p.stop_token_ids)
            top, is_scored = p.logprobs, p.echo and p.logprobs is not None
        seed = secrets.randbits(32) if p.seed is None else p.seed
        rows, earlier = [], collections.Counter[object]()
        for text, ids in prompts:
            for _ in range(p.n):
                row = Row(
                    index=len(rows),
                    prompt=ids,
                    text=text,
                    seed=seed,
                    earlier=earlier[ids],
                    max_new_tokens=length,
                    sampling=p.sampling,
                    stop_tokens=stop_tokens,
                    top_logprobs=top,
                    is_scored=is_scored,
                )
                earlier[ids] += 1
                rows.append(row)
        return rows

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of a prompt. Raises `RequestError` for text or ids that the model cannot read."""
        with _naming("prompt"):
            if isinstance(prompt, str):
                (ids,) = self.run.prompt_format.encode([prompt], chat=False)
            else:
                ids = check_ids(self.run.model, prompt, "prompt").tolist()
            return self._check_ids(ids, "prompt")

    def encode_messages(self, messages: Any) -> tuple[int, ...]:
        """Return the ids of a conversation. Raises `RequestError` for one that the model cannot read."""
        conversation = check_messages(messages)
        if self.chat_stop_tokens is None:
            raise RequestError(f"{self.name} cannot chat: {self._why_no_chat}", code="no_chat")
        with _naming("messages"):
            return self._check_ids(self.run.prompt_format.encode_messages(conversation), "messages")

    def tokenize(self, p: TokenizeParameters) -> list[int]:
        """Return the ids that `/tokenize` gives; a text that is one special token is encoded as that."""
        tokenizer = self.run.tokenizer
        if p.prompt is None:
            return list(self.encode_messages(p.messages))
        if p.as_prompt:
            return list(self.encode(p.prompt))
        if p.prompt in tokenizer.specials:
            return [tokenizer.specials[p.prompt]]
        with _naming("prompt"):
            ids = tokenizer.encode(p.prompt).tolist()
        return [*tokenizer.prefix, *ids] if p.add_special_tokens else ids

    def detokenize(self, ids: Sequence[int] | None) -> str:
        """Return the text of ids. Raises `RequestError` for ids that the tokenizer lacks."""
        if ids is None:
            raise RequestError("tokens is missing: needs a list of token ids", param="tokens")
        known = self.run.tokenizer.vocab_size
        bad = [i for i in ids if not 0 <= i < known]
        _need(not bad, "tokens", f"tokens has {short(bad[:1])}: needs ids from 0 to {known - 1}")
        return self.run.tokenizer.decode(ids)

    def _check_ids(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        most, known = self.block_size, self.run.tokenizer.vocab_size
        if not 1 <= len(ids) <= most:
            message = f"the {param} has {len(ids):,} tokens, and the context of {self.name} is {most:,}"
            code = "context_length_exceeded" if ids else None
            raise RequestError(f"{message}: needs 1 to {most:,}", param=param, code=code)
        _need(max(ids) < known, param, f"the {param} has the id {max(ids)}: needs ids from 0 to {known - 1}")
        return tuple(ids)


def _need(is_right: bool, param: str, message: str) -> None:
    if not is_right:
        raise RequestError(message, param=param)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


@contextlib.contextmanager
def _naming(param: str) -> Iterator[None]:
    """Turn a `UserError` into a `RequestError` that names the parameter."""
    try:
        yield
    except RequestError:
        raise
    except UserError as e:
        raise RequestError(str(e), param=param) from None
