r"""Render messages as one text by a chat template, and find the parts of it that the assistant writes.

A tokenizer's own template, in Jinja, is used if the files next to it contain one. A tokenizer without one that has
ChatML's special tokens gets ChatML::

    <|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n

Any other tokenizer gets the plain template, in which END is its end-of-text token or, without one, U+0003::

    User:\nWhat is 2 + 2?END\nAssistant:\n4END\n

The assistant writes its content and the end of its turn, but not the header of the turn.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import functools
import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.config.validate import short
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tools import DESCRIBED, Message, Tool, check_calls, check_characters, spell_out
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_bytes, read_json, write_whole

Span = tuple[int, int]  # [start, end) in characters

ROLES = ("system", "user", "assistant", "tool")
# Around the output of {% generation %}, and around the number of a content in its placeholder.
OPEN, CLOSE, HOLE = MARKS = ("\ufdd0", "\ufdd1", "\ufdd2")  # noncharacters, which contents must not contain
LARGEST_CONFIG = 2**24  # bytes of a tokenizer_config.json. Gemma 3's, with 6,000 added tokens, has 2**20
ETX = "\x03"  # "end of text" among ASCII's control codes
LONGEST_TEXT = 2**24  # characters that a template in Jinja may write
SECONDS = 10.0  # the longest that a template may take for one conversation
# A fixed date for templates: with the current one, the same conversations would give other tokens tomorrow.
TODAY = datetime.date(2025, 1, 1)


def check_message(message: Any, where: str) -> Message:
    """Return the role and the content of a message from another program, in OpenAI's form. where: for the error.

    A content may be a list of texts, and a developer is a system. Other fields are ignored in an assistant's answer that
    comes back, except calls of tools. Raises `UserError` for what is not text.
    """
    role, content = (message.get(name) for name in ("role", "content")) if isinstance(message, dict) else (None, None)
    role = "system" if role == "developer" else role
    calls = message.get("tool_calls") if role == "assistant" else None
    if not isinstance(role, str) or role not in ROLES or ("content" not in message and not calls):
        raise UserError(f"{where} is {short(message)}: give a role, {', '.join(ROLES)}, and a content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    content = "" if content is None and calls else content
    if not isinstance(content, str):
        raise UserError(f"{where} has the content {short(content)}: give a text")
    ignored = {"role", "content", "name", "tool_call_id", *(message if role == "assistant" else ())} - {"function_call"}
    if other := [name for name, held in message.items() if name not in ignored and held not in (None, [])]:
        raise UserError(f"{where} has {short(other[0])}, which is not understood: leave only role and content")
    check_characters(content, f"{where}: the content")
    checked: Message = {"role": role, "content": content}
    if role == "assistant" and (weight := message.get("weight")) is not None:
        if type(weight) not in (int, float) or weight not in (0, 1):
            raise UserError(f"{where} has the weight {short(weight)}: give 0, to learn nothing from it, or 1")
        checked |= {} if weight else {"weight": "0"}
    if role == "tool":
        checked |= {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    return checked | ({"tool_calls": check_calls(calls, where)} if calls else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A conversation rendered as text."""

    text: str  # the whole conversation
    answers: tuple[Span, ...]  # what the assistant writes
    contents: tuple[Span, ...]  # contents of the messages, in which special tokens written out are text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """A template in which every turn is `before`, the content, `end` and a newline."""

    before: str  # header of a turn, which contains {role} or {Role}
    end: str  # text that ends a turn
    special: bool  # whether `end` is a special token. If not, no content may contain it
    begin: str = ""  # the tokenizer's prefix, as text

    def write(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), prompt: bool = False) -> Written:
        """Render messages. `prompt` appends the header of an answer. Raises `UserError` if a content contains `end`."""
        text, answers, contents = self.begin, [], []
        for number, message in enumerate(spell_out(messages, tools), 1):
            role, content = message["role"], message["content"]
            if not self.special and self.end in content:
                raise UserError(f"message {number} has {self.end!r}, which ends a turn: take it out")
            text += self._before(role)
            contents.append((len(text), len(text) + len(content)))
            text += content + self.end
            if role == "assistant":
                answers.append((contents[-1][0], len(text)))
            text += "\n"
        text += self._before("assistant") if prompt else ""
        return Written(text=text, answers=tuple(answers), contents=tuple(contents))

    def _before(self, role: str) -> str:
        return self.before.format(role=role, Role=role.capitalize())

    def config(self) -> dict[str, Any]:
        """Return the entries of tokenizer_config.json: none, because the template follows from the tokenizer."""
        return {}

    def jinja(self) -> str:
        """Return the template in Jinja, for other programs. Unlike `write`, it accepts contents that contain `end`."""
        role = "('user' if message['role'] == 'tool' else message['role'])"  # as `spell_out` has it
        before = self.before.format(role=f"{{{{ {role} }}}}", Role=f"{{{{ {role} | capitalize }}}}")
        # No newline follows a block: some programs would drop it, others not.
        text = (
            "{% if message['content'] is string %}{{ message['content'] }}{% elif message['content'] %}"
            "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
        )
        calls = (
            "{% for call in message['tool_calls'] or [] %}{% set call = call['function'] %}"
            "{{ '\\n' if message['content'] or not loop.first else '' }}{{ '<tool_call>\\n{\"name\": ' }}"
            "{{ call['name'] | tojson }}, \"arguments\": {% if call['arguments'] is string %}{{ call['arguments'] }}"
            "{% else %}{{ call['arguments'] | tojson }}{% endif %}{{ '}\\n</tool_call>' }}{% endfor %}"
        )
        head, tail = DESCRIBED.split("{tools}")
        listed = "{% for tool in tools %}{{ tool | tojson }}{{ '' if loop.last else '\\n' }}{% endfor %}"
        described = f"{self._before('system')}{{{{ {head!r} }}}}{listed}{{{{ {tail!r} }}}}{self.end}{{{{ '\\n' }}}}"
        begin = f"{{{{ {self.begin!r} }}}}" if self.begin else ""
        return (
            f"{begin}{{% if tools %}}{described}{{% endif %}}{{% for message in messages %}}{before}"
            f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{text}{calls}{self.end}{{% endgeneration %}}"
            f"{{% elif message['role'] == 'tool' %}}{{{{ '<tool_response>\\n' }}}}{text}{{{{ '\\n</tool_response>' }}}}"
            f"{self.end}{{% else %}}{text}{self.end}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{self._before('assistant')}{{% endif %}}"
        )


