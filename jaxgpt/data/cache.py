"""What was tokenised once: memory-mapped arrays beside their tokenizer, in the user's cache, checked when read."""

from __future__ import annotations

import contextlib
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

from jaxgpt.data import tokenizer as tok
from jaxgpt.errors import UserError
from jaxgpt.files import cache_directory, make_cache, read_json, sha256

SPLITS = ("train", "val")
# arrays by name, tokenizer, fingerprint, what else was counted
Cached = tuple[dict[str, np.ndarray], tok.Tokenizer, dict[str, Any], dict[str, int]]


def cached_at(spec: dict[str, Any]) -> Path:
    """Return the directory of the tokens that `spec` describes: everything that decides them has to be in it."""
    key = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:24]
    return cache_directory() / "tokens" / key


def changed(source: str) -> UserError:
    """Return the error for a text that was not what its key is made of when it was read again."""
    return UserError(f"{source} changed while it was read: wait until nothing writes to it, then start again")


def read_tokens(directory: Path, names: Sequence[str] = SPLITS) -> Cached | None:
    """Return what `write_tokens` wrote, if its bytes are still those.

    What is damaged is said, and moved out of the way.
    """
    if not directory.exists():
        return None
    try:
        meta = read_json(directory / "meta.json", 2**20)
        fingerprint, about = meta["fingerprint"], meta["about"]
        for name in names:
            if sha256(directory / f"{name}.bin") != fingerprint[f"{name}_sha256"]:
                raise UserError(f"{name}.bin is not what was written")
        tokenizer = tok.load_tokenizer(directory / "tokenizer.json")
        if tok.fingerprint(tokenizer) != fingerprint["tokenizer_sha256"]:
            raise UserError("tokenizer.json is not what was written")
        arrays: dict[str, np.ndarray] = {
            name: np.memmap(directory / f"{name}.bin", dtype=_dtype(name, tokenizer), mode="r") for name in names
        }
        whole = all(len(arrays[split]) == fingerprint[f"{split}_tokens"] for split in SPLITS)
        if not whole or not all(type(number) is int and number > 0 for number in about.values()):
            raise UserError("meta.json is not what was written")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        warnings.warn(f"the cached tokens in {directory} are damaged ({e}): made anew", stacklevel=2)
        with contextlib.suppress(FileNotFoundError):  # another process was first
            aside = tempfile.mkdtemp(dir=directory.parent, prefix="damaged.")
            os.replace(directory, aside)
            shutil.rmtree(aside, ignore_errors=True)
        return None
    return arrays, tokenizer, fingerprint, about


def find_tokens(known: dict[str, Any], names: Sequence[str] = SPLITS) -> Cached | None:
    """Return what the cache has with a known fingerprint, whatever text it was made of; None: nothing."""
    for meta in sorted((cache_directory() / "tokens").glob("*/meta.json")):
        with contextlib.suppress(UserError, KeyError, TypeError, AttributeError):
            fingerprint = read_json(meta, 2**20)["fingerprint"]
            whole = all(f"{name}_sha256" in fingerprint for name in names)
            if whole and all(known.get(name) == value for name, value in fingerprint.items()):
                return read_tokens(meta.parent, names)
    return None


def _dtype(name: str, tokenizer: tok.Tokenizer) -> np.dtype:
    if name.endswith("_answers"):
        return np.dtype(np.bool_)
    if name.endswith("_ends"):
        return np.dtype(np.int64)
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def write_tokens(
    directory: Path,
    tokenizer: tok.Tokenizer,
    pieces: Iterable[tuple[str, np.ndarray]],
    names: Sequence[str] = SPLITS,
    about: dict[str, int] | None = None,
) -> None:
    """Stream pieces into NAME.bin beside the tokenizer; the directory appears whole or not at all.

    about: numbers above 0 to keep beside them, which may be counted while the pieces are made.
    """
    make_cache(directory.parent)
    dtypes = {name: _dtype(name, tokenizer) for name in names}
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=directory.name + "."))
    try:
        counts, digests = dict.fromkeys(names, 0), {name: hashlib.sha256() for name in names}
        with contextlib.ExitStack() as stack:
            out = {name: stack.enter_context((partial / f"{name}.bin").open("wb")) for name in names}
            for name, piece in pieces:
                raw = piece.astype(dtypes[name]).tobytes()
                out[name].write(raw)
                digests[name].update(raw)
                counts[name] += len(piece)
        for split in SPLITS:
            if not counts[split]:
                raise UserError(f"the {split} split is empty: the text is too short to split")
        (partial / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        meta = {"fingerprint": _fingerprint(counts, digests, tokenizer), "about": about or {}}
        (partial / "meta.json").write_text(json.dumps(meta))
        try:
            os.replace(partial, directory)
        except OSError:
            if not (directory / "meta.json").is_file():  # else another process was first with the same tokens
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fingerprint(counts: dict, digests: dict, tokenizer: tok.Tokenizer) -> dict:
    return {
        **{f"{split}_tokens": counts[split] for split in SPLITS},
        **{f"{name}_sha256": digest.hexdigest() for name, digest in digests.items()},
        "tokenizer_sha256": tok.fingerprint(tokenizer),
    }
