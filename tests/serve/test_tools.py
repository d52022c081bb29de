"""Tools through the server: a model that knows nothing calls a function with arguments that are right."""

import json

import pytest

from tests.serve.conftest import CHAT, HELLO, Client, FakeEngine, make_byte_run, read_events, refused, start_server

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Toledo", "El Toboso"]}, "days": {"type": "integer", "maximum": 99}},
}
CITY |= {"required": ["city", "days"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": CITY}}
RIDE = {"type": "function", "function": {"name": "ride", "parameters": {"type": "object", "properties": {}}}}
ADDED = '<tool_call>\n{"name": "ride", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def wide_run(tmp_path_factory, text_file):
    """A run whose context holds the description of tools."""
    directory = tmp_path_factory.mktemp("tools")
    (directory / "t.txt").write_text(text_file.read_text() * 10)
    return make_byte_run(directory / "tiny", directory / "t.txt", 1200)


@pytest.fixture(scope="module")
def wide(wide_run):
    with Client(start_server(wide_run)) as client:
        yield client


def stream(client, **body):
    """Return a choice of a stream, its pieces joined as clients join them."""
    message, finish = {"content": "", "tool_calls": []}, None
    for event in read_events(client.ask(CHAT, **body, stream=True).text):
        (choice,) = event["choices"]
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            assert call.pop("index") == len(message["tool_calls"])
            message["tool_calls"].append(call)
        finish = choice["finish_reason"] or finish
    return message, finish


def test_a_call_that_must_be_has_arguments_that_are_right(wide):
    named = {"type": "function", "function": {"name": "weather"}}
    for seed, choice in enumerate(["required", named, "required"]):
        body = {"messages": HELLO, "tools": [WEATHER, RIDE], "tool_choice": choice, "seed": seed, "temperature": 2.0}
        response = wide.ask(CHAT, **body, max_tokens=60).json()
        (found,) = response["choices"]
        (call,) = found["message"]["tool_calls"]
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        arguments = json.loads(call["function"]["arguments"])
        if choice == named or call["function"]["name"] == "weather":
            assert arguments["city"] in ("Toledo", "El Toboso") and type(arguments["days"]) is int
        else:
            assert call["function"]["name"] == "ride" and arguments == {}
        message, finish = stream(wide, **body, max_tokens=60)
        assert finish == "tool_calls" and message["content"] == ""
        assert [one["function"] for one in message["tool_calls"]] == [call["function"]]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        again = [*HELLO, found["message"], result]
        assert wide.ask(CHAT, messages=again, tools=[WEATHER, RIDE], max_tokens=5).status_code == 200
    assert wide.sample("compilations_total") == 0


def test_a_model_may_call_or_answer(faked, wide_run):
    body = {"messages": HELLO, "tools": [RIDE]}
    for answer, content, calls in (("I ride. " + ADDED, "I ride.", 1), (ADDED * 2, "", 2), ("I <tool", "I <tool", 0)):
        client = faked(FakeEngine(answer=answer.encode()), run=wide_run)
        found = client.ask(CHAT, **body, max_tokens=len(answer)).json()["choices"][0]
        assert (found["message"]["content"] or "") == content
        assert [call["function"] for call in found["message"].get("tool_calls", [])] == [
            {"name": "ride", "arguments": "{}"}
        ] * calls
        assert found["finish_reason"] == ("tool_calls" if calls else "length")
        message, finish = stream(client, **body, max_tokens=len(answer))
        assert message["content"].strip() == content and len(message["tool_calls"]) == calls
        assert finish == found["finish_reason"]
        alone = client.ask(CHAT, **body, max_tokens=len(answer), parallel_tool_calls=False).json()["choices"][0][
            "message"
        ]
        assert len(alone.get("tool_calls", [])) == min(calls, 1) and alone["content"] == found["message"]["content"]


def test_a_choice_of_none_shows_no_tools(faked, wide_run):
    client = faked(run=wide_run)
    asked = {"messages": HELLO, "max_tokens": 1}
    with_tools = client.ask(CHAT, **asked, tools=[RIDE], tool_choice="none").json()["usage"]["prompt_tokens"]
    assert with_tools == client.ask(CHAT, **asked).json()["usage"]["prompt_tokens"]
    assert with_tools < client.ask(CHAT, **asked, tools=[RIDE]).json()["usage"]["prompt_tokens"]


def test_what_cannot_be_called_is_refused(faked, wide_run):
    client = faked(run=wide_run)
    body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required"}
    refused(client.ask(CHAT, **body, response_format={"type": "json_object"}), "response_format", "needs one of them")
    for schema, said in (({"type": "x"}, "cannot be followed"), ({"minimum": 2**53 + 1}, "integers below 2^53")):
        bad = WEATHER["function"] | {"parameters": schema}
        refused(client.ask(CHAT, **body | {"tools": [{"type": "function", "function": bad}]}), "tools", said)
