r"""Render messages as one text by a chat template, and find the parts of it that the assistant writes.

A tokenizer's own template, in Jinja, is used if the files next to it contain one. A tokenizer without one that has
ChatML's special tokens gets ChatML::

    <|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n

Any other tokenizer gets the plain template, in which END is its end-of-text token or, without one, U+0003::

    User:\nWhat is 2 + 2?END\nAssistant:\n4END\n

The assistant writes its content and the end of its turn, but not the header of the turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import re
import string
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config.validate import short
from jaxgpt.data import render
from jaxgpt.data.render import CLOSE, OPEN
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tools import DESCRIBED, Message, Tool, check_calls, check_characters, spell_out
from jaxgpt.errors import UserError
from jaxgpt.files import Json, is_there, read_bytes, read_json, write_whole

Span = tuple[int, int]  # [start, end) in characters

ROLES = ("system", "user", "assistant", "tool")
QUOTE, UNQUOTE = "\ufdd2", "\ufdd3"  # around special tokens in contents: no characters, as OPEN and CLOSE are none
MARKS = (OPEN, CLOSE, QUOTE, UNQUOTE)
LARGEST_CONFIG = 2**24  # bytes of a tokenizer_config.json. The one of Gemma 3, with 6,000 added tokens, has 2**20
ETX = "\x03"  # "end of text" among ASCII's control codes
TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
SECONDS = 10.0  # the longest that a template may take for one conversation
CONTENT = (  # of a message, in Jinja: a text, or a list of parts
    "{% if message['content'] is string %}{{ message['content'] }}{% elif message['content'] %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
)


def check_message(message: Any, where: str) -> Message:
    """Return the role and the content of a message from another program, in OpenAI's form. where: for the error.

    A content may be a list of texts, and a developer is a system. Other fields are ignored in an assistant's answer that
    comes back, except calls of tools. Raises `UserError` for what is not text.
    """
    held = message if isinstance(message, dict) else {}
    role, content = "system" if held.get("role") == "developer" else held.get("role"), held.get("content")
    calls, weight = (held.get(name) if role == "assistant" else None for name in ("tool_calls", "weight"))
    if role not in ROLES or ("content" not in held and not calls):
        raise UserError(f"{where} is {short(message)}: give a role, {', '.join(ROLES)}, and a content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    content = "" if content is None and role == "assistant" else content
    if not isinstance(content, str):
        raise UserError(f"{where} has the content {short(content)}: give a text")
    known = held.keys() - {"function_call"} if role == "assistant" else {"role", "content", "name", "tool_call_id"}
    if other := [name for name in held if name not in known and held[name] not in (None, [])]:
        raise UserError(f"{where} has {short(other[0])}, which is not understood: leave only role and content")
    check_characters(content, f"{where}: the content")
    if isinstance(weight, bool) or weight not in (None, 0, 1):
        raise UserError(f"{where} has the weight {short(weight)}: give 0, to learn nothing from it, or 1")
    checked: Message = {"role": role, "content": content}
    if weight == 0:
        checked["weight"] = "0"
    if role == "tool":
        checked |= {name: held[name] for name in ("name", "tool_call_id") if isinstance(held.get(name), str)}
    if calls:
        checked["tool_calls"] = check_calls(calls, where)
    return checked


class Written(NamedTuple):
    """A conversation rendered as text."""

    text: str  # the whole conversation
    answers: tuple[Span, ...]  # what the assistant writes
    contents: tuple[Span, ...]  # parts of the messages, in which special tokens written out are text


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
            content = message["content"]
            if not self.special and self.end in content:
                raise UserError(f"message {number} has {self.end!r}, which ends a turn: take it out")
            text += self._before(message["role"])
            start, end = len(text), len(text) + len(content)
            contents.append((start, end))
            if message["role"] == "assistant":
                answers.append((start, end + len(self.end)))
            text += content + self.end + "\n"
        text += self._before("assistant") if prompt else ""
        return Written(text=text, answers=tuple(answers), contents=tuple(contents))

    def _before(self, role: str) -> str:
        return self.before.format(role=role, Role=role.capitalize())

    def config(self) -> Json:
        """Return the entries of tokenizer_config.json: none, because the template follows from the tokenizer."""
        return {}

    def jinja(self) -> str:
        """Return the template in Jinja, for other programs. Unlike `write`, it accepts contents that contain `end`."""
        role = "('user' if message['role'] == 'tool' else message['role'])"  # as `spell_out` has it
        head, tail = DESCRIBED.split("{tools}")
        lines = resources.files("jaxgpt.data").joinpath("turns.jinja").read_text(encoding="utf-8").splitlines()
        # No newline follows a block: some programs would drop it, others not.
        return string.Template("".join(line.strip() for line in lines)).substitute(
            content=CONTENT,
            begin=f"{{{{ {self.begin!r} }}}}" if self.begin else "",
            system=self._before("system"),
            head=repr(head),
            tail=repr(tail),
            turn=self.before.format(role=f"{{{{ {role} }}}}", Role=f"{{{{ {role} | capitalize }}}}"),
            assistant=self._before("assistant"),
            end=self.end,
        )


PLAIN = Turns(before="{Role}:\n", end=ETX, special=False)
PLAIN_CHARACTERS = PLAIN.write([{"role": role, "content": ""} for role in ROLES[:3]]).text  # besides those of contents
CHATML = Turns(before="<|im_start|>{role}\n", end="<|im_end|>", special=True)


RENDERING = threading.Lock()


@functools.cache
def start_renderer() -> Any:
    """Return the process that renders templates. In a session of its own, it gets no Ctrl-C."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-P", render.__file__], text=True, start_new_session=True, **pipes)


