"""Chat templates in Jinja, as distributed with Hugging Face's tokenizers: untrusted programs.

They run in Jinja's sandbox, which limits what they can access, and in a separate process, which limits the time and
memory that they use.
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
MEMORY = 2**30  # bytes that its process may use, on Linux; 40 MB without a template
SECONDS = 10  # of CPU time that it may use for one conversation, except on Windows
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around the output of {% generation %}: noncharacters, which no text contains
# A fixed date for templates: with the current one, the same conversations would give other tokens tomorrow.
TODAY = datetime.date(2025, 1, 1)


def compile_template(source: str) -> Callable[..., str]:
    """Return a function from keyword variables to text, with OPEN and CLOSE around {% generation %} blocks.

    Whitespace, filters and functions are those of transformers' `apply_chat_template`, except that `strftime_now`
    formats TODAY. The template can read only its variables: no attribute that begins with `_`, no file, no import. The
    length of its output is limited here; its time and memory are limited by `Renderer`.
    Raises `UserError` if the source is not a template; the function raises it if the template fails.
    """
    environment = _make_environment()
    try:
        template = environment.from_string(source)
    except Exception as e:  # from Jinja, or from Python for the code that Jinja generates
        line = getattr(e, "lineno", None)
        raise UserError(
            f"the chat template is not a Jinja template{f', line {line}' if line else ''}: {str(e)[:300]}. Repair it, or give another"
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
            raise UserError("the chat template exceeds its memory limit: it cannot be used") from None
        except Exception as e:  # an untrusted program may raise anything
            why = str(e)[:300].rstrip(".") or type(e).__name__
            raise UserError(
                f"the chat template rejects the conversation: {why}. Repair it, or give another tokenizer"
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
    """A template in a process of its own, called like the function that `compile_template` returns.

    For one text the process may use SECONDS of CPU time (except on Windows) and MEMORY bytes (on Linux). Exceeding a
    limit raises `UserError`; if that ended the process, the next call starts another.
    """

    def __init__(self, source: str):
        """Start the process and compile the template. Raises `UserError` if the source is not a template."""
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._start()

    def __call__(self, **variables: Any) -> str:
        """Render one text. Raises `UserError` if the template fails or exceeds a limit."""
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(variables)

    def _start(self) -> None:
        # Run only this file: importing its package takes three times as long.
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
        """Return the answer of the process. End the process if none comes, lest a late one be taken for the next."""
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
    with contextlib.suppress(BrokenPipeError), process:  # `with` closes the pipes and waits
        process.kill()


def serve(seconds: float, memory: int) -> None:
    """Answer each line of standard input, in JSON: the first is a template, the others are its variables."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    with contextlib.suppress(ImportError, ValueError, OSError):  # the system has no such limit, or a lower one
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # CPU time, so that a busy machine makes no difference. The timer's signal ends the process. Not on Windows.
    timer = functools.partial(signal.setitimer, signal.ITIMER_PROF) if hasattr(signal, "setitimer") else lambda _: None
    if hasattr(signal, "SIGPROF"):  # the parent may ignore or block it, as profilers do
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


renderer = functools.lru_cache(maxsize=8)(Renderer)  # keeps the processes of the eight templates used last
