"""Lock a run directory for one process, and move an old run aside."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import filelock

from jaxgpt.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"
PATIENCE = 0.2  # seconds: `is_training` holds the lock for an instant


def lock_run(directory: Path, fresh: bool) -> filelock.BaseFileLock:
    """Create a directory if needed, and lock it until the lock is released or this process ends, even by SIGKILL.

    fresh: move an existing directory aside. Raises `UserError` if another process trains there.
    """
    try:
        if directory.exists() and fresh:
            lock = _lock(directory)
            number = 1
            while (aside := directory.with_name(f"{directory.name}.old-{number}")).exists():
                number += 1
            directory.rename(aside)
            lock.release()
        directory.mkdir(parents=True, exist_ok=True)
        return _lock(directory)
    except OSError as e:
        raise UserError(f"cannot write in {directory}: {e.strerror}. Name another directory with --run-dir.") from None


def is_training(directory: Path) -> bool:
    """Return whether a process trains in a directory, which may be read-only. Always False on Windows."""
    if fcntl is None:
        return False
    try:
        handle = os.open(directory / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # never trained here
        return False
    with contextlib.closing(os.fdopen(handle, "rb")):
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False  # closing has released it


def _lock(directory: Path) -> filelock.BaseFileLock:
    check_links(directory)  # before anything is written there
    path = directory / LOCK
    lock = filelock.FileLock(path, timeout=PATIENCE)
    try:
        lock.acquire()
    except filelock.Timeout:
        who = path.read_text(encoding="utf-8", errors="replace").strip()
        raise UserError(
            f"{directory} is being trained by another process ({who or 'unknown'}): "
            "wait for it, stop it, or name another --run-dir"
        ) from None
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    return lock


def check_links(directory: Path) -> None:
    """Raise `UserError` if a link in a directory leads out of it, where training would write or delete files.

    The directory may come from someone else, and its own path may contain links.
    """
    home = os.path.realpath(directory)
    for folder, folders, files in os.walk(directory):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and os.path.commonpath([home, os.path.realpath(path)]) != home:
                raise UserError(
                    f"{path} is a link that leads out of {directory}, to {os.readlink(path)}: jaxgpt does not "
                    "write through it. Replace it with a copy of its target, or delete it"
                )
