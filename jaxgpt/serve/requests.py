"""Requests: JSON of unknown origin in, rows for the scheduler out. Each value is checked; none is ignored silently."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
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
NO_CHARACTER = re.compile(f"[\ud800-\udfff{''.join(MARKS)}]")

Prompt = str | tuple[int, ...]  # a text, or token ids
Fields = TypeVar("Fields")


class RequestError(UserError):
    """A request that is refused, or that cannot be finished."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        """Say what was got, and what is needed. status: of HTTP. param: the one at fault. code: a word for programs."""
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
    filters = FILTERS if hints.pop("sampling", None) else {}
    hints |= filters
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
    if filters:
        chosen: dict[str, Any] = {"temperature": temperature}
        chosen |= {name: given.pop(name) for name in filters if name in given}
        try:
            given["sampling"] = Sampling(**chosen)
        except UserError as e:
            raise RequestError(str(e), param=str(e).partition("=")[0]) from None
    return kind(**given)


def check_messages(messages: Any) -> list[Message]:
    """Return the messages of a conversation. Raises `RequestError` for what is not text."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages={short(messages)}: needs a list of at least one message", param="messages")
    many = f"there are {len(messages):,} messages: needs at most {MAX_MESSAGES:,}, leave out the oldest"
    _need(len(messages) <= MAX_MESSAGES, "messages", many)
    checked: list[Message] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        match message:
            case {"role": str(role), "content": content, **rest} if role in ROLES:
                pass
            case _:
                needed = f"needs a role, {', '.join(ROLES)}, and a content"
                raise RequestError(f"{where} is {short(message)}: {needed}", param=where)
        if isinstance(content, list):  # of texts
            parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
            texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
            content = "".join(texts) if len(texts) == len(content) else None
        if not isinstance(content, str):
            raise RequestError(f"{where} has a content that is not a text", param=where)
        extra = [name for name, value in rest.items() if name != "name" and value is not None]
        _need(not extra, where, f"{where} has {short(extra)}: needs role and content alone")
        if bad := NO_CHARACTER.search(content):
            raise RequestError(f"{where} has U+{ord(bad[0]):04X} in its content, which is not a character", param=where)
        checked.append({"role": role, "content": content})
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
        decode = run.tokenizer.decode
        # The text of one id, U+FFFD for a part of a character: after itself, since some decoders drop the first space.
        self.text_of = functools.lru_cache(2**16)(lambda i: decode([i, i])[len(decode([i])) :])

    def check_name(self, name: str | None) -> None:
        """Raise `RequestError` for the name of another model."""
        if name is not None and name != self.name:
            message = f"there is no model {name[:80]!r} here: needs {self.name!r}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def plan(self, p: CompletionParameters | ChatParameters) -> list[Row]:
        """Return the choices to generate: n of the first prompt, n of the second, and so on.

        Raises `RequestError` for parameters that contradict each other, or are beyond the limits of the server.
        """
        self.check_name(p.model)
        _need(p.n <= self.slots, "n", f"n={short(p.n)}: this server has {self.slots} slots, needs at most as many")
        _need(len(p.stops) <= MAX_STOPS, "stop", f"stop has {len(p.stops)} strings: needs at most {MAX_STOPS}")
        is_right = all(1 <= len(stop) <= LONGEST_STOP for stop in p.stops)
        _need(is_right, "stop", f"stop={short(p.stop)}: needs strings of 1 to {LONGEST_STOP} characters")
        options, name = p.stream_options or {}, "stream_options"
        _need(p.stream or p.stream_options is None, name, f"{name} is for streams: needs stream=true")
        is_known = not set(options) - {"include_usage"} and isinstance(options.get("include_usage", False), bool)
        _need(is_known, name, f"{name}={short(options)}: needs include_usage alone, true or false")
        self._check_length("max_tokens", p.max_tokens)
        if isinstance(p, ChatParameters):
            self._check_length("max_completion_tokens", p.max_completion_tokens)
            is_right = p.top_logprobs is None or p.logprobs
            _need(is_right, "top_logprobs", f"top_logprobs={p.top_logprobs}: needs logprobs=true")
            prompts = [(None, self.encode_messages(p.messages))]
            length = p.max_completion_tokens or p.max_tokens or self.block_size
            stop_tokens = self.chat_stop_tokens or ()
            top, is_scored = (p.top_logprobs or 0) if p.logprobs else None, False
        else:
            ids, name = p.stop_token_ids, "stop_token_ids"
            _need(len(ids) <= MAX_STOP_TOKENS, name, f"{name} has {len(ids)} ids: needs at most {MAX_STOP_TOKENS}")
            _need(all(0 <= i < LARGEST_SIZE for i in ids), name, f"{name}={short(ids)}: needs ids of tokens")
            _need(p.max_tokens > 0 or p.echo, "max_tokens", "max_tokens=0: needs at least 1, or echo=true")
            count = len(p.prompts)
            many = f"{count} prompts with n={p.n} are {count * p.n} choices: needs at most {self.queue}"
            _need(count * p.n <= self.queue, "prompt", many)
            prompts = [(prompt if isinstance(prompt, str) else None, self.encode(prompt)) for prompt in p.prompts]
            length, stop_tokens = p.max_tokens, (*self.stop_tokens, *ids)
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

    def tokenize(self, p: TokenizeParameters) -> dict[str, Any]:
        """Return the response with the ids of a prompt or of messages. A text that is one special token becomes it."""
        tokenizer = self.run.tokenizer
        if p.prompt is None:
            ids = self.encode_messages(p.messages)
        elif p.as_prompt:
            ids = self.encode(p.prompt)
        elif p.prompt in tokenizer.specials:
            ids = [tokenizer.specials[p.prompt]]
        else:
            with _naming("prompt"):
                ids = tokenizer.encode(p.prompt).tolist()
            ids = [*tokenizer.prefix, *ids] if p.add_special_tokens else ids
        texts = [self.text_of(i) for i in ids] if p.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.block_size, "tokens": ids, "token_strs": texts}

    def detokenize(self, p: DetokenizeParameters) -> dict[str, Any]:
        """Return the response with the text of ids. Raises `RequestError` for ids that the tokenizer lacks."""
        if p.tokens is None:
            raise RequestError("tokens is missing: needs a list of token ids", param="tokens")
        known = self.run.tokenizer.vocab_size
        bad = [i for i in p.tokens if not 0 <= i < known]
        _need(not bad, "tokens", f"tokens has {short(bad[:1])}: needs ids from 0 to {known - 1}")
        return {"prompt": self.run.tokenizer.decode(p.tokens)}

    def _check_length(self, name: str, length: int | None) -> None:
        most = f"the context of this model is {self.block_size} tokens, needs at most as many"
        _need((length or 0) <= self.block_size, name, f"{name}={short(length)}: {most}")

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
