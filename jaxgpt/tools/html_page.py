"""Render a self-contained page: one HTML file with its style, program and data, which loads nothing from a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from importlib import resources
from typing import Any

import numpy as np

DTYPES = {"u1": np.uint8, "i4": np.int32, "f4": np.float32}  # as page.js reads them, little endian


class Arrays:
    """The arrays of a page, concatenated; the page's data refer to each."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def put(self, array: Any) -> dict[str, Any]:
        """Add an array of uint8, int32 or float32; return its reference."""
        array = np.ascontiguousarray(array)
        (kind,) = (name for name, dtype in DTYPES.items() if dtype == array.dtype)
        raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
        raw += bytes(-len(raw) % 4)  # a typed array begins at a multiple of its own size
        reference = {"at": self._size, "type": kind, "shape": list(array.shape)}
        self._parts.append(raw)
        self._size += len(raw)
        return reference

    def encode(self) -> str:
        """Return all arrays, compressed and in base64."""
        return base64.b64encode(zlib.compress(b"".join(self._parts), 9)).decode()


def render_html(name: str, title: str, data: dict[str, Any], arrays: Arrays) -> str:
    """Return the page on which `NAME.js` draws `data`.

    The data may hold any text of a user's, which is never parsed as HTML: they are JSON without a "<", which the program
    shows as text alone; and the page's policy allows no script but that program, by its hash, and no request.
    """
    style, program = read_asset("page.css"), read_asset("page.js") + read_asset(f"{name}.js")
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(program)}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page draws itself with JavaScript, which is off: turn it on for this file.</noscript>
<script type="application/json" id="data">{to_script_json(data)}</script>
<script type="text/plain" id="arrays">{arrays.encode()}</script>
<script>{program}</script>
</body>
</html>
"""


def to_script_json(data: Any) -> str:
    """Return JSON for a script element, which ends at the first "</script", also inside a string."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def round_numbers(values: Any, digits: int = 4) -> Any:
    """Round nested lists of numbers to so many significant digits; None for what is not finite, or None."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [round_numbers(v, digits) for v in values]
    return None if values is None or not np.isfinite(values) else float(f"{values:.{digits}g}")


def read_asset(name: str) -> str:
    """Return the text of a file beside this module."""
    return resources.files("jaxgpt.tools").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
