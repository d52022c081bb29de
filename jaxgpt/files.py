"""Reading files that need not be trusted: bounded, regular, and either a value or a `UserError`."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError


def is_there(path: Path, remedy: str) -> bool:
    """Whether something is at a path. Raises `UserError` where that cannot be told: too long a name, no permission."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}. {remedy}") from None
    return True


def read_lines(path: str | Path, longest: int, remedy: str) -> Iterator[tuple[str, bytes]]:
    """("FILE:LINE", the line with its end) of a file of any size, without a byte order mark and without blank lines.

    Raises `UserError` for a line of over `longest` bytes; remedy: what to do then.
    """
    with open_file(path) as f:
        for number in itertools.count(1):
            raw = f.readline(longest + 1)
            if not raw:
                return
            where = f"{path}:{number}"
            if len(raw) > longest:
                raise UserError(f"{where}: the line is longer than {longest:,} bytes: {remedy}")
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if raw.strip():
                yield where, raw


def open_file(path: str | Path) -> io.BufferedReader:
    """A regular file, to read. Raises `UserError` for anything else: a fifo would wait for ever, a device never ends."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as e:  # ValueError: a NUL, or what no file system can spell
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise UserError(f"{path} is {_kind(mode)}, needs a regular file")
    return os.fdopen(handle, "rb")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_bytes(path: str | Path, most: int) -> bytes:
    """The whole of a regular file of at most `most` bytes."""
    with open_file(path) as f:
        try:
            raw = f.read(most + 1)
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}") from None
    if len(raw) > most:
        raise UserError(f"{path} is larger than {most:,} bytes, as no file of its kind is: name another")
    return raw


def sha256(path: str | Path) -> str:
    """Of a regular file's bytes: 0.6 s a gigabyte."""
    with open_file(path) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_json(path: str | Path, most: int) -> Any:
    """What a JSON file of at most `most` bytes holds.

    Stricter than `json.load`: no key twice in an object (readers disagree which one counts), no NaN or Infinity.
    """
    return parse_json(read_bytes(path, most), str(path))


def render_json(
    value: Any,
    *,
    indent: int | None = None,
    ensure_ascii: bool = True,
    not_finite: Callable[[float], Any] = lambda number: None,
) -> str:
    """Return strict JSON, which has no NaN or Infinity. not_finite: what to write for these; null unless given."""

    def strict(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strict(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [strict(inner) for inner in value]
        return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(strict(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of what a JSON file holds: of values and their order, whatever the spaces between them."""
    return hashlib.sha256(json.dumps(value, allow_nan=False).encode()).hexdigest()


def parse_json(raw: str | bytes, where: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
        return found

    def no_number(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        return json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    except RecursionError:
        raise UserError(f"{where} is damaged: nested too deeply") from None
    except ValueError as e:  # of UTF-8, of JSON, and of a number with thousands of digits
        raise UserError(f"{where} is damaged: {e}") from None
