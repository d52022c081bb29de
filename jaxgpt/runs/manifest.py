"""The manifest of a checkpoint: size and SHA-256 of each file, written last.

Orbax does not detect a flipped bit in an array, or a file of another save.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError
from jaxgpt.files import json_sha256, parse_json, read_bytes

NAME = "manifest.json"
FORMAT = 1  # version of the manifest and of the files it lists
MOST_BYTES = 64 * 1024**2  # longest manifest to read: about a million arrays


class CorruptCheckpoint(UserError):
    """A checkpoint has changed since it was saved. The message names the file and the difference."""


def write(directory: Path, about: dict[str, Any]) -> None:
    """Seal an unpublished checkpoint: write a manifest of `about` and the size and SHA-256 of each file."""
    paths = _files(directory)
    with ThreadPoolExecutor() as pool:  # hashing and fsync release the GIL
        files = dict(zip(paths, pool.map(lambda p: _measure(directory / p, sync=True), paths), strict=True))
    for folder in {(directory / p).parent for p in paths} | {directory}:
        sync(folder)
    (directory / NAME).write_text(_render({"format": FORMAT, **about, "files": files}), encoding="utf-8")
    sync(directory / NAME)
    sync(directory)


def rewrite(directory: Path, **changes: Any) -> None:
    """Change fields of a manifest."""
    aside = directory.with_name(f"{directory.name}.saving")  # inside, it would be a file that is not listed
    aside.write_text(_render(read(directory) | changes), encoding="utf-8")
    sync(aside)
    aside.replace(directory / NAME)


def read(directory: Path) -> dict[str, Any]:
    """Return the manifest, without its own SHA-256. Raises `CorruptCheckpoint` if it was changed."""
    path = directory / NAME
    if path.is_symlink():
        raise CorruptCheckpoint(f"{path} is not a regular file")
    try:
        raw = read_bytes(path, MOST_BYTES)
        body = parse_json(raw, str(path))
    except UserError as e:
        raise CorruptCheckpoint(str(e)) from None
    if not isinstance(body, dict) or body.pop("sha256", None) is None or _render(body).encode() != raw:
        raise CorruptCheckpoint(f"{path} is not what was written: its own SHA-256 does not match")
    if body.get("format") != FORMAT:
        raise CorruptCheckpoint(
            f"{path} has format {body.get('format')!r} of jaxgpt {body.get('jaxgpt')}, this jaxgpt reads {FORMAT}"
        )
    files = body.get("files")
    if not isinstance(files, dict) or not all(isinstance(f, list) and len(f) == 2 for f in files.values()):
        raise CorruptCheckpoint(f"{path} does not list files")
    return body


def check(directory: Path) -> dict[str, Any]:
    """Return the manifest. Raises `CorruptCheckpoint` for the first file that differs from it."""
    body = read(directory)
    stated = body["files"]
    found = _files(directory)
    for name in sorted(stated.keys() - set(found)):
        raise CorruptCheckpoint(f"{directory / name} is missing")
    for name in sorted(set(found) - stated.keys()):
        raise CorruptCheckpoint(f"{directory / name} is not part of the checkpoint")
    for name in found:  # sizes first: a truncated file is found without reading gigabytes
        size = (directory / name).stat().st_size
        if size != stated[name][0]:
            raise CorruptCheckpoint(
                f"{directory / name} has {size:,} bytes, not the {stated[name][0]:,} that were saved"
            )
    with ThreadPoolExecutor() as pool:
        for name, measured in zip(found, pool.map(lambda n: _measure(directory / n), found), strict=True):
            if measured != stated[name]:
                raise CorruptCheckpoint(
                    f"{directory / name} has SHA-256 {measured[1][:12]}..., {stated[name][1][:12]}... was saved"
                )
    return body


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(directory: Path) -> list[str]:
    """Return the relative paths of all files on disk except the manifest."""
    found = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    for path in found:
        if path.is_symlink() or not path.is_file():
            raise CorruptCheckpoint(f"{path} is not a regular file")
    return sorted(path.relative_to(directory).as_posix() for path in found if path != directory / NAME)


def _measure(path: Path, *, sync: bool = False) -> list:
    """Return [bytes, SHA-256]."""
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        if sync:
            os.fsync(f.fileno())
        return [f.tell(), digest]


def _render(body: dict[str, Any]) -> str:
    """Return the canonical text of a manifest, with its SHA-256, so that any changed bit is detected."""
    return json.dumps({**body, "sha256": json_sha256(body)}, indent=1) + "\n"
