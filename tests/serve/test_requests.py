"""What a request may not ask for: each wrong value is refused with its name, and nothing else is an error of ours."""

import json

import pytest

from tests.serve.conftest import BLOCK, CHAT, HELLO, JSON, TEXTS, refused

HUGE = 10**400
NO_NUMBER = ("1", [1], True, HUGE)
NO_COUNT = (*NO_NUMBER, 0.5, -1, 2**63)
NO_FLAG = ("true", 1, {})
SURROGATE = "\ud800"  # half of a character: valid JSON, and no UTF-8


COMMON = {
    "temperature": (*NO_NUMBER, -1, 1e300),
    "top_p": (*NO_NUMBER, 2),
    "top_k": (*NO_NUMBER, 0.5, -2),
    "frequency_penalty": (*NO_NUMBER, 2.5),
    "presence_penalty": (*NO_NUMBER, -3),
    "logit_bias": (1, [[1, 5]], {"a": 1}, {"1": "5"}, {"1": 101}, {"256": 1}, {"01": 1, "1": 1}),
    "min_p": (*NO_NUMBER, -0.1, 1.5),
    "repetition_penalty": (*NO_NUMBER, -1, 0),
    "n": (*NO_COUNT, 0, 3),
    "seed": ("1", True, 0.5, HUGE, -2, 2**32),
    "stop": (1, {}, [1], [["x"]], "", ["a", ""]),
    "stop_token_ids": (5, [-1], [256], [0] * 17),
    "stream": NO_FLAG,
    "stream_options": (1, [], {"include_usage": 1}, {"unknown": True}, {"include_usage": True}),
    "ignore_eos": NO_FLAG,
    "max_tokens": NO_COUNT,
    "temprature": (1,),
    "best_of": (2,),
    "parallel_tool_calls": NO_FLAG,
    "suffix": ("x",),
    "response_format": (
        1,
        "json_object",
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}},
    ),
    "structured_outputs": (
        *(1, {}, {"xml": "a"}, {"regex": "a", "json": {}}),
        *({"json": schema} for schema in (1, [], "{", {"type": "x"})),
        *({"regex": regex} for regex in (1, "[", "(?=a)b", "(a?){500}a{500}", "a" * 70_000)),
        *({"choice": choice} for choice in (1, [], [1], ["a" * 70_000])),
    ),
}


def tool(name, **more):
    return {"type": "function", "function": {"name": name} | more}


WRONG = {
    TEXTS: COMMON
    | {
        "prompt": (
            *(True, {}, [], [[]], [0.5], [-1], [256], [HUGE], [1, "a"], None),
            *(SURROGATE, ["a"] * 9, "a" * (BLOCK + 1), [1] * 100_000),
        ),
        "logprobs": (*NO_COUNT, 21),
        "echo": NO_FLAG,
        "max_tokens": (*NO_COUNT, 0),
        "max_completion_tokens": (5,),
        "tools": ([{}],),
    },
    CHAT: COMMON
    | {
        "messages": (
            [],
            "x",
            None,
            [HELLO[0] | {"content": "x\x03y"}],
            [HELLO[0] | {"content": "x" * BLOCK}],
            HELLO * 2049,
        ),
        "max_completion_tokens": (*NO_COUNT, 0),
        "logprobs": (1, "true"),
        "top_logprobs": (*NO_COUNT, 21, 5),
        "tools": (
            *(1, [1], [{}], [{"type": "x", "function": {"name": "a"}}], [tool(None)], [tool("a b")], [tool("a" * 65)]),
            *([tool("a"), tool("a")], [tool("a")] * 200, [tool("a", parameters=1)], [tool("a", description=SURROGATE)]),
        ),
        "tool_choice": (1, "required", {"type": "function", "function": {"name": "x"}}),
        "prompt": ("x",),
    },
    "/tokenize": {"prompt": (1, [], SURROGATE), "as_prompt": (True,)},
}
GOOD = {TEXTS: {"prompt": "a"}, CHAT: {"messages": HELLO}, "/tokenize": {"prompt": "a"}}


