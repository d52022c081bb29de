"""Servers in the process, over an engine that repeats the prompt and over one of a model."""

import contextlib
import json
import threading
import time

import pytest
import uvicorn
from starlette.testclient import TestClient

from jaxgpt.sample.engine import Piece, Request
from jaxgpt.sample.score import PromptScores
from jaxgpt.serve import ServeOptions
from jaxgpt.serve.requests import Served
from jaxgpt.serve.scheduler import Scheduler
from jaxgpt.serve.server import guard, make_app, make_log, make_server
from tests import helpers

BLOCK = 1200  # bytes, which hold the description of tools
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]
TEXTS, CHAT = "/v1/completions", "/v1/chat/completions"


class FakeEngine:
    def __init__(self, slots: int = 2, delay: float = 0.0, endless: bool = False, answer: bytes = b""):
        """Start with free slots.

        endless: no request reaches its length, so that only leaving frees a slot. answer: repeated for the prompt.
        """
        self.slots, self.delay, self.endless, self.answer = slots, delay, endless, answer
        self.running: dict[int, list] = {}  # slot: [request, tokens so far]
        self.gate = threading.Event()  # closed, it holds every step
        self.gate.set()
        self.cancelled, self.submitted, self.steps = [], 0, 0
        self.is_broken, self.cached_tokens = False, [0] * slots

    @property
    def num_free(self):
        return self.slots - len(self.running)

    def submit(self, request: Request) -> int:
        slot = next(n for n in range(self.slots) if n not in self.running)
        self.running[slot] = [request, 0]
        self.submitted += 1
        return slot

    def step(self, burst: int = 8) -> list[Piece]:
        assert self.gate.wait(30)
        time.sleep(self.delay)
        self.steps += 1
        if self.is_broken and self.steps > 1:
            raise RuntimeError("out of memory")
        pieces = []
        for slot, (request, done) in list(self.running.items()):
            count = burst if self.endless else min(burst, request.max_new_tokens - done)
            source = self.answer or request.prompt
            ids = [source[n % len(source)] for n in range(done, done + count)]
            stop = next((n for n, i in enumerate(ids) if i in request.stop_tokens), None)
            ids, finish = (ids, None) if stop is None else (ids[:stop], "stop")
            self.running[slot][1] += len(ids)
            if finish is None and done + count == request.max_new_tokens and not self.endless:
                finish = "length"
            if finish:
                del self.running[slot]
            wanted = request.top_logprobs
            logprobs = [] if wanted is None else [-0.5] * len(ids)
            top = [] if wanted is None else [[(i, -0.5), (0, -1.5)][:wanted] for i in ids]
            pieces.append(Piece(slot, ids, logprobs, top, finish))
        return pieces

    def cancel(self, slot: int) -> None:
        self.cancelled.append(slot)
        del self.running[slot]


def fake_score(ids) -> PromptScores:
    return PromptScores([float("nan"), *[-1.0] * (len(ids) - 1)], [[], *[[(i, -1.0), (0, -2.0)] for i in ids[1:]]])


@pytest.fixture(scope="session")
def byte_run(tmp_path_factory):
    """A run with random parameters that reads and writes bytes, so that characters are split."""
    return helpers.byte_run(tmp_path_factory.mktemp("serve"), block_size=BLOCK).for_decoding()


class Client(TestClient):
    """A client with the name that the server answers to."""

    def __init__(self, app, **options):
        super().__init__(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False, **options)

    def ask(self, path=TEXTS, **body):
        return self.post(path, json=body)

    def choices(self, path=TEXTS, **body):
        """The text, log-probabilities and end of each choice, of a whole response or a stream."""
        response = self.ask(path, **body)
        assert response.status_code == 200, response.text
        return join_choices(read_events(response.text) if body.get("stream") else [response.json()])

    def sample(self, name):
        """The value of a metric."""
        lines = self.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"jaxgpt_{name} ")).rpartition(" ")[2])


@pytest.fixture
def faked(byte_run):
    """A function that starts a server over a fake engine: faked(engine, key=...) -> client, whose `engine` it is."""
    with contextlib.ExitStack() as stack:

        def start(engine=None, *, run=byte_run, key=None, **options):
            engine, lines, requests = engine or FakeEngine(), [], []
            options = ServeOptions(slots=engine.slots, **options)
            served = Served(run, options)
            scheduler = Scheduler(engine, fake_score, queue=served.queue, log=lambda line: None)
            app = make_app(served, scheduler, lines.append)
            app = guard(app, scheduler, options, key=key, log=lambda **fields: requests.append(fields))
            client = stack.enter_context(Client(app))
            client.requests, client.lines = requests, lines  # what the log has of each, and of prompts
            client.guard, client.engine, client.scheduler = app, engine, scheduler
            return client

        yield start


@pytest.fixture(scope="session")
def real(byte_run):
    """A client of a server with an engine, whose application is in `guard`."""
    options = ServeOptions(slots=4, prefix_cache_mb=10, timeout=60.0, reproducible=True)
    app, compile_all = make_server(byte_run, options, log=make_log(lambda line: None))
    compile_all(lambda program: None)
    with Client(app) as client:
        client.guard = app
        yield client


@contextlib.contextmanager
def listening(app):
    """Serve an application on a port, which a client has begun already. Yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.force_exit = server.should_exit = True
        thread.join(20)


def refused(response, param, status=400):
    """Assert that a response says in OpenAI's form what is wrong."""
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param, error
    assert 0 < len(error["message"]) < 1000 and "Traceback" not in error["message"], error


def join_choices(parts):
    """Return text, log-probabilities and end of each choice, from one whole response or from the events of a stream.

    The text has the arguments of calls.
    """
    found = {}
    for choice in [choice for part in parts for choice in part["choices"]]:
        held = found.setdefault(choice["index"], {"text": "", "logprobs": [], "finish": None})
        said, logprobs = choice.get("message") or choice.get("delta") or choice, choice["logprobs"] or {}
        held["text"] += said.get("content") or said.get("text") or ""
        held["text"] += "".join(call["function"]["arguments"] for call in said.get("tool_calls", ()))
        tokens = [token["logprob"] for token in logprobs.get("content", ())]
        held["logprobs"] += logprobs.get("token_logprobs") or tokens
        assert held["finish"] is None, "a choice goes on after its end"
        held["finish"] = choice["finish_reason"]
    assert sorted(found) == list(range(len(found))) and all(choice["finish"] for choice in found.values())
    return [found[index] for index in sorted(found)]


def read_events(answer):
    """Return the events of a stream that has ended well, from its text."""
    lines = answer.strip().split("\n\n")
    assert lines.pop() == "data: [DONE]" and all(line.startswith("data: ") for line in lines), answer[-300:]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def wait_for(condition, seconds=20.0, every=0.001):
    """Wait until the condition holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s"
        time.sleep(every)
