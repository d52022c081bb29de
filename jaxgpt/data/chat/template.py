r"""Chat templates: render messages as one text, and find the parts of it that the assistant writes.

A tokenizer's own template, in Jinja, is used if the files next to it contain one. A tokenizer without one that has
ChatML's special tokens gets ChatML::

    <|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n

Any other tokenizer gets the plain template, in which END is its end-of-text token or, without one, U+0003::

    User:\nWhat is 2 + 2?END\nAssistant:\n4END\n

The assistant writes its content and the end of its turn, but not the header of the turn.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.data.chat.jinja import CLOSE, OPEN, renderer
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_bytes, read_json, write_whole

Message = dict[str, str]  # "role", one of ROLES, and "content"
Span = tuple[int, int]  # [start, end) in characters

ROLES = ("system", "user", "assistant")
HOLE = "\ufdd2"  # around the number of a content, in its placeholder
MARKS = (OPEN, CLOSE, HOLE)  # noncharacters, which contents must not contain
LARGEST_CONFIG = 2**24  # bytes of a tokenizer_config.json; Gemma 3's, with 6,000 added tokens, has 2**20
ETX = "\x03"  # "end of text" among ASCII's control codes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A conversation rendered as text."""

    text: str
    answers: tuple[Span, ...]  # what the assistant writes
    contents: tuple[Span, ...]  # contents of the messages, in which special tokens written out are text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """A template in which every turn is `before`, the content, `end` and a newline."""

    before: str  # contains {role} or {Role}
    end: str
    special: bool  # whether `end` is a special token; otherwise no content may contain it
    begin: str = ""  # the tokenizer's prefix, as text

    def write(self, messages: Sequence[Message], *, prompt: bool = False) -> Written:
        """Render messages; `prompt` appends the header of an answer. Raises `UserError` if a content contains `end`."""
        text, answers, contents = self.begin, [], []
        for number, message in enumerate(messages, 1):
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
        before = self.before.format(role="{{ message['role'] }}", Role="{{ message['role'] | capitalize }}")
        content = "{{ message['content'] }}" + self.end
        # No newline follows a block: some programs would drop it, others not.
        begin = f"{{{{ {self.begin!r} }}}}" if self.begin else ""
        return (
            f"{begin}{{% for message in messages %}}{before}"
            f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{content}{{% endgeneration %}}"
            f"{{% else %}}{content}{{% endif %}}{{{{ '\\n' }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{self._before('assistant')}{{% endif %}}"
        )