def render_template(source: str, variables: Json) -> str:
    """Return the text of a template, with OPEN and CLOSE around {% generation %} blocks. See `render.py`.

    Raises `UserError` if the template fails.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise UserError("this tokenizer's chat template needs jinja2: python -m pip install 'jaxgpt[chat]'")
    with RENDERING:
        process, line = start_renderer(), ""
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps([source, variables, SECONDS]) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            if not line:  # it has ended, or Ctrl-C came before its answer
                start_renderer.cache_clear()
                process.kill()
                process.communicate()
    limits = f"takes more than {SECONDS:g} s or 1 GiB of memory for one conversation: it cannot be used"
    answer = json.loads(line or json.dumps({"error": limits}))
    if "error" in answer:
        raise UserError(f"the chat template {answer['error']}")
    return answer["text"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jinja:
    """A tokenizer's own template."""

    source: str  # the template, in Jinja's language
    tokens: dict[str, str]  # text of bos_token, eos_token, ...
    specials: tuple[str, ...]  # texts of all special tokens
    tool_source: str = ""  # the template for conversations with tools, if that is another

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool = False) -> Written:
        """Render messages with marks around special tokens in their contents, and take all marks out of the text.

        The answers are the {% generation %} blocks. Raises `UserError` if the template loses marks.
        """
        pattern = match_specials(self.specials)
        found = [(n, token) for n, m in enumerate(messages, 1) for token in pattern.findall(m["content"])]
        marked = [m | {"content": pattern.sub(rf"{QUOTE}\g<0>{UNQUOTE}", m["content"])} for m in messages]
        given = {"messages": marked, "tools": list(tools) or None, "add_generation_prompt": prompt, "documents": None}
        source = (tools and self.tool_source) or self.source
        text, places = "", {mark: list[int]() for mark in MARKS}
        for piece in re.split(f"([{''.join(MARKS)}])", render_template(source, {**given, **self.tokens})):
            if piece in places:
                places[piece].append(len(text))
            else:
                text += piece
        if found and not len(found) == len(places[QUOTE]) == len(places[UNQUOTE]):
            number, token = found[0]
            raise UserError(
                f"message {number} has {token!r} in it, and its chat template rewrites contents: take it out"
            )
        answers = tuple(zip(places[OPEN], places[CLOSE], strict=False))
        return Written(text=text, answers=answers, contents=tuple(zip(places[QUOTE], places[UNQUOTE], strict=False)))

    def write(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), prompt: bool = False) -> Written:
        """Render messages: see `Turns.write`.

        Raises `UserError` for tools and calls with special tokens in them, and for those that the template leaves out.
        """
        others = [held for m in messages for name, held in m.items() if name not in ("role", "content")]
        spelled = json.dumps([*tools, *others], ensure_ascii=False)
        if token := next((token for token in self.specials if token in spelled), None):
            raise UserError(f"the tools or their calls have {token!r}, a special token: take it out")
        if tools or any(others):
            self._check_tools(messages, tools, prompt)
        written = self._render(messages, tools, prompt=prompt)
        if written.answers or prompt:
            return written
        own = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        return written._replace(answers=tuple(self._answer(messages, tools, n, written.text) for n in own))

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> None:
        """Raise `UserError` for tools, calls and results that are not written, by rendering words in place of them."""
        hidden, offered = json.loads(json.dumps([messages, tools]))  # nothing is shared, since it is changed
        places = [("tools", tool["function"], "name") for tool in offered]
        for n, message in enumerate(hidden, 1):
            for k, call in enumerate(message.get("tool_calls", ()), 1):
                places.append((f"call {k} of message {n}", call["function"], "name"))
            if message["role"] == "tool":
                places.append((f"message {n}, the result of a tool", message, "content"))
        for number, (_, held, name) in enumerate(places):
            held[name] = f"hidden_{number}_"
        try:
            text = self._render(hidden, offered, prompt=prompt).text
        except UserError:  # the template inspects them
            return
        if lost := [place for place, held, name in places if held[name] not in text]:
            raise UserError(f"its chat template does not write {lost[0]}: leave it out, or give another template")

    def _answer(self, messages: Sequence[Message], tools: Sequence[Tool], number: int, text: str) -> Span:
        """Return the span that an answer adds to its prompt, up to a last special token followed only by whitespace."""
        before = self._render(messages[:number], tools, prompt=True).text
        after = self._render(messages[: number + 1], tools).text
        shown = after.rstrip()
        end = len(shown if shown.endswith(self.specials) else after)
        if not (after.startswith(before) and text.startswith(after[:end])):
            how = "when it is asked for it, or when more follow: mark answers with {% generation %} in chat_template.jinja"
            raise UserError(f"its chat template writes message {number + 1} differently {how}")
        return len(before), end

    def config(self) -> Json:
        """Return the entries of tokenizer_config.json."""
        named = {"default": self.source, "tool_use": self.tool_source}
        several = [{"name": name, "template": source} for name, source in named.items()]
        return {"chat_template": several if self.tool_source else self.source, **self.tokens}