PLAIN = Turns(before="{Role}:\n", end=ETX, special=False)
CHATML = Turns(before="<|im_start|>{role}\n", end="<|im_end|>", special=True)


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> Callable[..., str]:
    """Return a function from keyword variables to text, with OPEN and CLOSE around {% generation %} blocks.

    Templates are untrusted programs. They run in Jinja's sandbox, as in transformers, and can read only their
    variables: no attribute that begins with `_`, no file, no import. The time and the length of the text are limited,
    the memory is not. Whitespace, filters and functions are as in transformers' `apply_chat_template`, but
    `strftime_now` formats TODAY. Raises `UserError` if the source is not a template. The function raises it if the
    template fails.
    """
    try:
        import jinja2
        from jinja2 import ext, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("this tokenizer's chat template needs jinja2: python -m pip install 'jaxgpt[chat]'") from None

    class Generation(ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return OPEN + caller() + CLOSE

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [Generation, ext.LoopControlExtension]
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals = {
        "dict": lambda **items: items,
        "namespace": environment.globals["namespace"],
        "raise_exception": raise_exception,
        "range": environment.globals["range"],
        "strftime_now": TODAY.strftime,
    }
    try:
        template = environment.from_string(source)
    except Exception as e:  # from Jinja, or from Python for the code that Jinja generates
        line = f", line {e.lineno}" if getattr(e, "lineno", None) else ""
        message = f"the chat template is not a Jinja template{line}: {str(e)[:300]}. Repair it, or give another"
        raise UserError(message) from None

    def render(**variables: Any) -> str:
        text = io.StringIO()
        # Raised in this thread from another, to end a loop that writes nothing, too.
        thread, late = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(TimeoutError)
        timer = threading.Timer(SECONDS, ctypes.pythonapi.PyThreadState_SetAsyncExc, (thread, late))
        timer.daemon = True
        timer.start()
        try:
            for piece in template.generate(**variables):
                text.write(piece)
                if text.tell() > LONGEST_TEXT:
                    raise UserError(
                        f"the chat template writes more than {LONGEST_TEXT:,} characters: it cannot be used"
                    )
            return text.getvalue()
        except UserError:
            raise
        except TimeoutError:
            message = f"the chat template takes more than {SECONDS:g} s for one conversation: it cannot be used"
        except Exception as e:  # an untrusted program may raise anything
            why = str(e)[:300].rstrip(".") or type(e).__name__
            message = f"the chat template rejects the conversation: {why}. Repair it, or give another tokenizer"
        finally:
            timer.cancel()
        raise UserError(message)

    return render


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jinja:
    """A tokenizer's own template."""

    source: str  # the template, in Jinja's language
    tokens: dict[str, str]  # text of bos_token, eos_token, ...
    specials: tuple[str, ...]  # texts of all special tokens

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return (rendered text, spans of its {% generation %} blocks)."""
        given = {"messages": [dict(m) for m in messages], "tools": list(tools) or None, "add_generation_prompt": prompt}
        rendered = compile_template(self.source)(**given, documents=None, **self.tokens)
        text, spans = "", []
        for part in re.split(f"([{OPEN}{CLOSE}])", rendered):
            if part == OPEN:
                spans.append((len(text), len(text)))
            elif part == CLOSE:
                spans[-1] = (spans[-1][0], len(text))
            else:
                text += part
        return text, spans

    def write(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), prompt: bool = False) -> Written:
        """Render messages: see `Turns.write`. Raises `UserError` for tools and calls with special tokens in them."""
        others = [{name: held for name, held in m.items() if name not in ("role", "content")} for m in messages]
        spelled = json.dumps([tools, others], ensure_ascii=False) if tools or any(others) else ""
        if token := next((token for token in self.specials if token in spelled), None):
            raise UserError(f"the tools or their calls have {token!r}, a special token: take it out")
        text, answers = self._text(messages, tools, prompt=prompt)
        if not answers and not prompt:
            own = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
            answers = [self._answer(messages, tools, n, text) for n in own]
        return Written(text=text, answers=tuple(answers), contents=self._contents(messages, tools, text, prompt))

    def _answer(self, messages: Sequence[Message], tools: Sequence[Tool], number: int, text: str) -> Span:
        """Return the span that an answer adds to its prompt, up to a last special token followed only by whitespace."""
        before, _ = self._text(messages[:number], tools, prompt=True)
        after, _ = self._text(messages[: number + 1], tools)
        end = len(after.rstrip())
        if not after[:end].endswith(self.specials):
            end = len(after)
        if not (after.startswith(before) and text.startswith(after[:end])):
            raise UserError(
                f"its chat template writes message {number + 1} differently when it is asked for it, or when more follow, "
                "so the assistant's tokens cannot be identified: mark them with {% generation %} in chat_template.jinja, or "
                "give conversations with one answer each"
            )
        return len(before), end

    def _contents(
        self, messages: Sequence[Message], tools: Sequence[Tool], text: str, prompt: bool
    ) -> tuple[Span, ...]:
        """Find the contents in the text, by rendering the messages again with placeholders for them."""
        contents = [m["content"] for m in messages]
        holes = [m | {"content": m["content"] and f"{HOLE}{n}{HOLE}"} for n, m in enumerate(messages)]
        try:
            parts = re.split(f"{HOLE}([0-9]+){HOLE}", self._text(holes, tools, prompt=prompt)[0])
        except UserError:  # the template inspects contents
            parts = []
        for trimmed in (str, str.strip, str.rstrip, str.lstrip):  # what templates do to contents
            filled, spans = "", []
            for n, part in enumerate(parts):
                piece = trimmed(contents[int(part)]) if n % 2 else part
                spans += [(len(filled), len(filled) + len(piece))] if n % 2 else []
                filled += piece
            if filled == text:
                return tuple(spans)
        for number, content in enumerate(contents, 1):
            if token := next((s for s in self.specials if s in content), None):
                raise UserError(
                    f"message {number} has {token!r} in it, and its chat template rewrites contents, so that it cannot "
                    "be distinguished from the template's own: take it out"
                )
        return ()

    def config(self) -> dict[str, Any]:
        """Return the entries of tokenizer_config.json."""
        return {"chat_template": self.source, **self.tokens}


ChatTemplate = Turns | Jinja


def find_template(tokenizer: Tokenizer, directory: Path | None) -> ChatTemplate:
    """Return the chat template of a tokenizer. Raises `UserError` for damaged files.

    Args:
        directory: the directory of its tokenizer.json. Its own template is in chat_template.jinja, or in
            tokenizer_config.json, perhaps as one of several with names. None means that the tokenizer was made here.
    """
    values: Any = {}
    if directory is not None and is_there(directory / "tokenizer_config.json", "Name another tokenizer."):
        path = directory / "tokenizer_config.json"
        values = read_json(path, LARGEST_CONFIG)
        if not isinstance(values, dict):
            raise UserError(f"{path} is damaged: it holds {type(values).__name__}, not an object")
    source = values.get("chat_template")
    if isinstance(source, list):  # [{"name": "default", "template": "..."}, ...]
        defaults = [x.get("template") for x in source if isinstance(x, dict) and x.get("name") == "default"]
        source = (defaults and defaults[-1]) or source
    if directory is not None and is_there(directory / "chat_template.jinja", "Name another tokenizer."):
        source = read_bytes(directory / "chat_template.jinja", LARGEST_CONFIG).decode("utf-8", errors="replace")
    if source is not None:
        if not isinstance(source, str) or any(mark in source for mark in MARKS):
            raise UserError(
                f"the chat_template in {directory} is damaged: it must be a text, or a list with one named default"
            )
        # A token is a string, or an object with its content and matching options.
        plain = {name: x.get("content") if isinstance(x, dict) else x for name, x in values.items()}
        tokens = {name: x for name, x in plain.items() if _is_token(name) and isinstance(x, str)}
        compile_template(source)  # raises `UserError` for what is not a template
        return Jinja(source=source, tokens=tokens, specials=tuple(tokenizer.specials))
    ours = CHATML
    if not {"<|im_start|>", "<|im_end|>"} <= tokenizer.specials.keys():
        end = next((token for token, i in tokenizer.specials.items() if i == tokenizer.end_of_text), None)
        ours = PLAIN if end is None else dataclasses.replace(PLAIN, end=end, special=True)
    specials = index_specials(tokenizer)
    if unknown := [token for token in tokenizer.prefix if token not in specials]:
        raise UserError(
            f"the tokenizer begins texts with {tokenizer.decode(unknown[:1])!r}, which is not one of its special tokens, so that no "
            "chat template can write it: make it one in tokenizer.json, under added_tokens"
        )
    begin = "".join(specials[token] for token in tokenizer.prefix)
    return dataclasses.replace(ours, begin=begin) if begin else ours


def _is_token(name: str) -> bool:
    """Return whether an entry of tokenizer_config.json holds the text of a token."""
    return name.endswith("_token") and not name.startswith("add_")


def write_template(directory: Path, config: dict[str, Any]) -> None:
    """Write a template's `config` into tokenizer_config.json, in place of another template's."""
    path, jinja = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    there = read_json(path, LARGEST_CONFIG) if path.exists() else {}
    others = {name: x for name, x in there.items() if name != "chat_template" and not (config and _is_token(name))}
    if others or config:
        write_whole(path, json.dumps(others | config, indent=1) + "\n")
    if jinja.exists() and jinja.read_bytes().decode("utf-8", errors="replace") != config.get("chat_template"):
        jinja.unlink()  # it would take precedence


def fingerprint(template: ChatTemplate) -> str:
    """Return the SHA-256 of a template's fields."""
    # An empty `begin` is left out: older fingerprints have no such field.
    held = {name: value for name, value in dataclasses.asdict(template).items() if name != "begin" or value}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def list_plain_characters() -> str:
    """Return the characters that the plain template may add to the contents."""
    return PLAIN.write([{"role": role, "content": ""} for role in ("system", "user", "assistant")]).text


@functools.lru_cache(maxsize=4)  # some tokenizers have thousands
def index_specials(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of each special token by id."""
    return {i: token for token, i in tokenizer.specials.items()}
