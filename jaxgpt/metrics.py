"""`metrics.jsonl`: one JSON object a line, written as it happens, readable while the run goes on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from jaxgpt.errors import SaveFailed
from jaxgpt.paths import write_whole


class MetricsFile:
    """Appends lines; what is not a finite number is null, because JSON has no NaN. path: None: writes nothing."""

    def __init__(self, path: Path | None):
        self._path = path or Path(os.devnull)
        self._file = self._path.open("ab", buffering=0)  # for tail -f, and nothing lost to a kill

    def write(self, **values: Any) -> None:
        """Raises `SaveFailed`."""
        clean = {k: None if isinstance(v, float) and v - v != 0 else v for k, v in values.items()}
        line = (json.dumps(clean) + "\n").encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            raise SaveFailed(f"{self._path} cannot be written: {e.strerror}") from None

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines in order, without those that a kill or a full disk cut short."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            found.append(values)
    return found


def rewind_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Forget the lines after `step`, which a resumed run will write again. Returns those that stay."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
