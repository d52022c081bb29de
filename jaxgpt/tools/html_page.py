"""Render a self-contained page: one HTML file with its style, program and data, which loads nothing from a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.files import GENERATOR, Json, write_whole


class Arrays:
    """Arrays of a page, concatenated, to which its data refer, and the distinct tokens that it shows."""

    def __init__(self) -> None:
        self.raw = bytearray()
        self.words: dict[int, int] = {}  # index by token id, in order of insertion

    def put(self, array: np.ndarray | None) -> Json | None:
        """Add an array of uint8, int8, int32 or float32. Return its reference: offset in bytes, type and shape, or None."""
        if array is None:
            return None
        little = array.astype(array.dtype.newbyteorder("<"))
        at = len(self.raw)
        self.raw += little.tobytes()
        self.raw += bytes(-len(self.raw) % 4)  # JavaScript's arrays begin at a multiple of their element size
        return {"at": at, "type": little.dtype.str[1:], "shape": list(array.shape)}

    def put_tokens(self, tokens: ArrayLike) -> Json | None:
        """Add token ids as indices into `words`. Return the reference."""
        tokens = np.asarray(tokens)
        known, inverse = np.unique(tokens, return_inverse=True)
        indices = [self.words.setdefault(int(token), len(self.words)) for token in known]
        return self.put(np.array(indices, np.int32)[inverse].reshape(tokens.shape))


def render_html(names: Sequence[str], data: Json, arrays: Arrays) -> str:
    """Return the page on which the programs `NAME.js` draw `data`, "title" among them. The last program begins.

    Text from users in `data` is never parsed as HTML: it is embedded as JSON without a "<", and the program inserts it
    only as text. The page's Content-Security-Policy allows only that program, by its hash, and no requests.
    """
    style, program = read_asset("page.css"), "".join(read_asset(f"{name}.js") for name in ("page", "data", *names))
    policy = f"default-src 'none'; img-src data:; style-src '{hash_source(style)}'; script-src '{hash_source(program)}'"
    raw = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    safe = raw.replace("<", "\\u003c")  # a script element ends at the first "</script", even within a string
    return Template(read_asset("page.html")).substitute(
        generator=GENERATOR,
        policy=policy,
        title=html.escape(data["title"]),
        style=style,
        data=safe,
        arrays=base64.b64encode(zlib.compress(arrays.raw, 9)).decode(),
        program=program,
    )


def write_page(path: Path, page: str) -> str:
    """Write a page to a file, and return a line of text that says so."""
    write_whole(path, page)
    return f"{path}: {len(page.encode()) / 1e3:,.0f} kB; open it in a browser"


def round_numbers(values: Any, digits: int = 4) -> Any:
    """Round nested lists of numbers to `digits` significant digits. Replace values that are not finite by None."""
    values = np.asarray(values, np.float64).tolist()  # None becomes NaN
    if isinstance(values, list):
        return [round_numbers(x, digits) for x in values]
    return float(f"{values:.{digits}g}") if np.isfinite(values) else None


def read_asset(name: str, package: str = "jaxgpt.tools") -> str:
    """Return the text of a file in the folder of this module, or of another package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def hash_source(text: str) -> str:
    """Return the source of a Content-Security-Policy that allows a style or a program with this text, without quotes."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
