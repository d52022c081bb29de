"""The wire formats, over an engine that repeats the prompt."""

import json
import re

import pytest

from jaxgpt.serve.server import make_log
from tests.serve.conftest import BLOCK, CHAT, HELLO, TEXTS, FakeEngine, read_events, refused, wait_for


def events(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_events(response.text)


def test_a_completion(faked):
    body = faked().ask(prompt="abc", max_tokens=7, seed=1, model="tiny", user="me").json()
    assert body["object"] == "text_completion" and body["model"] == "tiny" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "abcabca", "logprobs": None, "finish_reason": "length"}]
    usage = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_choices_are_those_of_the_first_prompt_then_of_the_second(faked):
    """Also where texts and ids are mixed."""
    client = faked()
    for prompts in (["a", "b"], ["a", [98]], [[97], [98]]):
        body = client.ask(prompt=prompts, n=2, max_tokens=2).json()
        assert [choice["text"] for choice in body["choices"]] == ["aa", "aa", "bb", "bb"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3] and body["usage"]["prompt_tokens"] == 2
    assert client.ask(prompt=[97, 98], max_tokens=4).json()["choices"][0]["text"] == "abab"


def test_a_stream_joined_is_the_completion(faked):
    client = faked()
    chunks = events(client.ask(prompt="né", max_tokens=20, stream=True, stream_options={"include_usage": True}))
    *parts, usage = chunks
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20
    assert all(part["usage"] is None for part in parts) and len({part["id"] for part in chunks}) == 1
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    whole = client.ask(prompt="né", max_tokens=20).json()["choices"][0]["text"]
    assert "".join(part["choices"][0]["text"] for part in parts) == whole == ("né" * 7)[:13] + "�"