@pytest.mark.parametrize("path", WRONG)
def test_bad_parameters_are_named(faked, path):
    client = faked()
    for name, values in WRONG[path].items():
        for value in values:
            refused(client.post(path, content=json.dumps(GOOD[path] | {name: value}), headers=JSON), name)
    assert client.ask(path, **GOOD[path]).status_code == 200


def test_what_asks_for_nothing_is_accepted(faked):
    client = faked()
    neutral = dict(best_of=1, suffix=None, logit_bias={}, frequency_penalty=0, presence_penalty=0.0)
    neutral |= {"response_format": {"type": "text"}, "function_call": "auto", "functions": [], "min_tokens": 0}
    ignored = dict(user="me", store=True, metadata={}, service_tier="auto", parallel_tool_calls=False)
    ignored |= dict(reasoning_effort="low", prompt_cache_key="x", safety_identifier="y", prediction={"content": "x"})
    defaults = dict(top_k=-1, top_p=0, min_p=0, seed=-1, stop=["a"] * 16)
    for path in (TEXTS, CHAT):
        nothing = dict.fromkeys([*COMMON, *neutral, *ignored, "logprobs", "audio", "whatever"])
        for more in (neutral | ignored, nothing, {"logprobs": False}, defaults):
            assert client.ask(path, **GOOD[path] | more | {"max_tokens": 1}).status_code == 200, more
        for options in ({}, {"include_obfuscation": False}, {"include_usage": None}):
            answer = client.ask(path, **GOOD[path], max_tokens=1, stream=True, stream_options=options)
            assert answer.status_code == 200 and '"usage"' not in answer.text
    assert client.ask(CHAT, messages=HELLO, max_tokens=1, top_logprobs=0).json()["choices"][0]["logprobs"] is None


def test_lengths_beyond_the_context_are_what_it_holds(faked):
    client = faked()
    for many in (BLOCK + 1, 10**9):
        assert client.choices(prompt="a", max_tokens=many)[0]["finish"] == "length"
        assert client.ask(CHAT, messages=HELLO, max_completion_tokens=many).status_code == 200
    overlong = client.ask(prompt="a" * (BLOCK + 1))
    assert f"This model's maximum context length is {BLOCK} tokens" in overlong.text  # litellm looks for these words
    assert client.ask(prompt="a" * BLOCK, max_tokens=1).status_code == 200


def test_bad_messages_are_named(faked):
    client = faked()
    calls = [1, [1], [{}], [{"function": {"name": ""}}], [{"function": {"name": "a", "arguments": "{"}}]]
    bad = [{"role": "assistant", "tool_calls": call} for call in calls]
    bad += ["hello", None, {"role": "robot", "content": "x"}, {"role": "user"}, {"content": "x"}, {"role": "assistant"}]
    bad += [{"role": "user", "content": content} for content in (None, 1, SURROGATE, [{"type": "image_url"}])]
    for message in bad:
        raw = json.dumps({"messages": [*HELLO, message]})
        refused(client.post(CHAT, content=raw, headers=JSON), "messages[1]")


def test_messages_of_other_programs_are_read(faked):
    client = faked()
    for message in (
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"role": "assistant", "content": "x", "tool_calls": [], "provider_specific_fields": {"refusal": None}},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "x", "tool_call_id": "1", "name": "a"},
    ):
        assert client.ask(CHAT, messages=[message, *HELLO], max_tokens=1).status_code == 200, message


def test_what_is_not_json_is_refused(faked):
    client = faked()
    broken = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "a"}' * 2, b'{"prompt": NaN}']
    broken += [b'{"prompt": "a", "prompt": "b"}', b'{"a":' * 100_000, b'{"prompt": "a", "\\ud800": 1}']
    for raw in [*broken, b'{"n": ' + b"9" * 5000 + b"}", '{"prompt": ""}'.encode("utf-16")]:
        for path in GOOD:
            response = client.post(path, content=raw, headers=JSON)
            assert response.status_code == 400 and response.json()["error"]["message"], raw[:20]


@pytest.mark.parametrize(("method", "path"), [("GET", TEXTS), ("GET", "/v2"), ("PUT", "/health")])
def test_other_paths_and_methods_are_refused_in_json(faked, method, path):
    response = faked().request(method, path)
    assert response.status_code in (404, 405) and response.json()["error"]["message"]
