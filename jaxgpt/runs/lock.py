"""Lock a run directory for one process, and move an old run aside."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import filelock

from jaxgpt.errors import UserError

LOCK = ".lock"


def lock_run(directory: Path, fresh: bool) -> filelock.BaseFileLock:
    """Make a directory if need be, and lock it until the lock is released or this process ends, however it ends.

    fresh: move what is there aside. Raises `UserError` if another process trains there.
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
        raise UserError(f"cannot write in {directory}: {e.strerror}. Name another place with --run-dir.") from None


def _lock(directory: Path) -> filelock.BaseFileLock:
    _check_links(directory)  # before the first byte is written there
    path = directory / LOCK
    lock = filelock.FileLock(path, timeout=0)
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


def _check_links(directory: Path) -> None:
    """Raise `UserError` for a link in a directory that leads out of it: files would be written or deleted there.

    The directory may come from someone else. It may itself be reached by a link.
    """
    home = os.path.realpath(directory)
    for folder, folders, files in os.walk(directory):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and os.path.commonpath([home, os.path.realpath(path)]) != home:
                raise UserError(
                    f"{path} is a link that leads out of {directory}, to {os.readlink(path)}: nothing is written through "
                    "it. Put there what it leads to, or delete it"
                )
