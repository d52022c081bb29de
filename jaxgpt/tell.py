"""How the command line speaks: results on stdout, everything else on stderr, mistakes in a line or two."""

from __future__ import annotations

import contextlib
import sys
import warnings

from jaxgpt.errors import UserError


@contextlib.contextmanager
def told_in_words():
    def showwarning(message, category, *where, **kwargs):
        if category is UserWarning:  # ours, for the user
            say(f"jaxgpt: {message}")
        else:
            usual(message, category, *where, **kwargs)

    def unraisablehook(unraisable):
        # What TensorStore's threads print, dozens of times, after a write has failed and was told.
        if str(unraisable.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(unraisable)

    usual = warnings.showwarning
    sys.unraisablehook = unraisablehook
    try:
        with warnings.catch_warnings():
            warnings.showwarning = showwarning
            yield
    except UserError as e:
        say(onone_line(f"jaxgpt: {e}"))
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before or after the loop, which saves: there is nothing to save
        say("interrupted")
        raise SystemExit(1) from None
    except BrokenPipeError:  # `jaxgpt sample | head`
        sys.stderr.close()
        raise SystemExit(1) from None
    except OSError as e:  # a full disk, a directory without permission: the place, not the program
        if e.filename is None:
            raise
        say(onone_line(f"jaxgpt: {e.filename}: {e.strerror}"))
        raise SystemExit(2) from None


def onone_line(text: str, most: int = 1000) -> str:
    """What came from files and arguments may hold anything: line ends, control codes, megabytes."""
    text = text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def quote(text: str) -> str:
    """For a shell, on one line: a newline at the end of a prompt is left to the reader."""
    text = text.rstrip("\n")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`") + '"'


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
