"""Exceptions for faults of the input or the disk, not of the code."""

import shlex
from pathlib import Path


class UserError(ValueError):
    """A mistake the user can correct. The message says what was got, what is needed and what to do.

    The command line prints it without a traceback and exits with status 2. From Python it is a `ValueError`.
    """


class CheckpointSaveError(RuntimeError):
    """A checkpoint, or the metrics with it, could not be written. Earlier ones are unchanged."""


class RaisedOnAllProcesses(BaseException):
    """An error that every process raises at the same step, so that none of them leaves another waiting."""


class Preempted(RaisedOnAllProcesses, KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended the run, after a save. The message says how to resume."""


class Diverged(RaisedOnAllProcesses, RuntimeError):
    """Too many steps in a row were skipped, or the last validation loss is not finite. The last checkpoint is good."""


def first_line(e: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


def reason_of(e: Exception) -> str:
    """Return a short reason why a file could not be read or written: TensorStore's messages are pages long."""
    for known in ("No space left on device", "Read-only file system", "Permission denied", "Disk quota exceeded"):
        if known.lower() in str(e).lower():
            return known
    return getattr(e, "strerror", None) or first_line(e)[:200]  # libraries raise an OSError of one argument, without it


def shell_line(*words: str | Path | int) -> str:
    """Return words as a command line, or a part of one, quoted for a shell."""
    return shlex.join(map(str, words))
