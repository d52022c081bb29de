"""Describe tools, the functions that a model may call, and read calls of them, in the form of OpenAI's requests.

The chat template decides how a call is written, and `offer_tools` learns it from a call that it writes. Templates
of our own write tools, calls and results as texts, as Hermes and Qwen do::

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json

Tool = dict[str, Any]  # {"type": "function", "function": {"name": ..., "description": ..., "parameters": a schema}}
Message = dict[str, Any]  # has "role" and "content". A "weight" of "0" marks an answer from which nothing is learnt

MAX_TOOLS = 128
NO_CHARACTER = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")  # halves of characters, and those with which templates mark
NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
TOOL = '{"type": "function", "function": {"name": "...", "parameters": {a schema}}}'
CALL = '{"function": {"name": "...", "arguments": "{...}"}}'
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
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not is_name(function.get("name")):
            raise UserError(f"{where}[{number}] is {short(tool)}: give {TOOL}, with a name of {NAME.pattern}")
        if not isinstance(schema := function.get("parameters", {}), dict | None):
            raise UserError(f"{where}[{number}] has the parameters {short(schema)}: give a schema, which is an object")
    check_characters(json.dumps(tools, ensure_ascii=False), where)
    names = [tool["function"]["name"] for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{where} has {twice[0]!r} twice: give different names")
    return tuple(tools)


def check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of a message, with arguments as objects. Raises `UserError` for others. where: for the error."""
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not is_name(function.get("name")):
            raise UserError(f"{where} has the call {short(call)}: give {CALL}, with a name of {NAME.pattern}")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments.encode(errors="replace"), f"{where}: the arguments of {function['name']}")
        if not isinstance(arguments, dict):
            raise UserError(f"{where} has the arguments {short(arguments)}: give an object, as JSON in a text")
        check_characters(json.dumps([call, arguments], ensure_ascii=False), where)
        given = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        checked.append(given | {"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return checked


def check_characters(text: str, where: str) -> None:
    """Raise `UserError` for what is not a character, and so cannot be encoded. where: for the error."""
    if bad := NO_CHARACTER.search(text):
        raise UserError(f"{where} has U+{ord(bad[0]):04X}, which is not a character: take it out")


def is_name(name: Any) -> bool:
    """Return whether a function may have this name."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def spell_out(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return messages that are all content: tools as a system's, calls as an answer's, results as a user's."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """The tools that an answer may call, and how the chat template writes a call.

    That is `opening`, the name, `middle`, and the arguments in JSON.
    """

    tools: tuple[Tool, ...]
    required: tuple[Tool, ...]  # one of these must be called. Empty means that the model may answer otherwise
    begin: str  # how a required call begins: the part of the answer that is in the prompt
    opening: str
    middle: str

    def grammar(self, json_options: dict[str, Any]) -> str | None:
        """Return the grammar, in llguidance's form, of what follows `begin` in a required call, or None if none is."""
        ways = []
        for tool in self.required:
            schema = tool["function"].get("parameters") or {"type": "object", "properties": {}}
            closed = {"additionalProperties": False} if "properties" in schema else {}  # a function takes no others
            schema = closed | schema | {"x-guidance": json_options}
            ways.append(f"{json.dumps(tool['function']['name'] + self.middle)} %json {json.dumps(schema)}")
        return f"start: {' | '.join(ways)}" if ways else None

    def hold(self, text: str) -> int:
        """Return how many characters of a growing answer are certainly not part of a call."""
        if self.required:
            return 0
        first = self.opening.split()[0]
        if (at := text.find(first)) >= 0:
            return at
        held = (n for n in range(min(len(first), len(text)), 0, -1) if first.startswith(text[-n:]))
        return len(text) - next(held, 0)

    def read(self, answer: str) -> tuple[str, list[dict[str, Any]]]:
        """Return (content, calls) of an answer. If a call is not well formed, that is the whole answer and no calls."""
        text = (self.opening if self.required else "") + answer
        opening, middle = (r"\s*".join(map(re.escape, part.split())) for part in (self.opening, self.middle))
        pattern = re.compile(rf"{opening}({NAME.pattern}){middle}\s*")
        names = [tool["function"]["name"] for tool in self.tools]
        calls, at, content = [], 0, text
        while match := pattern.search(text, at):
            content = content if calls else text[: match.start()].rstrip()
            try:
                arguments, at = json.JSONDecoder().raw_decode(text, match.end())
            except (ValueError, RecursionError):
                return answer, []
            if match[1] not in names or not isinstance(arguments, dict):
                return answer, []
            function = {"name": match[1], "arguments": text[match.end() : at]}
            # Mistral's template needs nine characters.
            calls.append({"id": secrets.token_hex(5)[:9], "type": "function", "function": function})
        return (content, calls) if calls else (answer, [])


def offer_tools(tools: tuple[Tool, ...], choice: Any, write: Callable[..., Any]) -> Offer | None:
    """Return what a request offers, or None. Raises `UserError` for another choice, or another template.

    Args:
        tools: the tools of the request.
        choice: none, auto, required, or one of the tools.
        write: the method of the chat template, which must write calls with arguments in JSON.
    """
    must_call = tuple[Tool, ...]()
    match choice:
        case "none":
            return None
        case "required":
            must_call = tools
        case {"type": "function", "function": {"name": name}}:
            must_call = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not must_call and choice not in (None, "auto"):
        needed = "give none, auto, required, or {'type': 'function', 'function': {'name': one of the tools}}"
        raise UserError(f"tool_choice={short(choice)}: {needed}")
    if not tools:
        return None
    function = {"name": "the_name", "description": "-", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "000000000", "type": "function", "function": {"name": "the_name", "arguments": {"the_key": "value"}}}
    asked, described = [{"role": "user", "content": "s"}], [{"type": "function", "function": function}]
    before = write(asked, tools=described, prompt=True).text
    after = write([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=described).text
    written = after.removeprefix(before) if after.startswith(before) else ""
    found = re.match(r'(.*?\S.*?)the_name(.*?)\{\s*"the_key":\s*"value"\s*\}', written, re.DOTALL)
    if found is None:
        raise UserError("this run's chat template writes no calls with arguments in JSON: leave tools out")
    opening = found[1].rpartition("</think>")[2].lstrip()  # without what comes once, before the first call
    return Offer(tools=tools, required=must_call, begin=found[1] if must_call else "", opening=opening, middle=found[2])