def test_a_chat(faked):
    client, asked = faked(), dict(messages=HELLO, max_tokens=3)
    body = client.ask(CHAT, **asked).json()
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion" and choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "Use"}
    parts = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("hel", "lo")]}]
    assert client.ask(CHAT, messages=parts, max_tokens=3).json()["choices"] == body["choices"]
    chunks = events(client.ask(CHAT, **asked, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Use"}, {}]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]


def test_logprobs_of_a_chat(faked):
    asked = dict(messages=[{"role": "user", "content": "x"}], max_completion_tokens=1, logprobs=True, top_logprobs=2)
    client = faked()
    logprobs = client.ask(CHAT, **asked).json()["choices"][0]["logprobs"]
    (entry,) = logprobs["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("U", -0.5, [85])
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("U", -0.5), ("\0", -1.5)]
    chunks = events(client.ask(CHAT, **asked, stream=True))
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [None, logprobs, None]


def test_echo_has_the_logprobs_of_the_prompt(faked):
    client = faked()
    (choice,) = client.ask(prompt="aé", echo=True, logprobs=2, max_tokens=1).json()["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "aéa" and logprobs["tokens"] == ["a", "�", "�", "a"]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -0.5] and logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][3] == {"a": -0.5, "\0": -1.5}
    assert logprobs["top_token_ids"] == [[], [195, 0], [169, 0], [97, 0]]
    (only,) = client.ask(prompt="aé", echo=True, logprobs=0, max_tokens=0).json()["choices"]
    assert (only["text"], only["finish_reason"]) == ("aé", "length")
    assert only["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]


@pytest.mark.parametrize("path", [TEXTS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_text_tokens_and_slot(faked, path, stream):
    """Also where it begins in one burst and ends in the next."""
    client = faked(FakeEngine(delay=0.002, endless=True, answer=b"abcdefghij"))
    asked = {"prompt": "a", "logprobs": 0} if path == TEXTS else {"messages": HELLO, "logprobs": True}
    (choice,) = client.choices(path, **asked, max_tokens=60, stop=["zz", "ghia", "ija"], stream=stream)
    assert (choice["text"], choice["finish"], len(choice["logprobs"])) == ("abcdefgh", "stop", 8)
    wait_for(lambda: client.engine.cancelled)
    assert client.engine.cancelled == [0] and not client.engine.running


def test_stop_tokens_of_a_request_and_of_the_run(faked):
    (choice,) = faked().choices(prompt="abcd", max_tokens=20, stop_token_ids=[99])
    assert (choice["text"], choice["finish"]) == ("ab", "stop")
    client = faked(FakeEngine(answer=b"a\x03"))
    for more, text, finish in (({}, "a", "stop"), ({"ignore_eos": True}, "a\x03" * 5, "length")):
        (choice,) = client.choices(CHAT, messages=HELLO, max_tokens=10, **more)
        assert (choice["text"], choice["finish"]) == (text, finish)


def test_streamed_logprobs_joined_are_those_of_the_completion(faked):
    client, body = faked(), dict(prompt="aéb", max_tokens=23, logprobs=1, stop=["zz", "bb"], echo=True)
    whole = client.ask(**body).json()["choices"][0]["logprobs"]
    joined = {name: [] for name in whole}
    for chunk in events(client.ask(**body, stream=True)):
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == whole


def test_models_tokens_and_health(faked):
    client = faked()
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["jaxgpt"]["context"] == BLOCK
    assert client.get("/v1/models/tiny").json() == model and client.get("/v1/models/").json()["data"] == [model]
    tokens = client.ask("/tokenize", prompt="né", return_token_strs=True).json()
    assert tokens == {"count": 3, "max_model_len": BLOCK, "tokens": [110, 195, 169], "token_strs": ["n", "�", "�"]}
    echo = client.ask(prompt=[110, 195, 169], echo=True, max_tokens=0).json()  # as the page asks for the text of ids
    assert echo["choices"][0]["text"] == "né"
    assert client.get("/health").json() == {"status": "ok"}


def test_a_model_has_the_names_it_is_given(faked):
    client = faked(model_name=("mine", "gpt-4o"))
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["mine", "gpt-4o"]
    assert client.ask(prompt="a", model="gpt-4o").json()["model"] == "mine"
    refused(client.ask(prompt="a", model="tiny"), "model", status=404)
    refused(client.get("/v1/models/tiny"), "model", status=404)
    anything = faked(any_model=True)
    assert anything.ask(prompt="a", model="gpt-3.5-turbo").json()["model"] == "tiny"
    assert anything.get("/v1/models/gpt-3.5-turbo").json()["id"] == "gpt-3.5-turbo"


def test_each_request_has_an_id_and_one_line_without_its_texts(faked):
    client, lines = faked(), []
    client.ask(prompt="secret", max_tokens=5)
    client.ask(CHAT, messages=HELLO, max_tokens=3, stream=True)
    client.ask(prompt="secret", temperature="secret")
    answer = client.get("/v2/%0Asecond?key=secret", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    for form, fields in zip(["text", "json", "json", "text"], client.requests, strict=True):
        make_log(lines.append, form)(**fields)
    start = "method=POST path=/v1/completions status=200 prompt_tokens=6 completion_tokens=5"
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT\S+ {start} seconds=\d\S* id=[0-9a-f]{{32}}", lines[0])
    chat, bad = json.loads(lines[1]), json.loads(lines[2])
    assert (chat["path"], chat["status"], chat["completion_tokens"]) == (CHAT, 200, 3)
    assert (bad["status"], bad["prompt_tokens"]) == (400, 0)
    assert " method=GET path=/v2/%0Asecond status=404 " in lines[3] and "secret" not in str(lines)
    for unsafe in ("", "x" * 200, "a b"):
        assert client.get("/health", headers={"x-request-id": unsafe}).headers["x-request-id"] not in ("", unsafe)


def test_metrics_count(faked):
    client = faked()
    client.ask(prompt="abc", max_tokens=5)
    client.ask(prompt="abc", max_tokens=-5)
    assert len(client.lines) == 1 and client.lines[0].endswith("'abc' -> 'abcab'")  # the log of prompts
    assert client.sample('http_requests_total{path="/v1/completions",status="200"}') == 1
    assert client.sample('http_requests_total{path="/v1/completions",status="400"}') == 1
    assert (client.sample("prompt_tokens_total"), client.sample("completion_tokens_total")) == (3, 5)
    assert client.sample("slots") == 2 and client.sample("slots_used") == client.sample("waiting") == 0
    assert client.sample("first_token_seconds_count") == client.sample('first_token_seconds_bucket{le="+Inf"}') == 1
    assert {client.sample(f"{name}_total") for name in ("disconnects", "cached_tokens", "compilations")} == {0}
