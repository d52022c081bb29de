"""Write and read token shards, and read bare uint16 of nanoGPT and shards of llm.c.

`write_shards` is the only function that writes tokens: `jaxgpt prepare` calls it with the folder `--out`, and a dataset
with a folder in the cache. What is read is checked before training.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.data.pipeline import Dataset, Tokens
from jaxgpt.data.tokenizer import IdTokenizer, Tokenizer, fingerprint, load_tokenizer, open_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import Json, is_there, json_sha256, open_file, open_whole, read_json, render_json, write_whole

# llm.c's shards start with 256 int32: magic, version, number of tokens. The magic gives the width of a token.
LLMC_HEADER_BYTES = 1024
LLMC_MAGIC = {20240520: np.uint16, 20240801: np.uint32, 20261127: np.bool_, 20261128: np.int64}  # the last two are ours

SCAN = 2**22  # tokens read at a time
START = [0, 0, 0]  # a position: source, row in it, piece of the row
SAVE_EVERY = 60.0  # seconds between records of the progress
OURS = r"(train|val)(_answers|_ends)?_\d{6,}\.bin"  # names of our shards
# and of all files of `write_shards`, with those that a kill leaves
WRITTEN = re.compile(rf"({OURS}|(index|tokenizer)\.json)(\.[0-9a-f]{{8}}|\.part)?|\.lock")
SHARD = {"file": str, "documents": int, "tokens": int, "sha256": str}  # the record of one
HELD_OUT = re.compile(r"(?<![a-z])val(id(ation)?)?(?![a-z])", re.IGNORECASE)  # matches the names of validation files


def find_shards(path: str | None) -> list[Path]:
    """Return the .bin shards at `--data.path`, [] if it is text."""
    root = Path(path or "")
    takes = "--data.path takes a text, a folder of them, or .bin shards"
    if path is None or not is_there(root, takes):
        return []
    if root.is_dir():
        return sorted(root.glob("*.bin"))
    return [root] if root.suffix == ".bin" else []


def open_shards(
    path: str, files: list[Path], tokenizer_name: str, val_fraction: float, vocab_size: int | None
) -> Dataset:
    """Return the dataset of nanoGPT's train.bin and val.bin (bare uint16), or of llm.c's shards with a header.

    Files with the word val, valid or validation in their names are held out. Without any, the last
    `val_fraction` of the tokens is.
    """
    root = Path(path)
    folder = root if root.is_dir() else root.parent
    index = read_index(folder)
    if index is not None and index["at"] is not None and root.is_dir():
        raise UserError(f"{root} is not complete: jaxgpt prepare was interrupted, and the same command goes on")
    tokenizer, notes = _find_tokenizer(folder, tokenizer_name, vocab_size, index)
    held_out = [f for f in files if HELD_OUT.search(f.stem)]
    if len(held_out) == len(files):
        raise UserError(f"{root} has validation shards only ({files[0].name}): training needs some too")
    shards = {f: open_shard(f) for f in files}
    limit = max(tokenizer.vocab_size, vocab_size or 0)
    scanned = {f.name: scan(f, tokens, limit) for f, tokens in shards.items()}
    if index is not None:
        listed = [s for s in index["shards"] if root.is_dir() or s["file"] in scanned]
        check_shards(folder, listed, scanned)
    train = [tokens for f, tokens in shards.items() if f not in held_out]
    val = [shards[f] for f in held_out]
    if not held_out:
        starts = itertools.accumulate(map(len, train), initial=0)
        cut = int(sum(map(len, train)) * (1.0 - val_fraction))
        cuts = [(tokens, max(0, cut - start)) for tokens, start in zip(train, starts, strict=False)]
        train, val = [tokens[:n] for tokens, n in cuts], [tokens[n:] for tokens, n in cuts]
    counted: dict[str, int] = {}
    if index is not None and held_out:
        made = [s["file"] for s in index["shards"] if s["file"].startswith("val")]
        if sorted(made) == [f.name for f in held_out]:
            counted = index.get("text", {}).get("val", counted)  # which earlier versions did not count
    lengths = {"train_tokens": sum(map(len, train)), "val_tokens": sum(map(len, val))}
    return Dataset(
        train=Tokens(train),
        val=Tokens(val),
        tokenizer=tokenizer,
        val_characters=counted.get("characters"),
        val_bytes=counted.get("bytes"),
        fingerprint=lengths | {"files": scanned, "tokenizer_sha256": fingerprint(tokenizer)},
        notes=notes,
    )


def _find_tokenizer(
    folder: Path, name: str, vocab_size: int | None, index: Json | None
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Return (tokenizer of token files, notes): the named one, one in their folder, or bare ids."""
    beside = folder / "tokenizer.json"
    if name == "char" and is_there(beside, "Move it elsewhere."):
        found = load_tokenizer(beside)
        if index is not None:
            check_tokenizer(beside, found, index)
        return found, (f"the tokenizer is {beside}",)
    if name in ("char", "ids") and vocab_size is not None:
        note = f"{folder} has no tokenizer.json: samples are ids, below model.vocab_size={vocab_size}"
        return IdTokenizer(vocab_size), (note,) if name == "char" else ()
    if name == "ids":
        raise UserError("tokenizer ids needs --model.vocab-size N: token files do not record the vocabulary size")
    found = open_tokenizer(name, "a text needs")
    if found is None:
        raise UserError(
            f"{folder} holds token ids, so tokenizer={name} cannot be used: give the tokenizer that "
            "made them (--data.tokenizer tokenizer.json, or byte), or --data.tokenizer ids with "
            "--model.vocab-size N"
        )
    return found, ()


