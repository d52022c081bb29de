"""`metrics.jsonl`: one JSON object a line, written as it happens, readable while the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jaxgpt.paths import write_whole


class MetricsFile:
    """Appends lines; what is not a finite number is null, because JSON has no NaN. path: None: writes nothing."""

    def __init__(self, path: Path | None):
        self._file = (path or Path(os.devnull)).open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        clean = {k: None if isinstance(v, float) and v - v != 0 else v for k, v in values.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()  # tail -f, and nothing lost to a kill

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines in order; a last line that a kill cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def rewind_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Forget the lines after `step`, which a resumed run will write again. Returns those that stay."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
