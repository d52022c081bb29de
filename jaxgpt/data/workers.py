"""Encode a stream of texts by all cores.

Each core has a process that gets a tokenizer.json and then texts, and answers each with its ids. They are no processes of
`multiprocessing`, whose children run the program that started them once more: a script that has no
`if __name__ == "__main__"` would begin anew in each.
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
IDS, ERROR = b"i", b"e"
HEAD = struct.Struct("<cQ")  # what follows, and how many bytes of it


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_in_order(
    items: Iterable[tuple[Label, str | np.ndarray]], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Label, np.ndarray]]:
    """Each label with the ids of its text, in the order of `items`; what is ids already passes through.

    workers: processes; with less than two of them, or of a tokenizer that is faster than a pipe, it is all done in this one.
    Raises `UserError` as `encode` does.
    """
    if workers < 2 or not isinstance(tokenizer, BPETokenizer):
        for label, text in items:
            yield label, tokenizer.encode(text) if isinstance(text, str) else text
        return
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(_Worker(tokenizer)) for _ in range(workers)]
        # A worker has one text at most, so that neither side ever waits for the other to read.
        busy: deque[tuple[Label, _Worker | np.ndarray]] = deque()

        def oldest() -> tuple[Label, np.ndarray]:
            label, given = busy.popleft()
            if isinstance(given, np.ndarray):
                return label, given
            free.append(given)
            return label, given.ids()

        for label, text in items:
            if isinstance(text, str):
                while not free:
                    yield oldest()
                worker = free.pop()
                worker.give(text)
                busy.append((label, worker))
            else:
                busy.append((label, text))
        while busy:
            yield oldest()


class _Worker:
    def __init__(self, tokenizer: BPETokenizer):
        self._json = tokenizer.to_json()

    def __enter__(self) -> _Worker:
        # One thread each, since there is one of them on each core; and the imports that this process has.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        own = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
        code = "from jaxgpt.data.workers import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | own
        )
        self.give(self._json)
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()

    def give(self, text: str) -> None:
        try:
            _write(self._process.stdin, IDS, text.encode("utf-8", errors="surrogatepass"))
        except BrokenPipeError:
            raise self._ended() from None

    def ids(self) -> np.ndarray:
        found = _read(self._process.stdout)
        if found is None:
            raise self._ended()
        kind, raw = found
        if kind == ERROR:
            raise UserError(raw.decode())
        return np.frombuffer(raw, np.int32)

    def _ended(self) -> UserError:
        status = self._process.wait()
        return UserError(
            f"a process that encodes the text ended with status {status} before its work was done. "
            "Was there too little memory? Try again with less else running."
        )


def _write(stream: IO[bytes] | None, kind: bytes, raw: bytes) -> None:
    assert stream is not None
    stream.write(HEAD.pack(kind, len(raw)))
    stream.write(raw)
    stream.flush()


def _read(stream: IO[bytes] | None) -> tuple[bytes, bytes] | None:
    """(kind, bytes), or None at the end."""
    assert stream is not None
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    kind, length = HEAD.unpack(head)
    raw = stream.read(length)
    return (kind, raw) if len(raw) == length else None


def serve() -> None:
    """What a worker does: answers until there is no more to read. Ctrl-C is for the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = None
    while (found := _read(asked)) is not None:
        text = found[1].decode("utf-8", errors="surrogatepass")
        if tokenizer is None:
            tokenizer = BPETokenizer(text)
            continue
        try:
            _write(answers, IDS, tokenizer.encode(text).tobytes())
        except UserError as e:
            _write(answers, ERROR, str(e).encode())