def read_index(root: Path) -> Json | None:
    """Return the index.json of `jaxgpt prepare`, without its own digest, or None if there is none or another program's.

    Raises `UserError` if it is damaged.
    """
    path = root / "index.json"
    held = read_json(path, 2**26) if is_there(path, "Move it elsewhere.") else None
    digest = held.pop("sha256", None) if isinstance(held, dict) else None  # earlier versions wrote none
    match held:
        case {
            "jaxgpt": "prepare",
            "at": None | [int(), int(), int()],
            "arguments": dict(),
            "bytes": dict(),
            "open": {},
            "shards": list(shards),
            "tokenizer": {"sha256": str(), "vocab_size": int(), "end_of_text": int()},
        } if digest in (None, json_sha256(held)) and all(map(_is_shard, shards)):
            return held if digest else {key: value for key, value in held.items() if key != "text"}
    if held is not None and (digest is not None or any(re.fullmatch(OURS, file.name) for file in root.glob("*.bin"))):
        raise UserError(f"{path} is damaged: restore a copy, or delete {root} and prepare it again")
    return None


def _is_shard(record: Any) -> bool:
    return isinstance(record, dict) and {key: type(value) for key, value in record.items()} == SHARD


def check_shards(root: Path, listed: list[Json], scanned: dict[str, Json]) -> None:
    """Raise `UserError` unless the shards that an index lists are what `scan` says of each by name."""
    for shard in listed:
        name = shard["file"]
        if scanned.get(name) != {key: shard[key] for key in ("tokens", "sha256")}:
            wrong = "is not as it was made" if name in scanned else "is missing"
            raise UserError(f"{root / name} {wrong} (index.json has its tokens and SHA-256): fetch or prepare it again")


def check_tokenizer(path: Path, tokenizer: Tokenizer, index: Json) -> None:
    """Raise `UserError` unless the tokenizer is the one that the shards of an index were made with."""
    if fingerprint(tokenizer) != index["tokenizer"]["sha256"]:
        raise UserError(f"{path} is not as it was made (index.json has its SHA-256): restore it, or prepare it again")


def open_shard(path: Path) -> np.ndarray:
    """Return the tokens of a file, memory-mapped. Raises `UserError` if it is cut short."""
    with open_file(path) as f:
        head = f.read(12)
        size = f.seek(0, 2)
    magic = int.from_bytes(head[:4], "little") if len(head) == 12 else 0
    dtype, offset = np.dtype(LLMC_MAGIC.get(magic, np.uint16)), 0
    if magic in LLMC_MAGIC:
        offset = LLMC_HEADER_BYTES
        tokens = int.from_bytes(head[8:12], "little", signed=True)
        if size - offset != tokens * dtype.itemsize or not tokens:
            said = f"its header promises {tokens} tokens of {dtype.itemsize} bytes"
            held = f"the file holds {max(size - offset, 0)} bytes"
            raise UserError(f"{path}: {said}, {held}: it is cut short, empty or damaged; fetch it again")
    elif size == 0 or size % 2:
        said = f"{size} bytes are not whole 16-bit tokens (nanoGPT's .bin)"
        raise UserError(f"{path}: {said}; is the file cut short? Fetch it again.")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset)


def scan(path: Path, tokens: np.ndarray, limit: int) -> Json:
    """Return length and SHA-256 of a shard. Raises `UserError` for a token of `limit` or more."""
    digest = hashlib.sha256()
    for at in range(0, len(tokens), SCAN):
        part = tokens[at : at + SCAN]
        if int(part.max()) >= limit:
            first = int(np.argmax(part >= limit))
            offset = getattr(tokens, "offset", 0) + (at + first) * tokens.itemsize
            place = f"token {int(part[first])} at byte {offset} (token number {at + first})"
            asked = "is this the tokenizer that the file was made with?"
            raise UserError(f"{path}: {place} is outside the vocabulary, 0 to {limit - 1}: {asked}")
        digest.update(part.data)
    return {"tokens": len(tokens), "sha256": digest.hexdigest()}


