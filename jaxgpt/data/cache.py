"""The token cache: memory-mapped arrays stored with their tokenizer, verified when they are read."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.data.tokenizer import Tokenizer, fingerprint, load_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import cache_directory, make_cache, read_json, sha256

SPLITS = ("train", "val")


@dataclasses.dataclass(frozen=True)
class CachedTokens:
    """An entry of the cache."""

    arrays: dict[str, np.ndarray]  # by name: the two splits and, for documents, their masks and ends
    tokenizer: Tokenizer
    fingerprint: dict[str, Any]  # see `Dataset`
    counts: dict[str, int]  # further counts, such as the bytes of the validation text


def cache_entry(spec: dict[str, Any]) -> Path:
    """Return the cache directory of a specification, which must contain everything that determines the tokens."""
    key = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:24]
    return cache_directory() / "tokens" / key


def change_error(source: str) -> UserError:
    """Return the error for a text that changed between two readings."""
    return UserError(f"{source} changed while it was read: wait until nothing writes to it, then start again")


def read_tokens(directory: Path, names: Sequence[str] = SPLITS) -> CachedTokens | None:
    """Return an entry of the cache, or None. Warns of an entry that is not as it was written, and deletes it."""
    if not directory.exists():
        return None
    try:
        return _read_checked(directory, names)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        warnings.warn(f"the cached tokens in {directory} are damaged ({e}): encoding the text again", stacklevel=2)
        with contextlib.suppress(FileNotFoundError):  # another process was first
            aside = tempfile.mkdtemp(dir=directory.parent, prefix="damaged.")
            os.replace(directory, aside)
            shutil.rmtree(aside, ignore_errors=True)
        return None


def _read_checked(directory: Path, names: Sequence[str]) -> CachedTokens:
    meta = read_json(directory / "meta.json", 2**20)
    digests, counts = meta["fingerprint"], meta["about"]
    for name in names:
        if sha256(directory / f"{name}.bin") != digests[f"{name}_sha256"]:
            raise UserError(f"{name}.bin is not what was written")
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    if fingerprint(tokenizer) != digests["tokenizer_sha256"]:
        raise UserError("tokenizer.json is not what was written")
    arrays: dict[str, np.ndarray] = {
        name: np.memmap(directory / f"{name}.bin", dtype=_dtype(name, tokenizer), mode="r") for name in names
    }
    lengths_match = all(len(arrays[split]) == digests[f"{split}_tokens"] for split in SPLITS)
    if not lengths_match or not all(type(number) is int and number > 0 for number in counts.values()):
        raise UserError("meta.json is not what was written")
    return CachedTokens(arrays, tokenizer, digests, counts)


def find_tokens(known: dict[str, Any], names: Sequence[str] = SPLITS) -> CachedTokens | None:
    """Return the cached tokens with a known fingerprint, whatever text they were made from, or None."""
    for meta in sorted((cache_directory() / "tokens").glob("*/meta.json")):
        with contextlib.suppress(UserError, KeyError, TypeError, AttributeError):
            entry = read_json(meta, 2**20)["fingerprint"]
            is_complete = all(f"{name}_sha256" in entry for name in names)
            if is_complete and all(known.get(name) == value for name, value in entry.items()):
                return read_tokens(meta.parent, names)
    return None


def _dtype(name: str, tokenizer: Tokenizer) -> np.dtype:
    if name.endswith("_answers"):
        return np.dtype(np.bool_)
    if name.endswith("_ends"):
        return np.dtype(np.int64)
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def write_tokens(
    directory: Path,
    tokenizer: Tokenizer,
    pieces: Iterable[tuple[str, np.ndarray]],
    names: Sequence[str] = SPLITS,
    counts: dict[str, int] | None = None,
) -> CachedTokens:
    """Stream (name, values) pieces into NAME.bin next to the tokenizer, and read the entry back.

    The directory appears complete or not at all. `counts` are stored with the tokens. They may grow while the pieces
    are made, and must be positive in the end.
    """
    make_cache(directory.parent)
    dtypes = {name: _dtype(name, tokenizer) for name in names}
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=directory.name + "."))
    try:
        lengths, digests = dict.fromkeys(names, 0), {name: hashlib.sha256() for name in names}
        with contextlib.ExitStack() as stack:
            out = {name: stack.enter_context((partial / f"{name}.bin").open("wb")) for name in names}
            for name, piece in pieces:
                raw = piece.astype(dtypes[name]).tobytes()
                out[name].write(raw)
                digests[name].update(raw)
                lengths[name] += len(piece)
        for split in SPLITS:
            if not lengths[split]:
                raise UserError(f"the {split} split is empty: the text is too short to split")
        (partial / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        entry = {
            **{f"{split}_tokens": lengths[split] for split in SPLITS},
            **{f"{name}_sha256": digest.hexdigest() for name, digest in digests.items()},
            "tokenizer_sha256": fingerprint(tokenizer),
        }
        (partial / "meta.json").write_text(json.dumps({"fingerprint": entry, "about": counts or {}}))
        try:
            os.replace(partial, directory)
        except OSError:
            if not (directory / "meta.json").is_file():  # else another process was first with the same tokens
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    cached = read_tokens(directory, names)
    assert cached is not None
    return cached
