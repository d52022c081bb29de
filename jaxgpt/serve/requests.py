"""Turn JSON of unknown origin into rows for the scheduler. Each value is checked, and none is ignored silently."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import jax

from jaxgpt.config.serialize import suggest
from jaxgpt.config.validate import Interval, check_value, field_hints, short
from jaxgpt.data.template import check_message
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tools import Offer, check_tools, offer_tools
from jaxgpt.errors import UserError
from jaxgpt.files import Json, parse_json
from jaxgpt.run import Run
from jaxgpt.sample import Sampling
from jaxgpt.sample.engine import Request, prompt_keys
from jaxgpt.sample.grammar import JSON, Grammar, check_integers, compile_grammar
from jaxgpt.sample.programs import MAX_TOP, check_ids
from jaxgpt.serve import ServeOptions

# These parameters change nothing here, and clients send them unasked.
IGNORED = """user store metadata service_tier reasoning_effort verbosity prompt_cache_key
    prompt_cache_options prompt_cache_retention safety_identifier prediction""".split()
# Clients send these values to ask for nothing, as null does. Parameters that are refused otherwise are among them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "seed": (-1,),
    "logprobs": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
    "min_tokens": (0,),
}
STREAM_OPTIONS = ("include_usage", "include_obfuscation")  # the second pads events, against who measures their lengths
# The fields of `Sampling` in a request. A temperature of 0 is greedy.
FILTERS = {name: hint for name, hint in field_hints(Sampling).items() if name != "greedy"}
# vLLM's names, and ours with their types.
GRAMMARS = {"json": ("schema", dict), "regex": ("regex", str), "choice": ("choices", tuple[str, ...])}
MAX_STOP_TOKENS = 16  # ids
QUEUE = 4  # rows that may wait, for each slot
MAX_MESSAGES = 2048  # most messages in a conversation

Prompt = str | list[int]  # a text, or token ids
Fields = TypeVar("Fields")


class RequestError(UserError):
    """A request that is refused, or that cannot be finished."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        """Say what was got, and what is needed. status: of HTTP. param: the one at fault. code: a word for programs."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def to_json(self) -> Json:
        """Return the body of the response, in OpenAI's form."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of every completion."""

    model: str | None = None
    n: Annotated[int, Interval(ge=1)] = 1
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] | None = None
    stop: tuple[str, ...] = ()  # in a request, one string will do
    stop_token_ids: tuple[int, ...] = ()  # further stop tokens, in addition to the model's own
    parallel_tool_calls: bool = True  # False means one call of a tool at most
    ignore_eos: bool = False  # the model's own do not end the completion
    stream: bool = False
    stream_options: dict | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)  # in a request, each of its fields by itself
    # What the completion must match, as OpenAI and vLLM ask for it. Only one may be given.
    response_format: dict | None = None
    structured_outputs: dict | None = None

    def compile_grammar(self, tokenizer: Tokenizer) -> tuple[str, Grammar | None]:
        """Return what the completion must match, None for any text, and before it the parameter that says so."""
        kind, value, param = "", None, "response_format"
        match self.response_format:
            case None | {"type": "text"}:
                param = "structured_outputs"
            case {"type": "json_schema", "json_schema": {"schema": value}}:
                kind = "json"
            case {"type": "json_object", **more}:
                schema = more.get("schema")
                kind, value = "json", {"type": "object"} if schema is None else schema
            case other:
                needed = 'needs the type text, json_object, or json_schema with {"json_schema": {"schema": ...}}'
                raise RequestError(f"response_format={short(other)}: {needed}", param=param)
        if self.structured_outputs is not None:
            asked = {name: held for name, held in self.structured_outputs.items() if held is not None}
            is_one = len(asked) == 1 and asked.keys() <= GRAMMARS.keys() and not kind
            message = f"structured_outputs={short(asked)}: needs one of {', '.join(GRAMMARS)}, without response_format"
            _need(is_one, message, "structured_outputs")
            ((kind, value),) = asked.items()
        if not kind:
            return "", None
        with _naming(param):
            if kind == "json" and isinstance(value, str):  # vLLM takes the text of one, too
                value = parse_json(value.encode(errors="replace"), param)
            value = tuple(value) if isinstance(value, list) else value
            name, hint = GRAMMARS[kind]
            return param, compile_grammar(tokenizer, **{name: check_value(param, value, hint)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionParameters(Parameters):
    """Parameters of `/v1/completions`."""

    prompt: Any = None
    max_tokens: Annotated[int, Interval(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[int, Interval(ge=0, le=MAX_TOP)] | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """Return the prompts. Raises `RequestError` for another shape, in which the client sent them."""
        prompts = [self.prompt] if _is_prompt(self.prompt) else self.prompt
        is_right = isinstance(prompts, list) and prompts and all(map(_is_prompt, prompts))
        needed = "a text, a list of texts, token ids, or a list of lists of token ids; none of the lists empty"
        _need(is_right, f"prompt={short(self.prompt)}: needs {needed}", "prompt")
        return prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatParameters(Parameters):
    """Parameters of `/v1/chat/completions`."""

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    max_tokens: Annotated[int, Interval(ge=1)] | None = None  # None means what the context holds
    max_completion_tokens: Annotated[int, Interval(ge=1)] | None = None  # its newer name
    logprobs: bool = False
    top_logprobs: Annotated[int, Interval(ge=0, le=MAX_TOP)] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeParameters:
    """Parameters of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    return_token_strs: bool = False


def parse(kind: type[Fields], raw: bytes, temperature: float = 1.0) -> Fields:
    """Return the parameters in a body, as a dataclass of that kind. null means the default.

    Raises `RequestError` for what is not a JSON object, for an unknown parameter, and for a value of another type or
    out of bounds. temperature: the default.
    """
    with _naming(None):
        body = parse_json(raw, "the body")
    _need(isinstance(body, dict), f"the body is {short(body)}: needs a JSON object")
    hints, given = dict(field_hints(kind)), {}
    filters = FILTERS if hints.pop("sampling", None) else {}
    hints |= filters
    for name, value in body.items():
        is_neutral = any(value == v and type(value) is type(v) for v in NEUTRAL.get(name, ()))
        if value is None or name in IGNORED or is_neutral:
            continue
        if name not in hints:
            message = f"unknown parameter {short(name)}{suggest(name, hints)}: see the documentation for all"
            raise RequestError(message, param=name[:80], code="unknown_parameter")
        with _naming(name):
            value = _read_biases(value) if name == "logit_bias" else value
            value = (value,) if name == "stop" and isinstance(value, str) else value
            value = tuple(value) if isinstance(value, list) and hints[name] is not Any else value
            given[name] = check_value(name, value, hints[name])
    if filters:
        chosen: Json = {"temperature": temperature}
        chosen |= {name: given.pop(name) for name in filters if name in given}
        with _naming("logit_bias"):  # the others have been checked
            given["sampling"] = Sampling(**chosen)
    return kind(**given)


def _read_biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of an id and a number from an object with ids as names."""
    if not isinstance(value, dict) or not all(re.fullmatch("[0-9]{1,9}", name) for name in value):
        raise UserError(f"logit_bias={short(value)}: needs an object with ids of tokens as names and numbers as values")
    return tuple((int(name), bias) for name, bias in value.items())


@dataclasses.dataclass(kw_only=True, eq=False)
class Row:
    """One choice to generate."""

    index: int  # position in the request of the client
    request: Request  # what the engine is asked. max_new_tokens of 0 asks only for the scores of the prompt
    prompt: Prompt | None = None  # as it was given. None for messages
    offer: Offer | None = None
    is_scored: bool = False  # whether the prompt's log-probabilities are needed
    is_finished: bool = False  # written by the event loop, read by the scheduler's thread
    deliver: Callable[[Any], None] = dataclasses.field(init=False)  # hands news over to the event loop


class Served:
    """A run as it is served, with its limits. Any thread may call its methods."""

    def __init__(self, run: Run, options: ServeOptions):
        """Fix the defaults. The first name is for answers."""
        self.run, self.slots, self._any_name = run, options.slots, options.any_model
        self.queue = QUEUE * options.slots  # rows that may wait
        self.names = options.model_name or (run.directory.resolve().name,)
        self.name = self.names[0]
        self.fingerprint = f"step-{run.step}"  # under another fingerprint the same seed may give another text
        self.block_size = run.model.config.block_size
        self.temperature = run.experiment.train.sample_temperature
        self.stop_tokens = tuple(run.prompt_format.stop_tokens(chat=False))
        self.chat_stop_tokens: tuple[int, ...] | None = None  # None if it cannot chat
        try:
            self.chat_stop_tokens = tuple(run.prompt_format.stop_tokens(chat=True))
        except UserError as e:  # characters or tokens of the template that the tokenizer lacks
            self._why_no_chat = str(e)
        decode = run.tokenizer.decode
        # The text of one id, U+FFFD for a part of a character: after itself, since some decoders drop the first space.
        self.text_of = functools.lru_cache(2**16)(lambda i: decode([i, i])[len(decode([i])) :])

    def check_name(self, name: str | None) -> None:
        """Raise `RequestError` for the name of another model."""
        if not (name is None or name in self.names or self._any_name):
            message = f"there is no model {name[:80]!r} here: needs {' or '.join(map(repr, self.names))}"
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def _check_limits(self, p: Parameters) -> None:
        _need(p.n <= self.slots, f"n={short(p.n)}: needs at most {self.slots}, the slots of this server", "n")
        _need(all(p.stop), "stop: needs strings that are not empty", "stop")
        _need(p.stream or p.stream_options is None, "stream_options: needs stream=true", "stream_options")
        options = p.stream_options or {}
        is_known = options.keys() <= {*STREAM_OPTIONS} and {*map(type, options.values())} <= {bool, type(None)}
        _need(is_known, f"stream_options: needs {' or '.join(STREAM_OPTIONS)}, true or false", "stream_options")
        is_short = len(p.stop_token_ids) <= MAX_STOP_TOKENS
        _need(is_short, f"stop_token_ids: needs at most {MAX_STOP_TOKENS} ids", "stop_token_ids")
        for name, ids in (("stop_token_ids", p.stop_token_ids), ("logit_bias", [i for i, _ in p.sampling.logit_bias])):
            with _naming(name):
                check_ids(self.run.model, ids, name)

    def plan(self, p: CompletionParameters | ChatParameters) -> list[Row]:
        """Return the choices to generate: n of the first prompt, n of the second, and so on.

        Raises `RequestError` for parameters that contradict each other, or are beyond the limits of the server.
        """
        self.check_name(p.model)
        self._check_limits(p)
        offer = None
        if isinstance(p, ChatParameters):
            with _naming("tools"):
                tools = check_tools(p.tools, "tools")
            with _naming("tool_choice"):
                offer = offer_tools(tools, p.tool_choice, self.run.prompt_format.template.write)
            _need(p.logprobs or not p.top_logprobs, "top_logprobs: needs logprobs=true", "top_logprobs")
            prompts = [(None, self.encode_messages(p.messages, offer))]
            length = p.max_completion_tokens or p.max_tokens or self.block_size
            own = self.chat_stop_tokens or ()
            top, is_scored = (p.top_logprobs or 0) if p.logprobs else None, False
        else:
            _need(p.max_tokens or p.echo, "max_tokens=0: needs at least 1, or echo=true", "max_tokens")
            count = len(p.prompts) * p.n
            _need(count <= self.queue, f"the prompts ask for {count} completions: needs at most {self.queue}", "prompt")
            prompts = [(prompt, self._check_ids(self.encode(prompt), "prompt")) for prompt in p.prompts]
            length, own = p.max_tokens, self.stop_tokens
            top, is_scored = p.logprobs, p.echo and p.logprobs is not None
        param, grammar = p.compile_grammar(self.run.tokenizer)
        if offer is not None and offer.required:
            _need(grammar is None, f"{param} and tool_choice: give one of them", param)
            with _naming("tools"):
                for tool in offer.required:
                    check_integers(tool["function"].get("parameters"), tool["function"]["name"])
                grammar = compile_grammar(self.run.tokenizer, calls=offer.grammar(JSON))
        seed = secrets.randbits(32) if p.seed is None else p.seed
        each = [prompt for prompt in prompts for _ in range(p.n)]
        keys = prompt_keys(jax.random.key(seed), [ids for _, ids in each])
        rows = []
        for index, (prompt, ids) in enumerate(each):
            request = Request(
                prompt=ids,
                key=keys[index],
                max_new_tokens=min(length, self.block_size),
                sampling=p.sampling,
                stop_tokens=(*(() if p.ignore_eos else own), *p.stop_token_ids),
                top_logprobs=top,
                grammar=grammar,
            )
            rows.append(Row(index=index, request=request, prompt=prompt, offer=offer, is_scored=is_scored))
        return rows

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt. Raises `RequestError` for text or ids that the model cannot read."""
        with _naming("prompt"):
            if isinstance(prompt, str):
                return self.run.prompt_format.encode([prompt], chat=False)[0]
            return check_ids(self.run.model, prompt, "prompt").tolist()

    def encode_messages(self, messages: Any, offer: Offer | None = None) -> list[int]:
        """Return the ids of a conversation. Raises `RequestError` for one that the model cannot read."""
        is_right = isinstance(messages, list) and 1 <= len(messages) <= MAX_MESSAGES
        _need(is_right, f"messages={short(messages)}: needs a list of 1 to {MAX_MESSAGES:,} messages", "messages")
        conversation = []
        for number, message in enumerate(messages):
            where = f"messages[{number}]"
            with _naming(where):
                conversation.append(check_message(message, where))
        if self.chat_stop_tokens is None:
            raise RequestError(f"{self.name} cannot chat: {self._why_no_chat}", code="no_chat")
        with _naming("messages"):
            tools, begin = (offer.tools, offer.begin) if offer else ((), "")
            ids = self.run.prompt_format.encode_messages(conversation, tools, begin)
        return self._check_ids(ids, "messages")

    def tokenize(self, p: TokenizeParameters) -> Json:
        """Return the response with the ids of a prompt, as completions read it, or of messages."""
        ids = self.encode_messages(p.messages) if p.prompt is None else self.encode(p.prompt)
        texts = [self.text_of(i) for i in ids] if p.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.block_size, "tokens": ids, "token_strs": texts}

    def _check_ids(self, ids: list[int], param: str) -> list[int]:
        most, known = self.block_size, self.run.tokenizer.vocab_size
        _need(ids, f"the {param} has no tokens: needs 1 to {most}", param)
        have = "messages have" if param == "messages" else f"{param} has"  # clients look for OpenAI's words
        message = f"This model's maximum context length is {most} tokens, and the {have} {len(ids)}"
        _need(len(ids) <= most, f"{message}: cut them to that", param, code="context_length_exceeded")
        _need(max(ids) < known, f"the {param} has the id {max(ids)}: needs ids from 0 to {known - 1}", param)
        return ids


def _need(is_right: Any, message: str, param: str | None = None, **more: Any) -> None:
    if not is_right:
        raise RequestError(message, param=param, **more)


def _is_prompt(value: Any) -> bool:
    is_ids = isinstance(value, list) and value and all(type(i) is int for i in value)
    return isinstance(value, str) or bool(is_ids)


@contextlib.contextmanager
def _naming(param: str | None) -> Iterator[None]:
    """Turn a `UserError` into a `RequestError` that names the parameter."""
    try:
        yield
    except RequestError:
        raise
    except UserError as e:
        raise RequestError(str(e), param=param) from None
