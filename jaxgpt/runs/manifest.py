"""The manifest of a checkpoint: size and SHA-256 of each of its files, written last.

Orbax does not notice a flipped bit in an array, nor that a file belongs to another save.
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
FORMAT = 1  # of the manifest and of what it lists
MOST_BYTES = 64 * 1024**2  # of a manifest: that of a million arrays


class CorruptCheckpoint(UserError):
    """A checkpoint is not as it was saved: which file, and how, in one line."""


def write(directory: Path, about: dict[str, Any]) -> None:
    """Seal a directory before it gets its name: write `about`, and the size and SHA-256 of each file in it."""
    paths = _files(directory)
    with ThreadPoolExecutor() as pool:  # hashing and waiting for the disk leave Python's lock alone
        files = dict(zip(paths, pool.map(lambda p: _measure(directory / p, sync=True), paths), strict=True))
    for folder in {(directory / p).parent for p in paths} | {directory}:
        sync(folder)
    (directory / NAME).write_text(_render({"format": FORMAT, **about, "files": files}), encoding="utf-8")
    sync(directory / NAME)
    sync(directory)


def rewrite(directory: Path, **changes: Any) -> None:
    """Change what the manifest says beside the files."""
    aside = directory.with_name(f"{directory.name}.saving")  # in the directory it would be a file too many
    aside.write_text(_render(read(directory) | changes), encoding="utf-8")
    sync(aside)
    aside.replace(directory / NAME)


def read(directory: Path) -> dict[str, Any]:
    """Return the manifest. Raises `CorruptCheckpoint` if it is not as it was written."""
    path = directory / NAME
    if path.is_symlink():
        raise CorruptCheckpoint(f"{path} is not a regular file")
    try:
        raw = read_bytes(path, MOST_BYTES)
        body = parse_json(raw, str(path))
    except UserError as e:
        raise CorruptCheckpoint(str(e)) from None
    if not isinstance(body, dict) or body.pop("sha256", None) is None or _render(body).encode() != raw:
        raise CorruptCheckpoint(f"{path} is not what was written: its own SHA-256 does not hold")
    if body.get("format") != FORMAT:
        raise CorruptCheckpoint(
            f"{path} has format {body.get('format')!r} of jaxgpt {body.get('jaxgpt')}, this jaxgpt reads {FORMAT}"
        )
    files = body.get("files")
    if not isinstance(files, dict) or not all(isinstance(f, list) and len(f) == 2 for f in files.values()):
        raise CorruptCheckpoint(f"{path} does not list files")
    return body


def check(directory: Path) -> dict[str, Any]:
    """Return the manifest if every file is as it says. Raises `CorruptCheckpoint` for the first that is not."""
    body = read(directory)
    stated = body["files"]
    found = _files(directory)
    for name in sorted(stated.keys() - set(found)):
        raise CorruptCheckpoint(f"{directory / name} is missing")
    for name in sorted(set(found) - stated.keys()):
        raise CorruptCheckpoint(f"{directory / name} is not part of the checkpoint")
    for name in found:  # sizes first: no need to read a gigabyte to find a short file
        size = (directory / name).stat().st_size
        if size != stated[name][0]:
            raise CorruptCheckpoint(f"{directory / name} has {size:,} bytes, saved were {stated[name][0]:,}")
    with ThreadPoolExecutor() as pool:
        for name, measured in zip(found, pool.map(lambda n: _measure(directory / n), found), strict=True):
            if measured != stated[name]:
                raise CorruptCheckpoint(
                    f"{directory / name} has SHA-256 {measured[1][:12]}..., saved was {stated[name][1][:12]}..."
                )
    return body


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(directory: Path) -> list[str]:
    """Return the relative paths of all files but the manifest: as they are on disk, never as a manifest has them."""
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
    """Return the one spelling of a manifest, so that every changed bit of it shows."""
    return json.dumps({**body, "sha256": json_sha256(body)}, indent=1) + "\n"
