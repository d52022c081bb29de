"""Read metrics.jsonl while a run writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxgpt.files import is_there, open_file
from jaxgpt.runs.metrics import parse_line


def iter_new_lines(path: Path, is_live: Callable[[], bool], pause: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield the undamaged lines in order, and then those that are written later.

    A last line without its end is read when it is complete. When a run resumes, its log is replaced by one with fewer
    lines: the new file is read from its beginning, so lines may be yielded again.

    Args:
        path: of metrics.jsonl, which need not exist yet.
        is_live: asked before each look at the file; after False, that look is the last.
        pause: called between two looks.
    """
    file, at = None, 0
    while True:
        is_last = not is_live()
        if is_there(path, "It holds the run's losses."):
            with open_file(path) as f:
                found = os.fstat(f.fileno())
                if found.st_ino != file or found.st_size < at:
                    file, at = found.st_ino, 0
                f.seek(at)
                for raw in f:
                    if not raw.endswith(b"\n"):
                        break
                    at += len(raw)
                    if (line := parse_line(raw)) is not None:
                        yield line
        if is_last:
            return
        pause()