def make_index(arguments: Json, sources: dict[str, int]) -> Json:
    """Return the index of an empty folder. `arguments` has `shard_tokens`; sources: the bytes of each source."""
    return {"jaxgpt": "prepare", "arguments": arguments, "bytes": sources, "at": START, "open": {}, "shards": []}


def save_index(place: Path, index: Json) -> None:
    """Write the index with its own digest."""
    write_whole(place / "index.json", render_json({"sha256": json_sha256(index), **index}, indent=1))


def write_shards(
    place: Path,
    index: Json,
    tokenizer: Tokenizer,
    batches: Iterable[tuple[dict[str, np.ndarray], list[int]]],
    end_of_text: int | None,
) -> None:
    """Write the tokens that follow the position of an index, and complete the index, which is changed.

    All files are whole. Now and then the index says what is written, up to which position: after a kill, what it does
    not list is written again.

    Args:
        place: the folder, in which the tokenizer is saved too.
        index: the index, from `make_index` or, to go on, from `read_index`.
        tokenizer: the tokenizer of the tokens.
        batches: the next tokens by the name of their shards, such as "train", and the position after them.
        end_of_text: the id that ends a document, if there is one.
    """
    end = -1 if end_of_text is None else end_of_text
    index["tokenizer"] = {"sha256": fingerprint(tokenizer), "vocab_size": tokenizer.vocab_size, "end_of_text": end}
    if index["at"] == START:
        save_index(place, index)
        write_whole(place / "tokenizer.json", tokenizer.to_json())
    waiting: dict[str, list[np.ndarray]] = {}  # tokens of shards that are not full
    count, saved = 0, time.monotonic()
    for tokens, following in batches:
        for name, ids in tokens.items():
            if name not in waiting:
                waiting[name] = _read_last(place, index, name)
            waiting[name].append(ids)
            count += len(ids)
        is_full = count >= index["arguments"]["shard_tokens"]
        if is_full or time.monotonic() - saved > SAVE_EVERY or index["at"] == START:
            waiting = {name: [_write_series(place, index, name, parts)] for name, parts in waiting.items()}
            count, saved = 0, time.monotonic()
            index["at"] = following
            save_index(place, index)
    for name, parts in waiting.items():
        _write_series(place, index, name, parts)
    index |= {"at": None, "shards": sorted(index["shards"], key=lambda shard: shard["file"])}
    delete_written(place, ["index.json", "tokenizer.json", ".lock", *(shard["file"] for shard in index["shards"])])
    save_index(place, index)


def _series(index: Json, name: str) -> list[Json]:
    return [shard for shard in index["shards"] if shard["file"].rpartition("_")[0] == name]


def _read_last(place: Path, index: Json, name: str) -> list[np.ndarray]:
    """Return the tokens of the last shard of a name, or none if it is full."""
    last, most = _series(index, name)[-1:], index["arguments"]["shard_tokens"]
    return [np.array(open_shard(place / x["file"])[: x["tokens"]]) for x in last if x["tokens"] < most]


def _write_series(place: Path, index: Json, name: str, parts: list[np.ndarray]) -> np.ndarray:
    """Write the shards that follow the full ones of a name. Return the tokens of the last one unless it is full."""
    ids, most, end = np.concatenate(parts), index["arguments"]["shard_tokens"], index["tokenizer"]["end_of_text"]
    mine = _series(index, name)
    others, known = [x for x in index["shards"] if x not in mine], [x for x in mine if x["tokens"] == most]
    header = np.zeros(LLMC_HEADER_BYTES // 4, np.int32)
    for start in range(0, len(ids), most):
        here = ids[start : start + most]
        header[:3] = next(magic for magic, dtype in LLMC_MAGIC.items() if dtype == ids.dtype), 1, len(here)
        file = f"{name}_{len(known):06d}.bin"
        with open_whole(place / file) as f:
            f.write(header)
            f.write(here)
        made = {"documents": int(np.count_nonzero(here == end)), "tokens": len(here)}
        known.append({"file": file, **made, "sha256": hashlib.sha256(here).hexdigest()})
    index["shards"] = others + known
    return ids[len(ids) // most * most :]


def delete_written(place: Path, keep: Sequence[str]) -> None:
    """Delete the files of `write_shards`, and the folder if nothing is left."""
    for path in place.iterdir():
        if WRITTEN.fullmatch(path.name) and path.name not in keep:
            path.unlink()
    if not any(place.iterdir()):
        place.rmdir()