PLAIN = Turns(before="{Role}:\n", end=ETX, special=False)
CHATML = Turns(before="<|im_start|>{role}\n", end="<|im_end|>", special=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jinja:
    """A tokenizer's own template."""

    source: str
    tokens: dict[str, str]  # text of bos_token, eos_token, ...
    specials: tuple[str, ...]

    def _text(self, messages: Sequence[Message], *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return (rendered text, spans of its {% generation %} blocks)."""
        given = {"messages": [dict(m) for m in messages], "add_generation_prompt": prompt}
        rendered = renderer(self.source)(**given, tools=None, documents=None, **self.tokens)
        text, spans = "", []
        for part in re.split(f"([{OPEN}{CLOSE}])", rendered):
            if part == OPEN:
                spans.append((len(text), len(text)))
            elif part == CLOSE:
                spans[-1] = (spans[-1][0], len(text))
            else:
                text += part
        return text, spans

    def write(self, messages: Sequence[Message], *, prompt: bool = False) -> Written:
        """Render messages: see `Turns.write`."""
        text, answers = self._text(messages, prompt=prompt)
        if not answers and not prompt:
            answers = [self._answer(messages, n, text) for n, m in enumerate(messages) if m["role"] == "assistant"]
        return Written(text=text, answers=tuple(answers), contents=self._contents(messages, text, prompt))

    def _answer(self, messages: Sequence[Message], number: int, text: str) -> Span:
        """Return the span that an answer adds to its prompt, up to a last special token followed only by whitespace."""
        before, _ = self._text(messages[:number], prompt=True)
        after, _ = self._text(messages[: number + 1])
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

    def _contents(self, messages: Sequence[Message], text: str, prompt: bool) -> tuple[Span, ...]:
        """Find the contents in the text, by rendering the messages again with placeholders for them."""
        contents = [m["content"] for m in messages]
        holes = [m | {"content": m["content"] and f"{HOLE}{n}{HOLE}"} for n, m in enumerate(messages)]
        try:
            parts = re.split(f"{HOLE}([0-9]+){HOLE}", self._text(holes, prompt=prompt)[0])
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


def find_template(tokenizer: Tokenizer, directory: Path | None, *, with_prefix: bool = True) -> ChatTemplate:
    """Return the chat template of a tokenizer. Raises `UserError` for damaged files.

    Args:
        tokenizer: the tokenizer.
        directory: the directory of its tokenizer.json. Its own template is in chat_template.jinja, or in
            tokenizer_config.json, perhaps as one of several with names. None means that the tokenizer was made here.
        with_prefix: whether ChatML and plain begin with the tokenizer's prefix. One in Jinja decides that itself.
    """
    values: Any = {}
    if directory is not None and is_there(directory / "tokenizer_config.json", "Name another tokenizer."):
        path = directory / "tokenizer_config.json"
        values = read_json(path, LARGEST_CONFIG)
        if not isinstance(values, dict):
            raise UserError(f"{path} is damaged: it holds {type(values).__name__}, needs an object")
    source = values.get("chat_template")
    if isinstance(source, list):  # [{"name": "default", "template": "..."}, ...]
        named = {x.get("name"): x.get("template") for x in source if isinstance(x, dict)}
        source = named.get("default") or named
    if directory is not None and is_there(directory / "chat_template.jinja", "Name another tokenizer."):
        source = read_bytes(directory / "chat_template.jinja", LARGEST_CONFIG).decode("utf-8", errors="replace")
    if source is not None:
        if not isinstance(source, str) or any(mark in source for mark in MARKS):
            raise UserError(
                f"the chat_template in {directory} is damaged: needs a text, or a list with one named default"
            )
        # A token is a string, or an object with its content and matching options.
        tokens = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in values.items()
            if name.endswith("_token") and not name.startswith("add_")
        }
        tokens = {name: token for name, token in tokens.items() if isinstance(token, str)}
        renderer(source)  # raises `UserError` for what is not a template
        return Jinja(source=source, tokens=tokens, specials=tuple(tokenizer.specials))
    ours = CHATML
    if not {"<|im_start|>", "<|im_end|>"} <= tokenizer.specials.keys():
        end = next((token for token, i in tokenizer.specials.items() if i == tokenizer.end_of_text), None)
        ours = PLAIN if end is None else dataclasses.replace(PLAIN, end=end, special=True)
    return dataclasses.replace(ours, begin=_spell_prefix(tokenizer)) if with_prefix and tokenizer.prefix else ours


def _spell_prefix(tokenizer: Tokenizer) -> str:
    """Return the text that encodes to the tokenizer's prefix. Raises `UserError` unless all its tokens are special."""
    specials = index_specials(tokenizer)
    for token in tokenizer.prefix:
        if token not in specials:
            raise UserError(
                f"the tokenizer begins texts with {tokenizer.decode([token])!r}, which is not one of its special tokens, so that no "
                "chat template can write it: make it one in tokenizer.json, under added_tokens"
            )
    return "".join(specials[token] for token in tokenizer.prefix)


def write_template(directory: Path, config: dict[str, Any]) -> None:
    """Write a template's `config` into tokenizer_config.json, replacing that of another template."""
    path, jinja = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    there = read_json(path, LARGEST_CONFIG) if path.exists() else {}
    others = {
        name: value
        for name, value in (there if isinstance(there, dict) else {}).items()
        if name != "chat_template" and not (config and name.endswith("_token") and not name.startswith("add_"))
    }
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
    return PLAIN.write([{"role": role, "content": ""} for role in ROLES]).text


@functools.lru_cache(maxsize=4)  # some tokenizers have thousands
def index_specials(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of each special token by id."""
    return {i: token for token, i in tokenizer.specials.items()}
