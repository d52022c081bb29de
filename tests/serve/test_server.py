"""Sockets, signals and the command."""

import contextlib
import http.client
import importlib.util
import json
import signal
import socket
import threading
import time

import pytest

import jaxgpt
from jaxgpt.__main__ import main
from jaxgpt.serve import server as server_module
from jaxgpt.serve.server import bind, make_uvicorn, serve
from tests.serve.conftest import JSON, FakeEngine, wait_for


@pytest.fixture
def listening(faked, monkeypatch):
    """A function that starts a server over a fake engine on a port: listening(engine) -> (port, client)."""
    for name in ("BODY_TIMEOUT", "STALLED"):
        monkeypatch.setattr(server_module, name, 0.3)
    monkeypatch.setattr(server_module, "GRACE", 1.0)
    with contextlib.ExitStack() as stack:

        def start(engine=None):
            client, listener = faked(engine), bind("127.0.0.1", 0)
            server = make_uvicorn(client.guard)
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            wait_for(lambda: server.started)

            def stop():
                server.should_exit = True
                thread.join(20)
                assert not thread.is_alive()

            stack.callback(stop)
            client.server, client.stop = server, stop
            return listener.getsockname()[1], client

        yield start


@contextlib.contextmanager
def stream_from(port, **parameters):
    """The response to a request for a stream, with its head read."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        body = json.dumps({"prompt": "a", "stream": True} | parameters)
        connection.request("POST", "/v1/completions", body, JSON)
        with contextlib.closing(connection.getresponse()) as response:
            yield response


def answer_to(port, raw):
    """What comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(raw)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


def request(path, *headers, **body):
    """A POST request as bytes."""
    body = json.dumps(body)
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode()


HALF = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOW = [
    (b"", b""),
    *((first, raw) for first in (b"", HEALTH) for raw in (b"GET", HALF, HALF + b"Content-Length: 999\r\n\r\n{")),
]


def test_slow_clients_are_closed_and_hold_up_nobody(listening):
    """Those that send nothing, part of a head, or a body byte by byte, at first or after a request."""
    port, _ = listening()
    with contextlib.ExitStack() as stack:
        connections = []
        for first, raw in SLOW:
            connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)))
            connections[-1].sendall(first)
            assert not first or connections[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
            connections[-1].sendall(raw)
        done = threading.Event()

        def dribble():
            while not done.wait(0.1):
                with contextlib.suppress(OSError):
                    connections[-1].send(b" ")

        threading.Thread(target=dribble, daemon=True).start()
        start = time.monotonic()
        assert answer_to(port, request("/tokenize", "Connection: close", prompt="a"))[9:12] == b"200"
        for slow, connection in zip(SLOW, connections, strict=True):
            # To a client that still sends, a reset may come before the answer.
            with contextlib.suppress(ConnectionResetError) if slow == SLOW[-1] else contextlib.nullcontext():
                assert b"HTTP/1.1 408 " in b"".join(iter(lambda c=connection: c.recv(65536), b"")), slow
        assert 0.2 < time.monotonic() - start < 3
        done.set()


@pytest.mark.parametrize(
    "raw",
    [
        *(b"\x00" * 100 + b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"A" * 100_000),
        request("/tokenize", "Transfer-Encoding: chunked", prompt="a"),
        *(b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", HALF + b"Content-Length: -1\r\n\r\n"),
        *(HALF + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", HALF + b"X: " + b"a" * 100_000),
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_what_is_not_http_is_refused(listening, raw):
    port, _ = listening()
    assert answer_to(port, raw).startswith(b"HTTP/1.1 4")
    assert answer_to(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[9:12] == b"200"


def test_who_does_not_read_is_disconnected(listening):
    """Also one whose last bytes wait in a connection that is closing."""
    port, client = listening()
    with contextlib.ExitStack() as stack:
        page = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
        for last in (b"", b"", page + b"Connection: close\r\n\r\n"):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            connection.sendall((page + b"\r\n") * 150 + last)
        wait_for(lambda: len(client.server.server_state.connections) == 3)
        wait_for(lambda: not client.server.server_state.connections and not client.server.server_state.tasks)


def test_who_reads_slowly_gets_everything(listening):
    """It takes longer than the deadline, which is for a part of it."""
    port, _ = listening()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request("/tokenize", "Connection: close", prompt="a" * 250_000))
        connection.settimeout(5)
        start, found = time.monotonic(), b""
        while part := connection.recv(2**14):
            found += part
            time.sleep(0.01)
    assert json.loads(found.partition(b"\r\n\r\n")[2])["count"] == 250_000
    assert time.monotonic() - start > server_module.STALLED


def test_stopping_lets_streams_end(listening):
    port, client = listening(FakeEngine(slots=1, delay=0.02))
    with stream_from(port, max_tokens=40) as response:
        client.server.should_exit = True
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_stopping_does_not_wait_for_ever(listening):
    port, client = listening(FakeEngine(slots=1, delay=0.2))
    with stream_from(port, max_tokens=64) as response:
        start = time.monotonic()
        client.stop()
        assert time.monotonic() - start < 5
        assert json.loads(response.read().split(b"data: ")[-1])["error"]["code"] == "stopping"


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_the_port_is_open_while_programs_are_compiled(faked, monkeypatch, number):
    """A signal ends that."""
    client, listener, handlers, lines = faked(), bind("127.0.0.1", 0), {}, []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)

    def compile_all(begin):
        client.scheduler.status = "starting"
        begin("a program")
        answer = answer_to(listener.getsockname()[1], HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        lines.append(answer[9:12].decode())
        if number is not None:
            handlers[number](number, None)
            pytest.fail("the compiler goes on")
        threading.Timer(0.5, handlers[signal.SIGINT], [signal.SIGINT, None]).start()

    with pytest.raises(SystemExit) if number else contextlib.nullcontext():
        serve(client.guard, compile_all, listener, lines.append)
    url = f"http://127.0.0.1:{lines[0].split()[0].rpartition(':')[2]}"
    ready = [url] if number is None else []
    assert lines == [f"{url} answers 503 until everything is compiled", "compiling a program", "503", *ready, "stopped"]


def test_an_address_that_is_taken_is_named():
    with bind("127.0.0.1", 0) as taken:
        for host in ("127.0.0.1", "no.such.host.invalid"):
            with pytest.raises(jaxgpt.UserError, match=f"cannot listen on {host}"):
                bind(host, taken.getsockname()[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "JAXGPT_API_KEY"),
        (["--host", "example.org"], "JAXGPT_API_KEY"),
        (["--api-key-file", "key"], "16"),
        (["--api-key-file", "none"], "cannot read"),
        (["--port", "70000"], "65,535"),
        (["--slots", "0"], "at least 1"),
    ],
)
def test_the_command_refuses_what_is_unsafe(options, words, tmp_path, monkeypatch, capsys, byte_run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(SystemExit) as stopped:
        main(["serve", str(byte_run.directory), *options])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and words in error and len(error.splitlines()) == 1, error


def test_the_command_names_the_extra_it_needs(monkeypatch, capsys, byte_run):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else found(name, *rest)
    )
    with pytest.raises(SystemExit) as stopped:
        main(["serve", str(byte_run.directory)])
    assert stopped.value.code == 2 and "needs uvicorn: python -m pip install 'jaxgpt[serve]'" in capsys.readouterr().err
