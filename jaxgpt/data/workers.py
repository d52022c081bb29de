"""Encode a stream of texts on all cores.

One process per core receives a tokenizer.json and then texts, and returns the ids of each. They are plain
subprocesses, because those of `multiprocessing` import the caller's `__main__`: a script without
`if __name__ == "__main__"` would run again in each.
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
HEAD = struct.Struct("<?Q")  # header of a message: whether it is an error, number of bytes that follow


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_in_order(
    items: Iterable[tuple[Label, str | np.ndarray]], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Label, np.ndarray]]:
    """Yield (label, ids) in the order of `items`; values that are already ids pass through.

    `workers` is the number of processes. This process encodes everything if they are fewer than two or the tokenizer is
    not BPE, as the others are faster than a pipe. Raises `UserError` as `encode` does.
    """
    if workers < 2 or not isinstance(tokenizer, BPETokenizer):
        for label, text in items:
            yield label, tokenizer.encode(text) if isinstance(text, str) else text
        return
    with contextlib.ExitStack() as stack:
        free = [_Worker(tokenizer, stack) for _ in range(workers)]
        # A worker has at most one text: with more, both sides could wait for the other to read.
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
        """Start the process; closing `stack` ends it."""
        # One thread each, because there is one worker per core. The same module search path as this process.
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
    """Return (is_error, bytes) of the next message, or None at the end of the stream."""
    assert stream is not None
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    is_error, length = HEAD.unpack(head)
    raw = stream.read(length)
    return (is_error, raw) if len(raw) == length else None


def serve() -> None:
    """Encode texts from standard input until it ends. Ctrl-C is ignored: the parent process handles it."""
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
