"""What a request may not ask for: each wrong value is refused with its name, and nothing else is an error of ours."""

import json
import random

import pytest

from tests.serve.conftest import BLOCK, CHAT, HELLO, JSON, refused

HUGE = 10**400
NO_NUMBER = ("1", "", [1], {}, True, HUGE, -HUGE)
NO_COUNT = (*NO_NUMBER, 0.5, -1, 2**63, 1e308)
NO_FLAG = ("true", 1, 0, [], {}, 0.5)
SURROGATE = "\ud800"  # half of a character: valid JSON, and no UTF-8
COMMON = {
    "temperature": (*NO_NUMBER, -1, 1e300),
    "top_p": (*NO_NUMBER, -1, 2),
    "top_k": (*NO_NUMBER, 0.5, -2, 2**63, 1e308),
    "frequency_penalty": (*NO_NUMBER, 2.5, -3),
    "presence_penalty": (*NO_NUMBER, 2.5, -3),
    "logit_bias": (
        *(1, "x", [], [[1, 5]], {"a": 1}, {"-1": 1}, {"1": "5"}, {"1": None}, {"1": 101}, {"1": HUGE}),
        *({"256": 1}, {"9" * 500: 1}, {"01": 1, "1": 1}, {str(i): 1 for i in range(1025)}),
    ),
    "min_p": (*NO_NUMBER, -0.1, 1.5),
    "repetition_penalty": (*NO_NUMBER, -1, 0),
    "n": (*NO_COUNT, 0, 3, 10**6),
    "seed": ("1", [1], True, 0.5, HUGE, -2, 2**32),
    "stop": (1, True, {}, [1], [None], [["x"]], ["a"] * 17, "a" * 257, "", ["", "x"]),
    "stream": NO_FLAG,
    "stop_token_ids": (5, [-1], [256], [10**30], [0] * 17),
    "ignore_eos": NO_FLAG,
    "stream_options": (
        *(1, "x", [], {"include_usage": 1}, {"continuous_usage_stats": True}, {"unknown": True}),
        {"include_usage": True},
    ),
    "max_tokens": NO_COUNT,
    "temprature": (1,),
    "__class__": ("x",),
    "best_of": (*NO_COUNT, 0, 3, True),
    "parallel_tool_calls": NO_FLAG,
    "suffix": ("x",),
    "response_format": (
        *(
            1,
            "json_object",
            [],
            {},
            {"type": "xml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {}},
        ),
        *({"type": "json_schema", "json_schema": {"schema": schema}} for schema in (1, [], {"type": "x"})),
        *({"type": "json_object", "schema": schema} for schema in (1, {"type": "x"})),
    ),
    "guided_json": (1, [], "x", "[]", "{", {"type": "x"}),
    "guided_regex": (1, ["a"], "[", "(?=a)b", "(a?){500}a{500}", "a" * 70_000),
    "guided_choice": (1, "a", [], [""], [1], ["a" * 70_000]),
    "structured_outputs": (1, [], {}, {"xml": "a"}, {"regex": "a", "json": {}}, {"regex": "["}, {"choice": 1}),
}


def tool(name, **more):
    return {"type": "function", "function": {"name": name} | more}


WRONG = {
    "/v1/completions": COMMON
    | {
        "prompt": (
            *(True, 0.5, {}, [], [[]], [0.5], [True], [-1], [256], [HUGE], [1, "a"], [None], [{}], None),
            *(SURROGATE, ["a"] * 5, "a" * (BLOCK + 1), "x" * 100_000, [1] * 100_000),
        ),
        "logprobs": (*NO_COUNT, 21, 0.5),
        "echo": NO_FLAG,
        "max_tokens": (*COMMON["max_tokens"], 0),
        "max_completion_tokens": (5,),
        "tools": ([{}],),
    },
    CHAT: COMMON
    | {
        "messages": (
            [],
            "x",
            1,
            {},
            [{"role": "user", "content": "x\x03y"}],
            [HELLO[0] | {"content": "x" * 100}],
            HELLO * 2049,
            None,
        ),
        "max_completion_tokens": (*NO_COUNT, 0),
        "logprobs": (1, 5, "true", [], {}),
        "top_logprobs": (*NO_COUNT, 21, 5),
        "tools": (
            *(1, "x", [1], [{}], [{"type": "function"}], [{"type": "x", "function": {"name": "a"}}]),
            *([tool(name)] for name in (None, "", "a b", 1, "é", "a" * 65, SURROGATE)),
            *([tool("a"), tool("a")], [tool("a")] * 200, [tool("a", parameters=1)], [tool("a", description=SURROGATE)]),
        ),
        "tool_choice": (1, "x", "required", {}, {"type": "function"}, {"type": "function", "function": {"name": "x"}}),
        "prompt": ("x",),
    },
    "/tokenize": {"prompt": (1, True, [], {}, SURROGATE), "unknown": (1,), "as_prompt": NO_FLAG},
}
GOOD = {
    "/v1/completions": {"prompt": "a"},
    CHAT: {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
}


@pytest.fixture
def client(faked):
    return faked()


def post(client, path, raw):
    return client.post(path, content=raw, headers=JSON)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in WRONG.items() for name in names])
