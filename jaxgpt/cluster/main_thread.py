"""Detect, from the watchdog's thread, whether the main thread is compiling or waiting in a debugger."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

COMPILING = "/jax/core/compile/"  # prefix of the events that JAX records for each part of a compilation
DEBUGGERS = ("bdb", "pdb")  # modules of the standard library


class MainThread:
    """The thread that trains: the one that creates this object."""

    def __init__(self) -> None:
        """Refer to the current thread."""
        self._ident = threading.get_ident()
        self._parts = 0  # of compilations in progress, which may be nested

    def is_compiling(self) -> bool:
        """Return whether the thread is compiling."""
        return self._parts > 0

    def is_debugged(self) -> bool:
        """Return whether the thread is in Python's debugger, waiting for input."""
        frame = sys._current_frames().get(self._ident)
        while frame is not None:
            if frame.f_globals.get("__name__") in DEBUGGERS:
                return True
            frame = frame.f_back
        return False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Track compilations inside, by the events that JAX records when each part of one begins and ends."""

        def begins(event: str, *_: Any, **__: Any) -> None:
            if event.startswith(COMPILING) and threading.get_ident() == self._ident:
                self._parts += 1

        def ends(event: str, *_: Any, **__: Any) -> None:
            if event.startswith(COMPILING) and threading.get_ident() == self._ident:
                self._parts = max(0, self._parts - 1)  # it may have begun before the listener was registered

        jax.monitoring.register_scalar_listener(begins)
        jax.monitoring.register_event_time_span_listener(ends)
        try:
            yield
        finally:
            jax.monitoring.unregister_scalar_listener(begins)
            jax.monitoring.unregister_event_time_span_listener(ends)
