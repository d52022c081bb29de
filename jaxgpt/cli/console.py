"""Output of the command line: results on stdout, everything else on stderr, errors in a line or two."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
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
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, None)  # NumPy gives none


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turn errors of the user and of the system into `SystemExit`, with the reason on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character that its encoding does not have is an escape
    try:
        with contextlib.redirect_stderr(_Stderr(sys.stderr)), warnings.catch_warnings():
            warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
            yield
            sys.stdout.flush()  # here, where an error can still be reported
    except UserError as e:
        say_error(e)
        raise SystemExit(2) from None
    except KeyboardInterrupt as e:  # `Preempted` says how to go on. Elsewhere there is nothing to save
        say(str(e) or "interrupted")
        raise SystemExit(1) from None
    except BrokenPipeError:  # `jaxgpt sample | head`
        _discard_stdout()
        raise SystemExit(1) from None
    except OSError as e:  # a full disk, a directory without permission: not a bug of ours
        if e.filename is None:
            if e.errno not in FULL:
                raise
            _discard_stdout()
        say(one_line(f"jaxgpt: {'' if e.filename is None else f'{e.filename}: '}{reason_of(e)}"))
        raise SystemExit(2) from None


class _Stderr:
    """Standard error, whose reader may be gone or its terminal closed: then what is said is lost, and a run goes on."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _discard_stdout() -> None:
    """Let /dev/null take the place of stdout, which Python flushes as the process ends."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _show_warning(usual: Callable[..., None], message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a warning of ours, for the user, as one line."""
    if category is UserWarning:
        say(f"jaxgpt: {message}")
    else:
        usual(message, category, *where, **more)


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
