"""Read untrusted files, write files atomically, and find the cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import secrets
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxgpt.errors import UserError, reason_of

Json = dict[str, Any]  #: an object of JSON
Say = Callable[[str], None]  #: takes a line of text for the user
GENERATOR = '<meta name="generator" content="jaxgpt">'  # at the head of every page that we write


def is_there(path: Path, remedy: str) -> bool:
    """Return whether a path exists. Raises `UserError` if it cannot be checked: name too long, no permission."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {path}: {reason_of(e)}. {remedy}") from None
    return True


def read_lines(path: str | Path, longest: int, remedy: str) -> Iterator[tuple[str, bytes]]:
    """Yield ("FILE:LINE", line with its end) for the lines of a file that are not blank, without a byte order mark.

    The file may have any size. Raises `UserError`, ending with `remedy`, for a line of more than `longest` bytes.
    """
    with open_file(path) as f:
        for number, raw in enumerate(iter(lambda: f.readline(longest + 1), b""), 1):
            if len(raw) > longest:
                raise UserError(f"{path}:{number}: the line is longer than {longest:,} bytes: {remedy}")
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if raw.strip():
                yield f"{path}:{number}", raw


def open_file(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading. Raises `UserError` for others: a pipe may block, a device may never end."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as e:  # ValueError: a NUL, or a character that cannot be encoded
        raise UserError(f"cannot read {path}: {reason_of(e)}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise UserError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}: give a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: str | Path, most: int) -> bytes:
    """Read a regular file. Raises `UserError` if it has more than `most` bytes."""
    with open_file(path) as f:
        raw = f.read(most + 1)
    if len(raw) > most:
        raise UserError(f"{path} is larger than {most:,} bytes, the limit for such a file: name another")
    return raw


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a regular file, in 0.6 s per gigabyte."""
    with open_file(path) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_json(path: str | Path, most: int) -> Any:
    """Read a JSON file of at most `most` bytes with `parse_json`."""
    return parse_json(read_bytes(path, most), str(path))


def render_json(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Return a value as strict JSON, in which NaN and Infinity are null."""

    def strict(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strict(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [strict(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(strict(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value, with keys in their order, independent of whitespace in its file."""
    return hashlib.sha256(json.dumps(value, allow_nan=False).encode()).hexdigest()


def parse_json(raw: str | bytes, where: str, **hooks: Any) -> Any:
    """Parse JSON more strictly than `json.loads`: no duplicate keys, on which readers disagree, and no NaN.

    Raises `UserError` for damaged JSON. `where` names the source in its message. `json.loads` takes the `hooks`.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"the key {name!r} appears twice")
        return found

    def no_number(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        strict: dict[str, Any] = {"object_pairs_hook": once, "parse_constant": no_number}
        return json.loads(text.removeprefix("\ufeff"), **(strict | hooks))
    except RecursionError:
        raise UserError(f"{where} is damaged: nested too deeply") from None
    except ValueError as e:  # invalid UTF-8, invalid JSON, or an integer of thousands of digits
        raise UserError(f"{where} is damaged: {e}") from None


class Result(NamedTuple):
    """What a command found: JSON for programs and a text for people."""

    value: Any  # what was found, as JSON: objects, lists, numbers and texts
    text: str  # the same for people, as `print` shows it

    def to_json(self) -> Any:
        """Return the JSON."""
        return self.value

    def __str__(self) -> str:
        return self.text


def cache_directory() -> Path:
    """Return `$JAXGPT_CACHE`, or jaxgpt's folder in the user's cache directory."""
    if named := os.environ.get("JAXGPT_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt"
    except RuntimeError:  # no HOME, and a user unknown to the system
        raise UserError("there is no home directory for the cache: set JAXGPT_CACHE to a directory") from None


def make_cache(directory: Path) -> None:
    """Make a directory of the cache and check that it is writable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, ValueError) as e:
        raise UserError(f"cannot write into the cache {directory}: {reason_of(e)}. Set JAXGPT_CACHE to another") from e


def new_file(path: str, *, force: bool) -> Path:
    """Return the path of a page to write, which may replace another of our pages.

    Raises `UserError` if there is anything else without `force`, or if its directory does not exist.
    """
    out = Path(path)
    if is_there(out, "Name another with --out."):
        with open_file(out) as f:
            if not force and GENERATOR.encode() not in f.read(256):
                raise UserError(f"{out} exists: name another with --out, or overwrite it with --force")
    elif not out.parent.is_dir():
        raise UserError(f"there is no directory {out.parent} for {out.name}: make it, or name another with --out")
    return out


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically, as `open_whole` does. A str is encoded as UTF-8."""
    with open_whole(path) as f:
        f.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears on exit, complete or not at all, even after a power failure.

    Its directory must exist. A link at `path` is replaced, and its target is unchanged.
    """
    # `mkstemp` is not used, because only the owner can read its files, whatever the umask is.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
