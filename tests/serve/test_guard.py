"""Who may ask, how much and how long, and what happens when a client leaves."""

import asyncio
import json
import threading

import pytest

from jaxgpt.serve import server as server_module
from jaxgpt.serve.requests import parse
from tests.serve.conftest import CHAT, JSON, TEXTS, FakeEngine, refused, wait_for

KEY = "0123456789abcdef"


def test_a_key_is_needed_where_there_is_one(faked):
    client = faked(key=KEY)
    for sent in ("Bearer wrong", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer", "é", None):
        headers = {} if sent is None else {"authorization": sent}
        response = client.get("/v1/models", headers={k: v.encode("latin-1") for k, v in headers.items()})
        refused(response, None, status=401)
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/metrics", "/v2"):
        assert client.get(path).status_code == 401
    for sent in (f"Bearer {KEY}", f"bearer   {KEY}"):
        assert client.get("/v1/models", headers={"authorization": sent}).status_code == 200, sent
    assert client.get("/health").status_code == client.get("/").status_code == 200
    assert faked().get("/v1/models", headers={"authorization": "Bearer whatever"}).status_code == 200


def test_a_host_is_known_by_an_address_or_a_name(faked):
    """Any other name, made to point here, would make the server's pages those of another site."""
    client = faked(allowed_host=("Mine", "GPT.Example.org"))
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "192.168.1.5", "mine:80", "LOCALHOST"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
    bad = ["evil.example:8000", "localhost.evil.example", "", "[::1", "[::1]evil", "mine:80.evil", "me@127.0.0.1"]
    for host in [*bad, "127.0.0.1/evil", "[[::1]]", "127.0.0.1:80:80", "[]"]:
        refused(client.get("/v1/models", headers={"host": host}), None, status=403)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "http://[", ""])
def test_pages_of_others_may_not_post(faked, origin):
    client, body = faked(), {"prompt": "a"}
    refused(client.post(TEXTS, json=body, headers={"origin": origin}), None, status=403)
    for kind in ("text/plain", "", "multipart/form-data"):  # what a page may send anywhere without asking
        response = client.post(TEXTS, content=b'{"prompt": "a"}', headers={"content-type": kind})
        refused(response, None, status=415)
    assert client.post(TEXTS, json=body, headers={"origin": "http://127.0.0.1:8000"}).status_code == 200
    spelled = {"content-type": "Application/JSON ; charset=utf-8"}
    assert client.post(TEXTS, content=b'{"prompt": "a"}', headers=spelled).status_code == 200


def test_pages_of_an_allowed_origin_may(faked):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for allowed, others in ((("http://localhost:3000",), 403), (("*",), 200)):
        client = faked(key=KEY, allowed_origin=allowed)
        for origin, status in (("http://localhost:3000", 200), ("http://evil.example", others)):
            headers = {"origin": origin, "authorization": f"Bearer {KEY}"}
            response = client.post(TEXTS, json={"prompt": "a"}, headers=headers)
            assert response.status_code == status
            assert ("access-control-allow-origin" in response.headers) == (status == 200)
            before = client.options(TEXTS, headers=asked | {"origin": origin})  # without the key
            assert before.status_code == (200 if status == 200 else 400)
        refused(client.get("/v1/models", headers={"origin": "http://localhost:3000"}), None, status=401)
    assert "access-control-allow-origin" not in faked().get("/health", headers={"origin": "http://a.example"}).headers


def test_until_everything_is_compiled_the_server_says_so(faked):
    client = faked(key=KEY)
    client.scheduler.status = "starting"
    client.headers["authorization"] = f"bearer {KEY}"
    health = client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "starting"}) and int(health.headers["retry-after"])
    answer = client.ask(prompt="a")
    refused(answer, None, status=503)
    assert answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == "starting"
    refused(client.get("/v1/models", headers={"authorization": ""}), None, status=401)
    client.scheduler.status = "ok"
    assert client.get("/health").status_code == client.ask(prompt="a", max_tokens=1).status_code == 200


def test_large_bodies_are_refused_while_they_are_read(faked):
    client = faked()
    for content in (b" " * 2**20 + b"{}", (b" " * 2**16 for _ in range(17))):
        refused(client.post("/tokenize", content=content, headers=JSON), None, status=413)


