"""What a request may not ask for, and how it is told."""

import json

import pytest

from tests.serve.conftest import BLOCK

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def refused(response, param, *words, status=400):
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param, error
    assert all(word in error["message"] for word in words), error


@pytest.fixture
def client(faked):
    return faked()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", 1e300),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", 0),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 3),
        ("n", True),
        ("seed", -1),
        ("seed", 2**32),
        ("stop", ["a"] * 5),
        ("stop", "a" * 257),
        ("stop", ""),
        ("stop", [1]),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", BLOCK + 1),
        ("max_tokens", 10**400),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", "yes"),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [1.5]),
        ("prompt", [256]),
        ("prompt", [-1]),
        ("prompt", [10**30]),
        ("prompt", ["a", [1]]),
        ("prompt", {"a": 1}),
        ("prompt", "\ud800"),
        ("prompt", ["a"] * 5),
        ("best_of", 2),
        ("logit_bias", {"1": 5}),
        ("suffix", "x"),
        ("frequency_penalty", 0.5),
        ("frequency_penalty", False),
        ("tools", [{}]),
        ("temprature", 1),
        ("max_completion_tokens", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**30]),
    ],
)
def test_bad_parameters_are_named(client, name, value):
    if name == "prompt" and value == ["a", [1]]:
        assert client.ask(prompt=value, max_tokens=1).status_code == 200  # texts and ids may be mixed
        return
    body = {"prompt": "a", name: value}
    refused(client.post("/v1/completions", content=json.dumps(body), headers=JSON), name)


JSON = {"content-type": "application/json"}


def test_what_asks_for_nothing_is_accepted(client):
    neutral = dict(best_of=1, suffix=None, logit_bias={}, frequency_penalty=0, presence_penalty=0.0, tools=[])
    ignored = dict(user="me", store=True, metadata={}, service_tier="auto", parallel_tool_calls=False)
    assert client.ask(prompt="a", max_tokens=1, **neutral, **ignored, top_p=None).status_code == 200


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client):
    refused(client.ask(prompt="a" * (BLOCK + 1)), "prompt", str(BLOCK), str(BLOCK + 1))
    assert client.ask(prompt="a" * BLOCK, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [*HELLO, {"role": "user", "content": "\ud800"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x\x03y"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
        ({"messages": HELLO, "top_logprobs": 5}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": 5}, "logprobs"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": HELLO, "prompt": "x"}, "prompt"),
    ],
)
def test_bad_chats_are_named(client, body, param):
    refused(client.post(CHAT, content=json.dumps(body), headers=JSON), param)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_conversation_has_a_limit(client, path):
    refused(client.ask(path, messages=HELLO * 2049), "messages", "2,049 messages", "at most 2,048")
    refused(client.ask(path, messages=HELLO * 2048), "messages", "tokens")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "prompt": "b"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"temperature": 1e999, "prompt": "a"}',
    ],
)
def test_what_is_not_json_is_refused(client, raw):
    response = client.post("/v1/completions", content=raw, headers=JSON)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_another_model_is_not_found(client):
    refused(client.ask(prompt="a", model="gpt-4"), "model", "tiny", status=404)
    assert client.get("/v1/models/gpt-4").status_code == 404


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("GET", "/v2"), ("PUT", "/health")])
def test_other_paths_and_methods_are_refused_in_json(client, method, path):
    response = client.request(method, path)
    assert response.status_code in (404, 405) and response.json()["error"]["message"]


def test_half_a_surrogate_pair_comes_back_as_json(client):
    response = client.post("/v1/completions", content=b'{"prompt": "a", "\\ud800": 1}', headers=JSON)
    assert response.status_code == 400 and response.json()["error"]["code"] == "unknown_parameter"


@pytest.mark.parametrize("tokens", [[256], [-1], "a", [10**30], [1.5], 5])
def test_detokenize_refuses_what_are_no_ids(client, tokens):
    refused(client.ask("/detokenize", tokens=tokens), "tokens")
