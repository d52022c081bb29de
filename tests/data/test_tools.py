"""Tools: a call is read back as the template wrote it, and nothing else is taken for a call."""

import dataclasses
import itertools
import json

import pytest

from jaxgpt.data.template import CHATML, PLAIN, Jinja, check_message
from jaxgpt.data.tools import offer_tools
from jaxgpt.errors import UserError

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = (ADD, NOW)
ASKED = {"role": "user", "content": "What is 1 + 2? {{ x }} 'y'\n"}

# Templates in the manner of three families: a block with marks, bare JSON, and a list after a special token.
MARKED = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ '\\n' if m.content else '' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BARE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{"name": \
"{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
LISTED = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{"name": "\
{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{% endfor %}]\
{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
THINKING = MARKED.replace(
    "{{ m.content }}{% for call",
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}{% for call",
)


def jinja(source):
    return Jinja(source=source, tokens={}, specials=("<|im_end|>",))


TEMPLATES = {"plain": PLAIN, "chatml": CHATML, "marked": jinja(MARKED), "bare": jinja(BARE), "listed": jinja(LISTED)}
TEMPLATES["thinking"] = jinja(THINKING)


def call(name="add", id="000000001", **arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_call_that_the_template_writes_is_read_back(kind):
    write, wanted = TEMPLATES[kind].write, {"a": "ñ } \\n </tool_call>", "b": [1, {"c": None}]}
    messages = [ASKED, check_message({"role": "assistant", "content": None, "tool_calls": [call(**wanted)]}, "")]
    before, after = write([ASKED], tools=TOOLS, prompt=True).text, write(messages, tools=TOOLS).text
    assert after.startswith(before)
    for choice in (None, "required", {"type": "function", "function": {"name": "add"}}):
        offer = offer_tools(TOOLS, choice, write)
        answer = after[len(before) :].removeprefix(offer.begin)
        content, (found,) = offer.read(answer)
        assert found["function"]["name"] == "add" and json.loads(found["function"]["arguments"]) == wanted
        assert content.removeprefix("<think>\n\n</think>").strip() == ""
        assert (offer.begin == "") is (choice is None) and len(found["id"]) == 9


def test_what_is_no_call_is_the_answer():
    offer = offer_tools(TOOLS, "auto", CHATML.write)
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for answer in (
        *("", "1 + 2 = 3", "a <tool_call", '<tool_call>\n{"name": "add", "arguments": {"a": 1'),
        *(good.replace("add", "subtract"), good.replace('{"a": 1}', "[1]"), good.replace('{"a": 1}', "[" * 10**5)),
        good + good.replace("add", "subtract"),
    ):
        assert offer.read(answer) == (answer, [])
    content, calls = offer.read(f"I add. {good}\n{good.replace(': ', ':').replace('add', 'now')}")
    assert offer.read(f"<tool_call> no {good}")[0] == "<tool_call> no"  # what is no call is not lost
    assert content == "I add." and [one["function"]["name"] for one in calls] == ["add", "now"]


def test_a_growing_answer_is_held_only_where_a_call_may_begin():
    offer = offer_tools(TOOLS, "auto", CHATML.write)
    for text, count in {"": 0, "ab": 2, "a <": 2, "a <b": 4, "a <tool_call": 2, "a <tool_call> b": 2, "<<": 1}.items():
        assert offer.hold(text) == count, text
    assert offer_tools(TOOLS, "required", CHATML.write).hold("ab") == 0


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", MARKED.replace("| tojson }}}", "| length }}}")])
def test_a_template_without_calls_in_json_is_refused(source):
    with pytest.raises(UserError, match="writes no calls|does not write tools"):
        offer_tools(TOOLS, None, jinja(source).write)


def test_tools_cannot_bring_special_tokens():
    bad = [{"type": "function", "function": {"name": "a", "description": "x<|im_end|>"}}]
    with pytest.raises(UserError, match="special token"):
        TEMPLATES["marked"].write([ASKED], tools=bad)
    written = CHATML.write([ASKED], tools=bad, prompt=True)  # here it is content, which is encoded as text
    assert "x<|im_end|>" in written.text[slice(*written.contents[0])]


BEGUN = dataclasses.replace(PLAIN, end="<|im_end|>", special=True, begin="<s>{{ '\"\\n' }}🐎")


@pytest.mark.parametrize("template", [PLAIN, CHATML, BEGUN], ids=["plain", "chatml", "after a first token"])
def test_tools_are_the_same_in_the_jinja_of_our_templates(template):
    theirs = jinja(template.jinja())
    asked = [check_message({"role": "assistant", "content": "So", "tool_calls": [call(a="ñ <b>"), call("now")]}, "")]
    asked += [check_message({"role": "tool", "content": "3\n", "tool_call_id": "1"}, "")]
    messages = [ASKED, *asked, asked[0] | {"content": ""}, {"role": "assistant", "content": "Done."}]
    for tools, count, prompt in itertools.product(((), TOOLS), range(1, 6), (False, True)):
        found = theirs.write(messages[:count], tools=tools, prompt=prompt)
        expected = template.write(messages[:count], tools=tools, prompt=prompt)
        assert (found.text, found.answers) == (expected.text, expected.answers)
    raw = {"role": "assistant", "content": "", "tool_calls": [call(a=1)]}  # arguments as a text, as OpenAI has them
    assert '"arguments": {"a": 1}}' in theirs.write([ASKED, raw]).text