def call(app, messages, *, send=None):
    """Send ASGI messages, (seconds to wait before it, message) each, as uvicorn does. Return what came back."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": TEXTS, "raw_path": TEXTS.encode(), "query_string": b""}
    scope |= {"headers": headers, "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1"}
    scope |= {"scheme": "http", "server": ("localhost", 8000), "client": ("localhost", 1), "root_path": "", "state": {}}
    waiting, out = list(messages), []

    async def receive():
        if not waiting:
            await asyncio.Event().wait()
        seconds, message = waiting.pop(0)
        await asyncio.sleep(seconds)
        return message

    async def collect(message):
        out.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send or collect), 20))
    return out


def body(**parameters):
    return {"type": "http.request", "body": json.dumps(parameters).encode(), "more_body": False}


LEFT = {"type": "http.disconnect"}


@pytest.mark.parametrize("path", [TEXTS, CHAT, "/tokenize"])
def test_others_are_answered_while_a_request_is_read(faked, monkeypatch, path):
    client, begun, go_on, done = faked(), threading.Event(), threading.Event(), []

    def slow(kind, raw, *more):
        begun.set()
        done.append(go_on.wait(2))
        return parse(kind, raw, *more)

    monkeypatch.setattr(server_module, "parse", slow)
    thread = threading.Thread(target=lambda: client.ask(path))
    thread.start()
    assert begun.wait(5) and client.get("/health").status_code == 200 and not done
    go_on.set()
    thread.join(5)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_slot_within_one_burst(faked, stream):
    client = faked(FakeEngine(slots=1, delay=0.02))
    call(client.guard, [(0, body(prompt="ab", max_tokens=64, stream=stream)), (0.03, LEFT)])
    wait_for(lambda: not client.scheduler.running)
    assert client.engine.cancelled == [0] and client.engine.steps <= 3
    assert client.sample("disconnects_total") == 1


def test_who_leaves_while_waiting_leaves_the_queue(faked):
    client = faked(FakeEngine(slots=1))
    client.engine.gate.clear()
    first = threading.Thread(target=lambda: client.ask(prompt="a", max_tokens=8))
    first.start()
    wait_for(lambda: client.scheduler.running)
    call(client.guard, [(0, body(prompt="b")), (0.05, LEFT)])
    assert not client.scheduler.waiting
    client.engine.gate.set()
    first.join(10)
    assert client.engine.submitted == 1


def test_a_full_queue_answers_at_once(faked):
    client = faked(FakeEngine(slots=1))
    client.engine.gate.clear()
    threads = [threading.Thread(target=lambda: client.ask(prompt="a", max_tokens=8)) for _ in range(5)]
    for thread in threads:
        thread.start()
    wait_for(lambda: client.sample("waiting") + client.sample("slots_used") == 5)
    response = client.ask(prompt="a")
    client.engine.gate.set()
    for thread in threads:
        thread.join(10)
    refused(response, None, status=429)
    assert int(response.headers["retry-after"]) >= 1
    assert client.ask(prompt="a", max_tokens=1).status_code == 200


def test_a_request_that_takes_too_long_ends(faked):
    client = faked(FakeEngine(slots=1, delay=0.1), timeout=0.15)
    refused(client.ask(prompt="a", max_tokens=64), None, status=504)
    streamed = client.ask(prompt="a", max_tokens=64, stream=True)
    last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert streamed.status_code == 200 and last["error"]["code"] == "timeout"
    wait_for(lambda: client.engine.cancelled == [0, 0])


def test_who_neither_reads_nor_leaves_is_no_error(faked):
    async def stuck(message):
        await asyncio.Event().wait()

    call(faked(timeout=0.1).guard, [(0, body(prompt="a", stream=True))], send=stuck)


def test_a_failure_of_the_engine_is_told_to_all(faked):
    client = faked()
    client.engine.is_broken = True
    refused(client.ask(prompt="a"), None, status=500)
    refused(client.ask(prompt="a"), None, status=503)
    assert client.get("/health").status_code == 503
