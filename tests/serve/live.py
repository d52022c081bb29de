"""`jaxgpt serve` in a process of its own on a free port, for clients of other projects."""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.helpers import byte_run, write_params
from tests.serve.conftest import wait_for

MODEL = "tiny"  # the directory of `byte_run`, and so the name of the model
READY = 120.0  # seconds to load and compile
LIFETIME = 900.0  # seconds, then SIGKILL
STOPPED = 20.0  # seconds between SIGTERM and the end: 10 for the requests that run
JSON = {"Content-Type": "application/json"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A running server."""

    run: Path
    port: int
    process: subprocess.Popen
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, path: str, body: bytes | None = None, timeout: float = 60.0, **headers: str):
        """Send one request, a POST if it has a body. Return (status, headers, body)."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has answered, and reads no further
                connection.request("GET" if body is None else "POST", path, body, headers or JSON)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def open(self, path: str, **body) -> socket.socket:
        """Send a request, and return its connection without reading an answer."""
        raw = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        return connection

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by name, labels included."""
        status, _, text = self.send("/metrics")
        assert status == 200
        return {name: float(value) for name, value in re.findall(r"^([a-z].*) (\S+)$", text.decode(), re.MULTILINE)}

    def slots_used(self) -> int:
        return int(self.metrics()["jaxgpt_slots_used"])

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.send("/health", timeout=5)[0] == 200
        return False

    def memory(self) -> int:
        """Return the resident memory in bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tiny_run(directory: Path, *, block_size: int) -> Path:
    """Return the directory of a run of bytes, whose parameters are random."""
    run = byte_run(directory, block_size=block_size)
    write_params(run.directory, run.params, 0)
    return run.directory


@contextlib.contextmanager
def serve(run: Path, *options: str, lifetime: float = LIFETIME, **env: str) -> Iterator[Server]:
    """Serve a run until the block ends; then the server has exited with status 0 and has printed no traceback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = run.parent / f"serve-{port}.log"
    with log.open("wb") as f:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxgpt", "serve", str(run), "--port", str(port), *options],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **env},
            stdin=subprocess.DEVNULL,
            stdout=f,
            stderr=subprocess.STDOUT,
        )
    guard = threading.Timer(lifetime, process.kill)
    guard.start()
    try:
        server = Server(run=run, port=port, process=process, log=log)
        wait_for(server.is_ready, READY, 0.1)
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOPPED) == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        process.kill()
        process.wait()
        guard.cancel()
