"""Describe tools, the functions that a model may call, and read calls of them, in the form of OpenAI's requests.

The chat template decides how a call is written, and `offer_tools` learns it from a call that it writes. Templates
of our own write tools, calls and results as texts, as Hermes and Qwen do: see `spell_out`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.files import Json, parse_json

Tool = Json  # {"type": "function", "function": {"name": ..., "description": ..., "parameters": a schema}}
Message = Json  # has "role" and "content". A "weight" of "0" marks an answer from which nothing is learnt

MAX_TOOLS = 128
NO_CHARACTER = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")  # halves of characters, and those with which templates mark
NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
TOOL = '{"type": "function", "function": {"name": "...", "parameters": {a schema}}}'
CALL = '{"function": {"name": "...", "arguments": "{...}"}}'
# A tool and its call, by which `offer_tools` learns how a template writes them.
_SCHEMA = {"type": "object", "properties": {}}
EXAMPLE = {"type": "function", "function": {"name": "the_name", "description": "-", "parameters": _SCHEMA}}
EXAMPLE_CALL = {"id": "000000000", "type": "function"}
EXAMPLE_CALL |= {"function": {"name": "the_name", "arguments": {"the_key": "value"}}}
DESCRIBED = """Functions that you may call, each with the JSON schema of its arguments:
{tools}
Write a call as
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call>"""


def check_tools(tools: Any, where: str) -> tuple[Tool, ...]:
    """Return the tools of a request. Raises `UserError` for what describes no function. where: for the error."""
    tools = [] if tools is None else tools
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise UserError(f"{where}={short(tools)}: give a list of at most {MAX_TOOLS} tools")
    names = set()
    for number, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name), **fields}} if NAME.fullmatch(name) and isinstance(
                fields.get("parameters"), dict | None
            ):
                names.add(name)
            case _:
                raise UserError(f"{where}[{number}] is {short(tool)}: give {TOOL}, with a name of {NAME.pattern}")
    if len(names) < len(tools):
        raise UserError(f"{where} has a name twice: give different names")
    check_characters(json.dumps(tools, ensure_ascii=False), where)
    return tuple(tools)


def check_calls(calls: Any, where: str) -> list[Json]:
    """Return the calls of a message, with arguments as objects. Raises `UserError` for others. where: for the error."""
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        match call:
            case {"function": {"name": str(name), **fields}} if NAME.fullmatch(name):
                arguments = fields.get("arguments") or {}
            case _:
                raise UserError(f"{where} has the call {short(call)}: give {CALL}, with a name of {NAME.pattern}")
        if isinstance(arguments, str):
            arguments = parse_json(arguments.encode(errors="replace"), f"{where}: the arguments of {name}")
        if not isinstance(arguments, dict):
            raise UserError(f"{where} has the arguments {short(arguments)}: give an object, as JSON in a text")
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        kept |= {"type": "function", "function": {"name": name, "arguments": arguments}}
        check_characters(json.dumps(kept, ensure_ascii=False), where)
        checked.append(kept)
    return checked


def check_characters(text: str, where: str) -> None:
    """Raise `UserError` for what is not a character, and so cannot be encoded. where: for the error."""
    if bad := NO_CHARACTER.search(text):
        raise UserError(f"{where} has U+{ord(bad[0]):04X}, which is not a character: take it out")


def spell_out(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return messages of content alone: tools in the system prompt, calls and results in turns."""
    spelled = []
    if tools:
        described = DESCRIBED.replace("{tools}", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        spelled.append({"role": "system", "content": described})
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        elif "tool_calls" in message:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
            parts = [content] * bool(content) + [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
            message = message | {"content": "\n".join(parts)}
        spelled.append(message)
    return spelled


class Offer(NamedTuple):
    """The tools that an answer may call, and how the chat template writes a call.

    That is `opening`, the name, `middle`, and the arguments in JSON.
    """

    tools: tuple[Tool, ...]
    required: tuple[Tool, ...]  # one of these must be called. Empty means that the model may answer otherwise
    begin: str  # how a required call begins: the part of the answer that is in the prompt
    opening: str
    middle: str

    def grammar(self, json_options: Json) -> str:
        """Return the grammar, in llguidance's form, of what follows `begin` in a required call."""
        ways = []
        for tool in self.required:
            schema = tool["function"].get("parameters") or {"type": "object", "properties": {}}
            closed = {"additionalProperties": False} if "properties" in schema else {}  # a function takes no others
            schema = closed | schema | {"x-guidance": json_options}
            ways.append(f"{json.dumps(tool['function']['name'] + self.middle)} %json {json.dumps(schema)}")
        return f"start: {' | '.join(ways)}"

    def hold(self, text: str, start: int = 0) -> int:
        """Return how many characters of a growing answer are certainly not part of a call. The first `start` are not."""
        if self.required:
            return 0
        first = self.opening.split()[0]
        places = range(start, len(text))
        return next((n for n in places if first.startswith(text[n : n + len(first)])), len(text))

    def read(self, answer: str) -> tuple[str, list[Json]]:
        """Return (content, calls) of an answer. If a call is not well formed, that is the whole answer and no calls."""
        text = self.opening + answer if self.required else answer
        opening, middle = (r"\s*".join(map(re.escape, part.split())) for part in (self.opening, self.middle))
        pattern = re.compile(rf"{opening}({NAME.pattern}){middle}\s*")
        names = [tool["function"]["name"] for tool in self.tools]
        calls, at = [], 0
        while match := pattern.search(text, at):
            try:
                arguments, at = json.JSONDecoder().raw_decode(text, match.end())
            except (ValueError, RecursionError):
                return answer, []
            if match[1] not in names or not isinstance(arguments, dict):
                return answer, []
            function = {"name": match[1], "arguments": text[match.end() : at]}
            # Mistral's template needs nine characters.
            calls.append({"id": secrets.token_hex(5)[:9], "type": "function", "function": function})
        return (pattern.split(text, 1)[0].rstrip(), calls) if calls else (answer, [])


def offer_tools(tools: tuple[Tool, ...], choice: Any, write: Callable[..., Any]) -> Offer | None:
    """Return what a request offers, or None. Raises `UserError` for another choice, or another template.

    Args:
        tools: the tools of the request.
        choice: none, auto, required, or one of the tools.
        write: the method of the chat template, which must write calls with arguments in JSON.
    """
    named = {tool["function"]["name"]: tool for tool in tools}
    match choice:
        case "none":
            return None
        case None | "auto":
            required = ()
        case "required" if tools:
            required = tools
        case {"type": "function", "function": {"name": str(name)}} if name in named:
            required = (named[name],)
        case _:
            needed = "give none, auto, required, or {'type': 'function', 'function': {'name': one of the tools}}"
            raise UserError(f"tool_choice={short(choice)}: {needed}")
    if not tools:
        return None
    asked = {"role": "user", "content": "s"}
    before = write([asked], tools=[EXAMPLE], prompt=True).text
    after = write([asked, {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]}], tools=[EXAMPLE]).text
    form = r'(.*?\S.*?)the_name(.*?)\{\s*"the_key":\s*"value"\s*\}'
    found = re.match(re.escape(before) + form, after, re.DOTALL)
    if found is None:
        raise UserError("this run's chat template writes no calls with arguments in JSON: leave tools out")
    opening = found[1].rpartition("</think>")[2].lstrip()  # without what comes once, before the first call
    return Offer(tools=tools, required=required, begin=found[1] if required else "", opening=opening, middle=found[2])
