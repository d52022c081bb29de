"""A page that stands alone: one HTML file with its style, program and data inside, which asks no network for anything."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from importlib import resources
from typing import Any

import numpy as np

KINDS = {"u1": np.uint8, "i4": np.int32, "f4": np.float32}  # as page.js reads them, little endian


class Arrays:
    """Arrays of a page, one after the other; a reference to each goes into the page's data."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def put(self, array: Any) -> dict[str, Any]:
        """array: of uint8, int32 or float32."""
        array = np.ascontiguousarray(array)
        (kind,) = (name for name, dtype in KINDS.items() if dtype == array.dtype)
        raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
        raw += bytes(-len(raw) % 4)  # a typed array begins at a multiple of its own size
        reference = {"at": self._size, "type": kind, "shape": list(array.shape)}
        self._parts.append(raw)
        self._size += len(raw)
        return reference

    def packed(self) -> str:
        return base64.b64encode(zlib.compress(b"".join(self._parts), 9)).decode()


def page(name: str, title: str, data: dict[str, Any], arrays: Arrays) -> str:
    """The page of `NAME.js` over `data`, which may hold any text of a user's: it is never read as HTML.

    Two locks: data lie in JSON without a "<", which the program writes as text alone; and the page's own policy runs
    no script but that program, whose hash it names, and fetches nothing.
    """
    style, program = file("page.css"), file("page.js") + file(f"{name}.js")
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
<script type="application/json" id="data">{in_html(data)}</script>
<script type="text/plain" id="arrays">{arrays.packed()}</script>
<script>{program}</script>
</body>
</html>
"""


def in_html(data: Any) -> str:
    """JSON for a script element, which ends at the first "</script" whatever quotes stand around it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def rounded(values: Any, digits: int = 4) -> Any:
    """Lists of numbers for a page, to so many significant digits; what is not finite, or not there, is null."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [rounded(v, digits) for v in values]
    return None if values is None or not np.isfinite(values) else float(f"{values:.{digits}g}")


def file(name: str) -> str:
    return resources.files("jaxgpt.tools").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