def test_bad_parameters_are_named(client, path, name):
    for value in WRONG[path][name]:
        refused(post(client, path, json.dumps(GOOD[path] | {name: value})), name)
    assert client.ask(path, **GOOD[path]).status_code == 200


def test_what_asks_for_nothing_is_accepted(client):
    neutral = dict(best_of=1, suffix=None, logit_bias={}, frequency_penalty=0, presence_penalty=0.0)
    neutral |= {"response_format": {"type": "text"}, "function_call": "auto", "functions": [], "min_tokens": 0}
    ignored = dict(user="me", store=True, metadata={}, service_tier="auto", parallel_tool_calls=False)
    ignored |= dict(reasoning_effort="low", prompt_cache_key="x", safety_identifier="y", prediction={"content": "x"})
    for path, asked in ((CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
        nothing = dict.fromkeys([*COMMON, *neutral, *ignored, "logprobs", "audio", "web_search_options", "whatever"])
        for more in ({**neutral, **ignored}, nothing, {"logprobs": False}, {"n": 2, "best_of": 2}):
            assert client.ask(path, **asked, **more | {"max_tokens": 1}).status_code == 200, more
        for options in ({}, {"include_obfuscation": False}, {"include_usage": None, "include_obfuscation": True}):
            answer = client.ask(path, **asked, max_tokens=1, stream=True, stream_options=options)
            assert answer.status_code == 200 and '"usage"' not in answer.text
    assert client.ask(CHAT, messages=HELLO, max_tokens=1, top_logprobs=0).json()["choices"][0]["logprobs"] is None
    for how in (
        {"response_format": {"type": "json_object", "schema": None}},
        {"structured_outputs": {"regex": "a", "json": None}},
    ):
        assert client.ask(prompt="a", max_tokens=1, **how).status_code == 200, how
    for defaults in (dict(top_k=0, top_p=0, seed=-1), dict(top_k=-1, stop=["a"] * 16, min_p=0)):
        assert client.ask(prompt="a", max_tokens=1, **defaults).status_code == 200, defaults


def test_lengths_beyond_the_context_are_what_it_holds(client):
    for many in (BLOCK + 1, 10**9):
        (choice,) = client.ask(prompt="a", max_tokens=many).json()["choices"]
        assert choice["finish_reason"] == "length"
        for name in ("max_tokens", "max_completion_tokens"):
            assert client.ask(CHAT, messages=HELLO, **{name: many}).status_code == 200


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client):
    said = f"This model's maximum context length is {BLOCK} tokens"  # litellm looks for these words
    refused(client.ask(prompt="a" * (BLOCK + 1)), "prompt", said, str(BLOCK + 1))
    assert client.ask(prompt="a" * BLOCK, max_tokens=1).status_code == 200


def called(arguments):
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": arguments}}]}


@pytest.mark.parametrize(
    "message",
    [
        *("hello", None, [], {}, {"role": "robot", "content": "x"}, {"role": "user"}, {"content": "x"}),
        *({"role": "user", "content": None}, {"role": "assistant", "content": "x", "function_call": {"name": "a"}}),
        *({"role": "assistant"}, {"role": "user", "content": [{"type": "refusal", "text": "x"}]}),
        *({"role": "assistant", "tool_calls": calls} for calls in (1, [1], [{}], [{"function": {"name": ""}}])),
        *(called(arguments) for arguments in ("{", "[]", 1, SURROGATE)),
        *({"role": [], "content": "x"}, {"role": "user", "content": 1}, {"role": "user", "content": SURROGATE}),
        *({"role": "user", "content": [{"type": "image_url"}]}, {"role": "user", "content": "x", "tool_calls": [1]}),
    ],
)
def test_bad_messages_are_named(client, message):
    refused(post(client, CHAT, json.dumps({"messages": [*HELLO, message]})), "messages[1]")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"role": "assistant", "content": "x", "tool_calls": [], "provider_specific_fields": {"refusal": None}},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "x"}]},
        {"role": "tool", "content": "x", "tool_call_id": "1", "name": "a"},
    ],
    ids=str,
)
def test_messages_of_other_programs_are_read(client, message):
    assert client.ask(CHAT, messages=[message, *HELLO], max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b" ", b"{", b"[]", b"null", b'"text"', b"1", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "a"}' * 2),
        *(b'{"prompt": NaN}', b'{"prompt": "a", "prompt": "b"}', b"[" * 100_000, b'{"a":' * 100_000, b"prompt=a"),
        b'{"prompt": "a", "\\ud800": 1}',  # half of a character comes back as JSON
        *(b'{"n": ' + b"9" * 5000 + b"}", b'{"temperature": 1e999, "prompt": "a"}', '{"prompt": ""}'.encode("utf-16")),
    ],
    ids=lambda raw: repr(raw[:20]),
)
@pytest.mark.parametrize("path", GOOD)
def test_what_is_not_json_is_refused(client, path, raw):
    response = post(client, path, raw)
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize("model", ["gpt-4", "x" * 1000])
def test_another_model_is_not_found(client, model):
    refused(client.ask(prompt="a", model=model), "model", "tiny", status=404)
    refused(client.get(f"/v1/models/{model}"), "model", "tiny", status=404)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("GET", "/v2"), ("PUT", "/health")])
def test_other_paths_and_methods_are_refused_in_json(client, method, path):
    response = client.request(method, path)
    assert response.status_code in (404, 405) and response.json()["error"]["message"]


def test_random_requests_get_an_answer(real):
    """Of bodies with values of other parameters, and with bytes of others, each gets an answer below 500."""
    rng, found = random.Random(0), []
    values = [value for names in WRONG.values() for values in names.values() for value in values]
    for _ in range(300):
        path = rng.choice(list(GOOD))
        body = GOOD[path] | ({"max_tokens": 2} if path.startswith("/v1") else {})
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            body[rng.choice(list(WRONG[path]))] = rng.choice(values)
        raw = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass"))
        for _ in range(rng.choice([0, 0, 0, 0, 3])):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        response = post(real, path, bytes(raw))
        assert response.status_code in (200, 400, 404), (path, raw, response.text)
        if response.status_code != 200:
            assert "Traceback" not in response.json()["error"]["message"]
        elif response.headers["content-type"] == "application/json":
            json.loads(response.content, parse_constant=lambda name: pytest.fail(name))
        found.append(response.status_code)
    assert found.count(400) > 100 and found.count(200) > 20
    assert real.get("/health").status_code == 200
