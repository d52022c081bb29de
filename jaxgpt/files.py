"""Read files that need not be trusted, write files whole, and find the cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxgpt.errors import UserError


def is_there(path: Path, remedy: str) -> bool:
    """Return whether something is at a path. Raises `UserError` if that cannot be known: a long name, no permission."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}. {remedy}") from None
    return True


def read_lines(path: str | Path, longest: int, remedy: str) -> Iterator[tuple[str, bytes]]:
    """Yield ("FILE:LINE", the line with its end) of a file of any size, without a byte order mark and blank lines.

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
    """Open a regular file to read. Raises `UserError` for anything else: a pipe may block, a device never ends."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as e:  # ValueError: a NUL, or what no file system can spell
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise UserError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, needs a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: str | Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes."""
    with open_file(path) as f:
        try:
            raw = f.read(most + 1)
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}") from None
    if len(raw) > most:
        raise UserError(f"{path} is larger than {most:,} bytes, as no file of its kind is: name another")
    return raw


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a regular file: 0.6 s a gigabyte."""
    with open_file(path) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_json(path: str | Path, most: int) -> Any:
    """Read a JSON file of at most `most` bytes as `parse_json` does."""
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
    """Return the SHA-256 of the values of a JSON file and their order, whatever the spaces between them."""
    return hashlib.sha256(json.dumps(value, allow_nan=False).encode()).hexdigest()


def parse_json(raw: str | bytes, where: str) -> Any:
    """Parse JSON more strictly than `json.loads`: no key twice in an object (readers disagree which counts), no NaN.

    where: what it is, for the `UserError` that is raised if it is damaged.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
        return dict(pairs)

    def no_number(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        return json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    except RecursionError:
        raise UserError(f"{where} is damaged: nested too deeply") from None
    except ValueError as e:  # of UTF-8, of JSON, and of a number with thousands of digits
        raise UserError(f"{where} is damaged: {e}") from None


def cache_directory() -> Path:
    """Return `$JAXGPT_CACHE`, or jaxgpt's folder in the user's cache directory."""
    if named := os.environ.get("JAXGPT_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt"
    except RuntimeError:  # no HOME, and a user whom the system does not know
        raise UserError("there is no home directory for the cache: set JAXGPT_CACHE to a directory") from None


def make_cache(directory: Path) -> None:
    """Make a directory of the cache, and check that it can be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise UserError(f"cannot write into the cache {directory}: {why}. JAXGPT_CACHE names another place.") from None


def new_file(path: str, *, force: bool) -> Path:
    """Return the path of a page to write. Raises `UserError` if it exists, unless `force`, or cannot be written."""
    out = Path(path)
    there = is_there(out, "Name another with --out.")
    if there and out.is_dir():
        raise UserError(f"{out} is a directory: name a file with --out")
    if there and not force:
        raise UserError(f"{out} exists: name another with --out, or write over it with --force")
    if not out.parent.is_dir():
        raise UserError(f"there is no directory {out.parent} for {out.name}: make it, or name another with --out")
    return out


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as `open_whole` does; a text in UTF-8."""
    with open_whole(path) as f:
        f.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that appears at the end, whole or not at all, even if the power fails.

    Its directory has to exist. A link at `path` is replaced; its target stays as it is.
    """
    # Not by `mkstemp`, whose files are their owner's alone, whatever the umask says.
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


def delete(path: Path) -> None:
    """Delete a file, a link (never its target), or a directory with its contents."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
