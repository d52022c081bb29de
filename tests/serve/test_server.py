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

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HALF = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def started(faked, monkeypatch):
    """A function that starts a server over a fake engine on a port: started(engine) -> (port, uvicorn's server, stop)."""
    monkeypatch.setattr(server_module, "GRACE", 1.0)
    with contextlib.ExitStack() as stack:

        def start(engine=None):
            listener = bind("127.0.0.1", 0)
            server = make_uvicorn(faked(engine).guard)
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            wait_for(lambda: server.started)

            def stop():
                server.should_exit = True
                thread.join(20)
                assert not thread.is_alive()

            stack.callback(stop)
            return listener.getsockname()[1], server, stop

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
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_what_is_not_http_is_refused(started):
    port, _, _ = started()
    broken = [b"\x00" * 100 + b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"A" * 100_000]
    broken += [HALF + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}"]
    broken += [b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", HALF + b"Content-Length: -1\r\n\r\n"]
    for raw in [*broken, HALF + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", HALF + b"X: " + b"a" * 100_000]:
        assert answer_to(port, raw).startswith(b"HTTP/1.1 4"), raw[:24]
        assert answer_to(port, HEALTH)[9:12] == b"200"


def test_stopping_lets_streams_end(started):
    port, server, _ = started(FakeEngine(slots=1, delay=0.02))
    with stream_from(port, max_tokens=40) as response:
        server.should_exit = True
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_stopping_does_not_wait_for_ever(started):
    port, _, stop = started(FakeEngine(slots=1, delay=0.2))
    with stream_from(port, max_tokens=64) as response:
        start = time.monotonic()
        stop()
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
        lines.append(answer_to(listener.getsockname()[1], HEALTH)[9:12].decode())
        if number is not None:
            handlers[number](number, None)
            pytest.fail("the compiler goes on")
        threading.Timer(0.5, handlers[signal.SIGINT], [signal.SIGINT, None]).start()

    with pytest.raises(SystemExit) if number else contextlib.nullcontext():
        serve(client.guard, compile_all, listener, lines.append)
    url = lines[0].split()[0]
    assert lines[1:] == ["compiling a program", "503", *([url] if number is None else []), "stopped"]


def test_an_address_that_is_taken_is_named():
    with bind("127.0.0.1", 0) as taken:
        for host in ("127.0.0.1", "no.such.host.invalid"):
            with pytest.raises(jaxgpt.UserError, match=host):
                bind(host, taken.getsockname()[1])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--host", "0.0.0.0"], "JAXGPT_API_KEY"),
        (["--host", "example.org"], "JAXGPT_API_KEY"),
        (["--api-key-file", "key"], "16"),
        (["--api-key-file", "none"], "none"),
        (["--port", "70000"], "65,535"),
        ([], "uvicorn"),
    ],
)
def test_the_command_refuses_what_is_unsafe_or_not_installed(options, word, tmp_path, monkeypatch, capsys, byte_run):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name != "uvicorn" or None)
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(SystemExit) as stopped:
        main(["serve", str(byte_run.directory), *options])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and word in error and len(error.splitlines()) == 1, error
