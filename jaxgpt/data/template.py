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
import itertools
import json
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.config.validate import short
from jaxgpt.data import render
from jaxgpt.data.render import CLOSE, OPEN
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tools import DESCRIBED, Message, Tool, check_calls, check_characters, spell_out
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_bytes, read_json, write_whole

Span = tuple[int, int]  # [start, end) in characters

ROLES = ("system", "user", "assistant", "tool")
HOLE = "\ufdd2"  # around the number of a content in its placeholder: no character, as OPEN and CLOSE are none
MARKS = (OPEN, CLOSE, HOLE)
LARGEST_CONFIG = 2**24  # bytes of a tokenizer_config.json. Gemma 3's, with 6,000 added tokens, has 2**20
ETX = "\x03"  # "end of text" among ASCII's control codes
TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
# What a class of transformers calls its tokens where no file does.
GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
DEFAULTS = {
    "CohereTokenizer": {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"},
    "GPT2Tokenizer": GPT2,
    "GPTNeoXTokenizer": GPT2,
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "LlamaTokenizer": LLAMA,
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
SECONDS = 10.0  # the longest that a template may take for one conversation


def check_message(message: Any, where: str) -> Message:
    """Return the role and the content of a message from another program, in OpenAI's form. where: for the error.

    A content may be a list of texts, and a developer is a system. Other fields are ignored in an assistant's answer that
    comes back, except calls of tools. Raises `UserError` for what is not text.
    """
    role, content = (message.get(name) for name in ("role", "content")) if isinstance(message, dict) else (None, None)
    role = "system" if role == "developer" else role
    calls = message.get("tool_calls") if role == "assistant" else None
    if role not in ROLES or ("content" not in message and not calls):
        raise UserError(f"{where} is {short(message)}: give a role, {', '.join(ROLES)}, and a content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") in ("text", "refusal")]
        texts = [text for part in parts if isinstance(text := part.get(part["type"]), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    content = message.get("refusal") or "" if content is None and role == "assistant" else content
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


def _join(pieces: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
    """Return (joined text, spans of every second piece in it)."""
    ends = list(itertools.accumulate(map(len, pieces)))
    return "".join(pieces), tuple(zip(ends[::2], ends[1::2], strict=False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """A template in which every turn is `before`, the content, `end` and a newline."""

    before: str  # header of a turn, which contains {role} or {Role}
    end: str  # text that ends a turn
    special: bool  # whether `end` is a special token. If not, no content may contain it
    begin: str = ""  # the tokenizer's prefix, as text

    def write(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), prompt: bool = False) -> Written:
        """Render messages. `prompt` appends the header of an answer. Raises `UserError` if a content contains `end`."""
        spelled, pieces = spell_out(messages, tools), [self.begin]
        for number, message in enumerate(spelled, 1):
            if not self.special and self.end in message["content"]:
                raise UserError(f"message {number} has {self.end!r}, which ends a turn: take it out")
            pieces[-1] += self._before(message["role"])
            pieces += [message["content"], self.end + "\n"]
        pieces[-1] += self._before("assistant") if prompt else ""
        text, contents = _join(pieces)
        own = [span for span, message in zip(contents, spelled, strict=True) if message["role"] == "assistant"]
        answers = tuple((start, end + len(self.end)) for start, end in own)
        return Written(text=text, answers=answers, contents=contents)

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


RENDERING = threading.Lock()


@functools.cache
def start_renderer() -> Any:
    """Return the process that renders templates. In a session of its own, it gets no Ctrl-C."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-P", render.__file__], text=True, start_new_session=True, **pipes)


def render_template(source: str, variables: dict[str, Any] | None) -> str:
    """Return the text of a template, with OPEN and CLOSE around {% generation %} blocks. See `render.py`.

    No variables check only that the source is a template. Raises `UserError` if the template fails.
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

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool = False
    ) -> tuple[str, tuple[Span, ...]]:
        """Return (rendered text, spans of its {% generation %} blocks)."""
        given = {"messages": list(messages), "tools": list(tools) or None, "add_generation_prompt": prompt}
        source = (tools and self.tool_source) or self.source
        rendered = render_template(source, {**given, "documents": None, **self.tokens})
        return _join(re.split(f"[{OPEN}{CLOSE}]", rendered))

    def write(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), prompt: bool = False) -> Written:
        """Render messages: see `Turns.write`.

        Raises `UserError` for tools and calls with special tokens in them, and for those that the template leaves out.
        """
        others = [{name: held for name, held in m.items() if name not in ("role", "content")} for m in messages]
        spelled = json.dumps([tools, others], ensure_ascii=False) if tools or any(others) else ""
        if token := next((token for token in self.specials if token in spelled), None):
            raise UserError(f"the tools or their calls have {token!r}, a special token: take it out")
        self._check_tools(messages, tools, prompt)
        text, answers = self._text(messages, tools, prompt=prompt)
        if not answers and not prompt:
            own = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
            answers = tuple(self._answer(messages, tools, n, text) for n in own)
        return Written(text=text, answers=answers, contents=self._contents(messages, tools, text, prompt))

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> None:
        """Raise `UserError` for tools, calls and results that are not written, by rendering words in place of them."""
        hidden, offered = json.loads(json.dumps([messages, tools]))  # nothing is shared, since it is changed
        found = [(tool["function"], "name", "tools") for tool in offered]
        for n, message in enumerate(hidden, 1):
            calls = enumerate(message.get("tool_calls", ()), 1)
            found += [(call["function"], "name", f"call {k} of message {n}") for k, call in calls]
            if message["role"] == "tool":
                found.append((message, "content", f"message {n}, the result of a tool"))
        for number, (held, field, _) in enumerate(found):
            held[field] = f"hidden_{number}_"
        try:
            text = self._text(hidden, offered, prompt=prompt)[0] if found else ""
        except UserError:  # the template inspects them
            return
        for number, (_, _, place) in enumerate(found):
            if f"hidden_{number}_" not in text:
                raise UserError(f"its chat template does not write {place}: leave it out, or give another template")

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
            pieces = (trimmed(contents[int(part)]) if n % 2 else part for n, part in enumerate(parts))
            filled, spans = _join(list(pieces))
            if filled == text:
                return spans
        for number, content in enumerate(contents, 1):
            if token := next((s for s in self.specials if s in content), None):
                raise UserError(
                    f"message {number} has {token!r} in it, and its chat template rewrites contents, so that it cannot "
                    "be distinguished from the template's own: take it out"
                )
        return ()

    def config(self) -> dict[str, Any]:
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
    values = {} if directory is None else _read_values(directory / "tokenizer_config.json")
    if directory is not None and (named := _find_sources(directory, values.get("chat_template"))):
        source, tool_source = named.get("default", OPEN), named.get("tool_use", "")
        if not all(isinstance(x, str) and not any(m in x for m in MARKS) for x in (source, tool_source)):
            raise UserError(
                f"the chat_template in {directory} is damaged: it must be a text, or a list with one named default"
            )
        for text in (source, tool_source):
            render_template(text, None)  # raises `UserError` for what is not a template
        used = re.findall(r"\b[a-z]+_token\b", source + tool_source)
        tokens = {name: text for name, x in values.items() if _is_token(name) and (text := _spell(x)) is not None}
        if not is_own:
            known = _find_tokens(tokenizer, directory, values)
            tokens |= {name: text for name in used if (text := _spell(known.get(name))) is not None}
            if lost := [name for name in used if name not in known and f"{name} is" not in source + tool_source]:
                warnings.warn(
                    f"the chat template in {directory} uses {lost[0]}, which no file there defines, so that it is empty: "
                    "define it in tokenizer_config.json",
                    UserWarning,
                    stacklevel=2,
                )
        return Jinja(source=source, tokens=tokens, specials=tuple(tokenizer.specials), tool_source=tool_source)
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


def _read_values(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no file. Raises `UserError` if it is damaged."""
    values = read_json(path, LARGEST_CONFIG) if is_there(path, "Name another tokenizer.") else {}
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it holds {type(values).__name__}, not an object")
    return values


def _find_sources(directory: Path, held: Any) -> dict[str, Any]:
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


def _find_tokens(tokenizer: Tokenizer, directory: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return special tokens by names such as bos_token, as transformers finds them. values: tokenizer_config.json."""
    kind = str(values.get("tokenizer_class")).removesuffix("Fast")
    known: dict[str, Any] = {name: x for name, x in DEFAULTS.get(kind, {}).items() if x in tokenizer.specials}
    if kind not in DEFAULTS:  # config.json of a model's directory, or of a run that was imported
        config = _read_values(directory / "config.json") or _read_values(directory / "hf/config.json")
        for name, ids in config.items():
            i = ids[0] if isinstance(ids, list) and ids else ids
            if _is_token(token := name.removesuffix("_id")) and type(i) is int and 0 <= i < tokenizer.vocab_size:
                known[token] = tokenizer.decode([i])
    known |= {name: x for name, x in values.items() if _is_token(name)}
    if "added_tokens_decoder" not in values:
        known |= _read_values(directory / "special_tokens_map.json")
    return known


def _is_token(name: str) -> bool:
    """Return whether an entry of tokenizer_config.json holds the text of a token."""
    return name.endswith("_token") and not name.startswith("add_")


def _spell(token: Any) -> str | None:
    """Return the text of a token: it is that, or an object with its content and matching options."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def write_template(directory: Path, config: dict[str, Any]) -> None:
    """Write a template's `config` into tokenizer_config.json, in place of another template's."""
    path = directory / "tokenizer_config.json"
    there = _read_values(path)
    others = {name: x for name, x in there.items() if name != "chat_template" and not (config and _is_token(name))}
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


def list_plain_characters() -> str:
    """Return the characters that the plain template may add to the contents."""
    return PLAIN.write([{"role": role, "content": ""} for role in ("system", "user", "assistant")]).text


@functools.lru_cache(maxsize=4)  # some tokenizers have thousands
def index_specials(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of each special token by id."""
    return {i: token for token, i in tokenizer.specials.items()}
