"""Tools through the server: a model that knows nothing calls a function with arguments that are right."""

import json

from tests.serve.conftest import CHAT, HELLO, FakeEngine, read_events, refused

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Toledo", "El Toboso"]}, "days": {"type": "integer", "maximum": 99}},
}
CITY["required"] = ["city", "days"]  # and a function takes no others
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": CITY}}
RIDE = {"type": "function", "function": {"name": "ride", "parameters": {"type": "object", "properties": {}}}}
ADDED = '<tool_call>\n{"name": "ride", "arguments": {}}\n</tool_call>'


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


def test_a_call_that_must_be_has_arguments_that_are_right(real):
    named = [{"type": "function", "function": {"name": name}} for name in ("weather", "ride")]
    for seed, choice in enumerate(["required", *named]):
        body = {"messages": HELLO, "tools": [WEATHER, RIDE], "tool_choice": choice, "seed": seed, "temperature": 2.0}
        (found,) = real.ask(CHAT, **body, max_tokens=60).json()["choices"]
        (call,) = found["message"]["tool_calls"]
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        arguments = json.loads(call["function"]["arguments"])
        assert choice == "required" or call["function"]["name"] == choice["function"]["name"]
        if call["function"]["name"] == "weather":
            assert arguments["city"] in ("Toledo", "El Toboso") and type(arguments["days"]) is int
            assert len(arguments) == 2
        else:
            assert arguments == {}
        message, finish = stream(real, **body, max_tokens=60)
        assert finish == "tool_calls" and message["content"] == ""
        assert [one["function"] for one in message["tool_calls"]] == [call["function"]]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        again = [*HELLO, found["message"], result]
        assert real.ask(CHAT, messages=again, tools=[WEATHER, RIDE], max_tokens=5).status_code == 200
    assert real.sample("compilations_total") == 0


def test_a_model_may_call_or_answer(faked):
    for answer, content, calls in (("I ride. " + ADDED, "I ride.", 1), (ADDED * 2, "", 2), ("I <tool", "I <tool", 0)):
        client = faked(FakeEngine(answer=answer.encode()))
        body = {"messages": HELLO, "tools": [RIDE], "max_tokens": len(answer)}
        (found,) = client.ask(CHAT, **body).json()["choices"]
        assert (found["message"]["content"] or "") == content
        ride = {"name": "ride", "arguments": "{}"}
        assert [call["function"] for call in found["message"].get("tool_calls", [])] == [ride] * calls
        assert found["finish_reason"] == ("tool_calls" if calls else "length")
        message, finish = stream(client, **body)
        assert message["content"].strip() == content and len(message["tool_calls"]) == calls
        assert finish == found["finish_reason"]
        alone = client.ask(CHAT, **body, parallel_tool_calls=False).json()["choices"][0]["message"]
        assert len(alone.get("tool_calls", [])) == min(calls, 1) and alone["content"] == found["message"]["content"]


def test_a_choice_of_none_shows_no_tools(faked):
    client, asked = faked(), {"messages": HELLO, "max_tokens": 1}
    with_none = client.ask(CHAT, **asked, tools=[RIDE], tool_choice="none").json()["usage"]["prompt_tokens"]
    assert with_none == client.ask(CHAT, **asked).json()["usage"]["prompt_tokens"]
    assert with_none < client.ask(CHAT, **asked, tools=[RIDE]).json()["usage"]["prompt_tokens"]


def test_what_cannot_be_called_is_refused(faked):
    client = faked()
    body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required"}
    refused(client.ask(CHAT, **body, response_format={"type": "json_object"}), "response_format")
    for schema in ({"type": "x"}, {"minimum": 2**53 + 1}):
        bad = WEATHER["function"] | {"parameters": schema}
        refused(client.ask(CHAT, **body | {"tools": [{"type": "function", "function": bad}]}), "tools")
