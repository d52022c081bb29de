"""Output of the command line: results on stdout, everything else on stderr, errors in a line or two."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from jaxgpt.errors import UserError, reason_of
from jaxgpt.files import render_json

TRACEBACK = "--traceback"  # an option of all commands
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a file cannot be written, named or not


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turn errors of the user and of the system into `SystemExit`, with the reason on stderr."""
    with _standard_streams() as stdout:
        try:
            with _filter_hooks():
                try:
                    yield
                finally:
                    stdout.flush()  # here, where an error can still be reported
        except UserError as e:
            say_error(e)
            raise SystemExit(2) from None
        except KeyboardInterrupt as e:  # `Preempted` says how to go on. Elsewhere there is nothing to save
            say(str(e) or "interrupted")
            raise SystemExit(1) from None
        except OSError as e:  # a full disk, a directory without permission: not a bug of ours
            if stdout.is_broken and isinstance(e, BrokenPipeError):  # `jaxgpt sample | head`
                raise SystemExit(1) from None
            place = "stdout" if stdout.is_broken else e.filename
            if place is None and e.errno not in FULL:
                raise
            say(one_line(f"jaxgpt: {'' if place is None else f'{place}: '}{reason_of(e)}"))
            raise SystemExit(2) from None


@contextlib.contextmanager
def _standard_streams() -> Iterator[_Stream]:
    """Replace the standard streams by streams that a command can rely on, and return stdout.

    A closed stream becomes /dev/null: otherwise the next file opened would get its number, and print() without a
    stderr writes to stdout. stdout writes characters that its encoding does not have as escapes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))
    strict = sys.stdout if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict" else None
    if strict is not None:
        strict.reconfigure(errors="backslashreplace")
    watched: Any = _Stream(sys.stdout, is_fatal=True), _Stream(sys.stderr, is_fatal=False)
    try:
        with contextlib.redirect_stdout(watched[0]), contextlib.redirect_stderr(watched[1]):
            yield watched[0]
    finally:
        for stream in watched:
            try:
                stream.stream.flush()
            except OSError:  # /dev/null takes its place, since Python flushes it as the process ends
                with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), stream.fileno())
        if strict is not None:
            strict.reconfigure(errors="strict")


class _Stream:
    """A text stream that records failed writes: to a full disk, or to a terminal or a reader that is gone."""

    def __init__(self, stream: TextIO, *, is_fatal: bool):
        """is_fatal: raise the error as well. Otherwise the text is lost."""
        self.stream, self.is_fatal, self.is_broken = stream, is_fatal, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, write: Callable[..., Any], *text: str) -> None:
        try:
            write(*text)
        except OSError:
            self.is_broken = True
            if self.is_fatal:
                raise


@contextlib.contextmanager
def _filter_hooks() -> Iterator[None]:
    """Print our warnings as one line, and drop what TensorStore's threads print, dozens of times, after a failed write.

    They print some of it while the process ends, so the hook is kept after a failure, which ends the process.
    """

    def showwarning(message, category, *where, **kwargs):
        if category is UserWarning:  # ours, for the user
            say(f"jaxgpt: {message}")
        else:
            usual_warning(message, category, *where, **kwargs)

    def unraisablehook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            usual_hook(unraisable)

    usual_warning, usual_hook = warnings.showwarning, sys.unraisablehook
    with warnings.catch_warnings():
        warnings.showwarning, sys.unraisablehook = showwarning, unraisablehook
        yield
    sys.unraisablehook = usual_hook


def take_traceback(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without --traceback. If it is one, show where errors arose from now on."""
    if TRACEBACK in arguments:
        os.environ["JAXGPT_TRACEBACK"] = "1"
    return [word for word in arguments if word != TRACEBACK]


def say_error(e: Exception) -> None:
    """Print an error on stderr: one line, after the traceback if JAXGPT_TRACEBACK is set."""
    if os.environ.get("JAXGPT_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(e)
    say(one_line(f"jaxgpt: {e}"))


def one_line(text: str) -> str:
    """Return the text as one printable line: from files and arguments come newlines, control codes, megabytes."""
    text = text if len(text) <= 1000 else f"{text[:500]} ... {text[-500:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def print_result(found: Any, *, as_json: bool) -> None:
    """Print what a command returned, a `Result` or a dataclass with a text. End with status 1 unless it is accepted."""
    if found is None:
        return
    if as_json:
        value = found.to_json() if hasattr(found, "to_json") else dataclasses.asdict(found)
        is_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
        print(render_json(value, ensure_ascii=not is_unicode))
    else:
        print(found)
    if not getattr(found, "accepted", True):
        raise SystemExit(1)


def say(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print a line on stdout."""
    print(text, flush=True)