ChatTemplate = Turns | Jinja


def find_template(tokenizer: Tokenizer, directory: Path | None, *, is_own: bool = False) -> ChatTemplate:
    """Return the chat template of a tokenizer. Raises `UserError` for damaged files.

    Args:
        directory: the directory of its tokenizer.json. Its own template is in chat_template.jinja, or in
            tokenizer_config.json, perhaps as one of several with names. None means that the tokenizer was made here.
        is_own: whether a run was trained with it, so that the run's tokenizer_config.json has all that it needs.
    """
    if directory is None:
        return _choose_turns(tokenizer)
    values = read_object(directory / "tokenizer_config.json")
    named = _find_sources(directory, values.get("chat_template"))
    if not named:
        return _choose_turns(tokenizer)
    source, tool_source = named.get("default", OPEN), named.get("tool_use", "")
    for text in (source, tool_source):
        if not isinstance(text, str) or any(mark in text for mark in MARKS):
            raise UserError(f"the chat_template in {directory} is damaged: it must be a text, or one named default")
    tokens = _spell(values)
    if not is_own:
        used = re.findall(r"\b[a-z]+_token\b", source + tool_source)
        known = _find_tokens(tokenizer, directory, values)
        tokens |= {name: text for name, text in _spell(known).items() if name in used}
        if lost := [name for name in used if name not in known and f"{name} is" not in source + tool_source]:
            message = f"the chat template in {directory} uses {lost[0]}, which no file there defines: it is empty"
            warnings.warn(message, UserWarning, stacklevel=2)
    return Jinja(source=source, tokens=tokens, specials=tuple(tokenizer.specials), tool_source=tool_source)


