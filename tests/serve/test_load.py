"""Load against a real server: nothing is lost, compiled or kept.

JAXGPT_TEST_REQUESTS=10000 sends as many mixed requests instead of a few hundred.
"""

import contextlib
import json
import os
import random
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.conftest import wait_for
from tests.serve.live import serve, tiny_run

pytestmark = pytest.mark.slow  # a server, and hundreds of requests

CONTEXT, SLOTS = 2048, 8
REQUESTS = int(os.environ.get("JAXGPT_TEST_REQUESTS", "400"))
BURST = 0.5  # seconds, of which one burst takes a hundredth; the rest is a busy machine's
FLAT = 1.02  # memory at the end beside memory after the first third
LONG = {"prompt": "of", "max_tokens": CONTEXT - 8, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    run = tiny_run(tmp_path_factory.mktemp("load"), block_size=CONTEXT)
    with serve(run, "--slots", str(SLOTS), "--prefix-cache-mb", "8") as server:  # which a few hundred prompts fill
        yield server


def mixed_request(number: int) -> tuple[str, dict]:
    """Return the path and body of a request; every tenth is the same."""
    if number % 10 == 0:
        return "/v1/completions", {"prompt": "that keep", "max_tokens": 24, "seed": 5, "logprobs": 3}
    rng = random.Random(number)
    text = "".join(rng.choices("abcde ñ\n", k=int(rng.choice([3, 30, 300, 900]) * rng.random()) + 1))
    body = {"max_tokens": rng.randint(1, 48), "temperature": rng.choice([0, 0.7, 1.3]), "seed": number}
    body |= rng.choice([{}, {}, {"top_p": rng.random()}, {"top_k": rng.randint(1, 99)}, {"repetition_penalty": 1.2}])
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.3:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": text, "n": rng.choice([1, 1, 1, 3])}


def test_mixed_requests_compile_nothing_lose_nothing_and_keep_memory_flat(server):
    memory, same = [], set()

    def send(number: int) -> None:
        path, body = mixed_request(number)
        status, _, answer = server.send(path, json.dumps(body).encode())
        assert status == 200, answer
        bodies = [answer.decode()]
        if "stream" in body:
            bodies = [line.removeprefix("data: ") for line in bodies[0].splitlines() if line.startswith("data: ")]
            assert bodies.pop() == "[DONE]"
        bodies = [json.loads(found) for found in bodies]
        ends = {choice["finish_reason"] for found in bodies for choice in found["choices"]} - {None}
        tokens = bodies[-1]["usage"]["completion_tokens"]
        assert tokens == body.get("n", 1) * body["max_tokens"] or (tokens < body["max_tokens"] and ends == {"stop"})
        if number % 10 == 0:
            same.add(json.dumps(bodies[0]["choices"]))
        if number % max(REQUESTS // 30, 1) == 0:
            memory.append(server.memory())

    with ThreadPoolExecutor(12) as pool:
        for _ in pool.map(send, range(REQUESTS)):
            pass
    assert len(same) == 1
    assert server.metrics()["jaxgpt_compilations_total"] == 0
    third = len(memory) // 3
    print(f"{REQUESTS} requests; MB of memory: {[round(m / 1e6) for m in memory]}")
    assert max(memory[-third:]) <= FLAT * memory[third]
    wait_for(lambda: server.slots_used() == 0, BURST, 0.02)


def test_who_leaves_frees_the_slot_and_the_place_in_the_queue(server):
    """Of a real engine, in the midst of a burst; and what has waited runs no more."""
    for number in range(20):  # some with a reset instead of a farewell, as a killed process or a lost network may
        with server.open("/v1/completions", **LONG | {"stream": number % 2 == 0}) as connection:
            while number % 4 == 0 and b"data: " not in connection.recv(4096):
                pass
            wait_for(lambda: server.slots_used() == 1, BURST)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", number % 3 == 0, 0))
        wait_for(lambda: server.slots_used() == 0, BURST)
    with contextlib.ExitStack() as stack:
        for _ in range(SLOTS):
            stack.enter_context(server.open("/v1/completions", **LONG))
        wait_for(lambda: server.slots_used() == SLOTS, BURST)
        for connection in [server.open("/v1/completions", **LONG) for _ in range(5)]:
            connection.close()
        wait_for(lambda: server.metrics()["jaxgpt_waiting"] == 0, BURST)
        assert server.slots_used() == SLOTS
    wait_for(lambda: server.slots_used() == 0, BURST)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_end(server, number):
    with serve(server.run, "--slots", "2", "--log-prompts") as small:
        with small.open("/v1/completions", **LONG | {"max_tokens": 200}) as connection:
            received = connection.recv(4096)
            small.process.send_signal(number)
            while (piece := connection.recv(65536)) and b"data: [DONE]" not in received:
                received += piece
        assert b'"finish_reason": "length"' in received and small.process.wait(10) == 0
    assert small.log.read_text().splitlines()[-1] == "stopped"
