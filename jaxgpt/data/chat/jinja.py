"""Chat templates in Jinja, as Hugging Face's tokenizers have them: programs of somebody else's.

They run in Jinja's sandbox, which bounds what they reach, and in a process of their own, which bounds what they take.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from jaxgpt.errors import UserError

LONGEST_TEXT = 2**24  # characters that a template may write
MEMORY = 2**30  # bytes that its process may take, on Linux; the process itself takes 40 MB
SECONDS = 10  # of a core that it may take for one conversation, but on Windows
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around what {% generation %} holds: noncharacters, which no text has
# A template that asks for today's date would give the same conversations other tokens tomorrow.
TODAY = datetime.date(2025, 1, 1)


def compile_template(source: str) -> Callable[..., str]:
    """Return a function (**variables) -> text, with OPEN and CLOSE around the parts in {% generation %} tags.

    Whitespace, filters and functions are those of transformers' `apply_chat_template`, but `strftime_now` gives TODAY.
    The program reads its variables and nothing else: no attribute whose name begins with _, no file, no import. What it
    writes is bounded, but not the time and the memory that it takes: see `Renderer`.
    Raises `UserError` for what is not a template, here, and where it fails or refuses its variables, there.
    """
    environment = _make_environment()
    try:
        template = environment.from_string(source)
    except Exception as e:  # Jinja's own, and Python's for what it was translated into
        line = getattr(e, "lineno", None)
        raise UserError(
            f"the chat template is no Jinja template{f', line {line}' if line else ''}: {str(e)[:300]}. Repair it, or give another"
        ) from None

    def render(**variables: Any) -> str:
        pieces, length = [], 0
        try:
            for piece in template.generate(**variables):
                pieces.append(piece)
                length += len(piece)
                if length > LONGEST_TEXT:
                    break
        except MemoryError:
            raise UserError("the chat template takes more memory than it may: it cannot be used") from None
        except Exception as e:  # a program of somebody else's: of any kind
            why = str(e)[:300].rstrip(".") or type(e).__name__
            raise UserError(
                f"the chat template refuses it: {why}. Repair the conversation, or give another tokenizer"
            ) from None
        if length > LONGEST_TEXT:
            raise UserError(f"the chat template writes more than {LONGEST_TEXT:,} characters: it cannot be used")
        return "".join(pieces)

    return render


def _make_environment() -> Any:
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("this tokenizer's chat template needs jinja2: python -m pip install 'jaxgpt[chat]'") from None

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return OPEN + caller() + CLOSE

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals = {
        "dict": lambda **items: items,
        "namespace": environment.globals["namespace"],
        "raise_exception": raise_exception,
        "range": environment.globals["range"],
        "strftime_now": TODAY.strftime,
    }
    return environment


class Renderer:
    """A template in a process of its own, called as the function that `compile_template` returns.

    For one text the process may take SECONDS (but on Windows) and MEMORY (on Linux). Where it takes more, that is a
    `UserError`, and the next text is written by it, or, if it had to be ended, by another.
    """

    def __init__(self, source: str):
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._start()

    def __call__(self, **variables: Any) -> str:
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(variables)

    def _start(self) -> None:
        # By this file alone: to import its package takes three times as long.
        code = f"import runpy; runpy.run_path({__file__!r})['serve']({SECONDS}, {MEMORY})"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        weakref.finalize(self, _end, self._process)
        self._ask(self._source)

    def _ask(self, value: Any) -> str:
        """Return the answer of the process. Ends the process if none comes: a late one would be taken for the next."""
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(value).encode() + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                late = process.wait() == -getattr(signal, "SIGPROF", 0)
                why = f"takes more than {SECONDS} s" if late else f"ended its process with status {process.returncode}"
                raise UserError(f"the chat template {why} for one conversation: it cannot be used")
            answer = json.loads(line)
        except BaseException:
            _end(process)
            raise
        self._process = process
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["text"]


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(BrokenPipeError), process:  # which closes its pipes and waits
        process.kill()


def serve(seconds: float, memory: int) -> None:
    """Answer each line of the standard input: the first is a template, the others are variables for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the process that asks
    with contextlib.suppress(ImportError, ValueError, OSError):  # a system without such a limit, or with a lower one
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # In seconds of a core, so that a busy machine does not count. Its signal ends the process. Not on Windows.
    timer = functools.partial(signal.setitimer, signal.ITIMER_PROF) if hasattr(signal, "setitimer") else lambda _: None
    if hasattr(signal, "SIGPROF"):  # which the process that asks may ignore or block, as profilers do
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    render = None
    for line in sys.stdin.buffer:
        timer(seconds)
        try:
            given, text = json.loads(line), ""
            if render is None:
                render = compile_template(given)
            else:
                text = render(**given)
            answer = {"text": text}
        except UserError as e:
            answer = {"error": str(e)}
        timer(0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


renderer = functools.lru_cache(maxsize=8)(Renderer)  # a template's process stays while it is among the last eight