def _choose_turns(tokenizer: Tokenizer) -> Turns:
    """Return the template of ours that a tokenizer has the tokens for."""
    specials = index_specials(tokenizer)
    ours = PLAIN
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.specials.keys():
        ours = CHATML
    elif tokenizer.end_of_text in specials:
        ours = dataclasses.replace(PLAIN, end=specials[tokenizer.end_of_text], special=True)
    if unknown := [token for token in tokenizer.prefix if token not in specials]:
        begin = repr(tokenizer.decode(unknown[:1]))
        raise UserError(f"{begin}, with which texts begin, must be a special token in tokenizer.json's added_tokens")
    begin = "".join(specials[token] for token in tokenizer.prefix)
    return dataclasses.replace(ours, begin=begin) if begin else ours


def read_object(path: Path) -> Json:
    """Return the object in a JSON file, empty if there is no file. Raises `UserError` if it is damaged."""
    values = read_json(path, LARGEST_CONFIG) if is_there(path, "Name another directory.") else {}
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it holds {type(values).__name__}, not an object")
    return values


def _find_sources(directory: Path, held: Any) -> Json:
    """Return the templates by name, as transformers finds them. held: `chat_template` of tokenizer_config.json."""
    if isinstance(held, list):  # [{"name": "default", "template": "..."}, ...]
        held = {x["name"]: x.get("template") for x in held if isinstance(x, dict) and isinstance(x.get("name"), str)}
    elif held is not None and not isinstance(held, dict):
        held = {"default": held}
    files = {
        name: read_bytes(directory / file, LARGEST_CONFIG).decode("utf-8", errors="replace")
        for name, file in TEMPLATE_FILES.items()
        if is_there(directory / file, "Name another tokenizer.")
    }
    return files if "default" in files else (held or {}) | files


def _find_tokens(tokenizer: Tokenizer, directory: Path, values: Json) -> Json:
    """Return, by names such as bos_token, special tokens as transformers finds them, with what else the files hold.

    values: tokenizer_config.json.
    """
    known: Json = {}
    # config.json of a model's directory, or of a run that was imported
    config = read_object(directory / "config.json") or read_object(directory / "hf/config.json")
    for name, ids in config.items():
        i = ids[0] if isinstance(ids, list) and ids else ids
        if name.endswith("_token_id") and type(i) is int and 0 <= i < tokenizer.vocab_size:
            known[name.removesuffix("_id")] = tokenizer.decode([i])
    known |= values
    if "added_tokens_decoder" not in values:
        known |= read_object(directory / "special_tokens_map.json")
    return known


def _is_token(name: str) -> bool:
    """Return whether an entry of tokenizer_config.json holds the text of a token."""
    return name.endswith("_token") and not name.startswith("add_")


def _spell(values: Json) -> dict[str, str]:
    """Return the texts of tokens by name. A token is its text, or an object with its content and matching options."""
    contents = {name: x.get("content") if isinstance(x, dict) else x for name, x in values.items() if _is_token(name)}
    return {name: text for name, text in contents.items() if isinstance(text, str)}


def write_template(directory: Path, config: Json) -> None:
    """Write a template's `config` into tokenizer_config.json, in place of another template's."""
    path = directory / "tokenizer_config.json"
    others = {
        name: x for name, x in read_object(path).items() if name != "chat_template" and not (config and _is_token(name))
    }
    if others or config:
        write_whole(path, json.dumps(others | config, indent=1) + "\n")
    for file in (directory / name for name in TEMPLATE_FILES.values()):
        if file.exists() and file.read_bytes().decode("utf-8", errors="replace") != config.get("chat_template"):
            file.unlink()  # it would take precedence


def fingerprint(template: ChatTemplate) -> str:
    """Return the SHA-256 of a template's fields."""
    # What is empty of these is left out: older fingerprints have no such fields.
    later = ("begin", "tool_source")
    held = {name: value for name, value in dataclasses.asdict(template).items() if name not in later or value}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


@functools.lru_cache(maxsize=4)  # some tokenizers have thousands
def index_specials(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of each special token by id."""
    return {i: token for token, i in tokenizer.specials.items()}


@functools.lru_cache(maxsize=4)
def match_specials(specials: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of special tokens, the longest first, or one that matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)")
