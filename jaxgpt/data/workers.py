"""Encode a stream of texts by all cores.

Each core has a process that gets a tokenizer.json and then texts, and answers each with its ids. They are plain
subprocesses, because `multiprocessing` imports the caller's `__main__` again: a script without
`if __name__ == "__main__"` would start over in each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import IO, TypeVar

import numpy as np

from jaxgpt.data.bpe import BPETokenizer
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError

Label = TypeVar("Label")
HEAD = struct.Struct("<?Q")  # of a message: whether it is an error, and how many bytes follow


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_in_order(
    items: Iterable[tuple[Label, str | np.ndarray]], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Label, np.ndarray]]:
    """Yield each label with the ids of its text, in the order of `items`; what is ids already passes through.

    workers: processes. With fewer than two, or a tokenizer that is faster than a pipe, all is encoded in this one.
    Raises `UserError` as `encode` does.
    """
    if workers < 2 or not isinstance(tokenizer, BPETokenizer):
        for label, text in items:
            yield label, tokenizer.encode(text) if isinstance(text, str) else text
        return
    with contextlib.ExitStack() as stack:
        free = [_Worker(tokenizer, stack) for _ in range(workers)]
        # A worker has one text at most, so that neither side ever waits for the other to read.
        busy: deque[tuple[Label, _Worker | np.ndarray]] = deque()
        for label, text in items:
            if isinstance(text, str):
                while not free:
                    yield _take_oldest(busy, free)
                free[-1].send(text)
                busy.append((label, free.pop()))
            else:
                busy.append((label, text))
        while busy:
            yield _take_oldest(busy, free)


def _take_oldest(busy: deque[tuple[Label, _Worker | np.ndarray]], free: list[_Worker]) -> tuple[Label, np.ndarray]:
    label, source = busy.popleft()
    if isinstance(source, np.ndarray):
        return label, source
    free.append(source)
    return label, source.receive()


class _Worker:
    """A process that encodes texts."""

    def __init__(self, tokenizer: BPETokenizer, stack: contextlib.ExitStack):
        """stack: ends the process."""
        # One thread each, since there is one of them on each core; and the imports that this process has.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        own = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
        code = "from jaxgpt.data.workers import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | own
        )
        stack.callback(self._process.communicate)
        stack.callback(self._process.kill)
        self.send(tokenizer.to_json())

    def send(self, text: str) -> None:
        try:
            _write(self._process.stdin, text.encode("utf-8", errors="surrogatepass"))
        except BrokenPipeError:
            raise self._explain_end() from None

    def receive(self) -> np.ndarray:
        answer = _read(self._process.stdout)
        if answer is None:
            raise self._explain_end()
        is_error, raw = answer
        if is_error:
            raise UserError(raw.decode())
        return np.frombuffer(raw, np.int32)

    def _explain_end(self) -> UserError:
        status = self._process.wait()
        return UserError(
            f"a process that encodes the text ended with status {status} before its work was done. "
            "Was there too little memory? Try again with less else running."
        )


def _write(stream: IO[bytes] | None, raw: bytes, *, is_error: bool = False) -> None:
    assert stream is not None
    stream.write(HEAD.pack(is_error, len(raw)) + raw)
    stream.flush()


def _read(stream: IO[bytes] | None) -> tuple[bool, bytes] | None:
    """Return (whether it is an error, its bytes) of the next message, or None at the end."""
    assert stream is not None
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    is_error, length = HEAD.unpack(head)
    raw = stream.read(length)
    return (is_error, raw) if len(raw) == length else None


def serve() -> None:
    """Encode texts from the standard input until it ends. Ctrl-C is for the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = None
    while (message := _read(sys.stdin.buffer)) is not None:
        text = message[1].decode("utf-8", errors="surrogatepass")
        if tokenizer is None:
            tokenizer = BPETokenizer(text)
            continue
        try:
            _write(sys.stdout.buffer, tokenizer.encode(text).tobytes())
        except UserError as e:
            _write(sys.stdout.buffer, str(e).encode(), is_error=True)
