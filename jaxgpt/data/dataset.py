"""Token files on disk and the fixed split: what a run trains and validates on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.data import tokenizer as tok
from jaxgpt.data.corpus import corpus_files, read_text, user_files
from jaxgpt.data.shards import bin_files, cut, open_shard, scan
from jaxgpt.errors import UserError
from jaxgpt.files import read_json, sha256
from jaxgpt.paths import cache_directory, make_cache


class Tokens:
    """A sequence of token ids over one or more memory-mapped files: only what is read is in memory."""

    def __init__(self, shards: list[np.ndarray]):
        self._shards = shards
        self._ends = np.cumsum([len(s) for s in shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """`length` ids from `start` on, int32; windows cross from one shard to the next."""
        assert start >= 0 and start + length <= len(self), (start, length, len(self))
        shard = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[shard - 1]) if shard else 0
        parts = []
        while length:
            part = self._shards[shard][start : start + length]
            parts.append(part)
            length -= len(part)
            shard, start = shard + 1, 0
        return np.concatenate(parts).astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The two splits, the tokenizer they are written in, and what makes two runs comparable."""

    train: Tokens
    val: Tokens
    tokenizer: tok.Tokenizer
    val_characters: int | None  # for bits per character; None where the text is not known
    val_bytes: int | None  # of the same text in UTF-8, for bits per byte
    fingerprint: dict  # tokens of both splits; SHA-256 of both or, of .bin shards, of each file; and of the tokenizer


def prepare(config: DataConfig, *, block_size: int, vocab_size: int | None = None) -> Dataset:
    """The dataset of a configuration; text is tokenised once and kept in the cache as memory-mapped token files.

    The split is by position: the last `val_fraction` of the characters (of the tokens, for a .bin without a
    validation file) is held out. vocab_size: the model's, which tokenizer "ids" needs.
    Raises `UserError` if there is no text, it is not UTF-8, or a split is shorter than one window.
    """
    shards = bin_files(config.path)
    dataset = _from_bins(config, shards, vocab_size) if shards else _from_text(config)
    source = config.path or config.corpus
    for name, tokens in (("training", dataset.train), ("validation", dataset.val)):
        if len(tokens) <= block_size:
            raise UserError(
                f"the {name} split of {source} has {len(tokens)} tokens, needed {block_size + 1} for one window of "
                f"block_size={block_size}: give more text, a smaller --model.block-size, or another --data.val-fraction"
            )
    return dataset


def _from_text(config: DataConfig) -> Dataset:
    files = user_files(config.path) if config.path else corpus_files(config.corpus)
    digest, characters, alphabet = hashlib.sha256(), 0, set()
    for piece in read_text(files):
        text = "\n" if piece is None else piece
        digest.update(text.encode())
        characters += len(text)
        if config.tokenizer == "char":
            alphabet.update(text)
    if not characters:
        raise UserError(f"{config.path or config.corpus} is empty: there is nothing to learn from")
    train_characters = int(characters * (1.0 - config.val_fraction))

    spec = {
        "meta": "val_bytes",  # what meta.json has had since: a directory without it has another key
        "text": digest.hexdigest(),
        "train_characters": train_characters,
        "tokenizer": config.tokenizer,
    }
    ready: tok.Tokenizer | None = None
    if config.tokenizer == "char":
        ready = tok.CharTokenizer(alphabet)
    elif config.tokenizer == "byte":
        ready = tok.ByteTokenizer()
    elif config.tokenizer == "bpe":
        spec["bpe_vocab_size"] = config.bpe_vocab_size
    elif config.tokenizer == "ids":
        raise UserError("tokenizer ids is for .bin token files; a text needs char, byte, bpe or a tokenizer.json")
    else:
        ready = tok.load_tokenizer(config.tokenizer)
        spec["tokenizer"] = tok.fingerprint(ready)

    key = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:24]
    directory = cache_directory() / "tokens" / key
    cached = _read_tokens(directory)
    if cached is None:
        if ready is None:
            train_text = (p for split, p in _split(read_text(files), train_characters) if split == "train" and p)
            ready = tok.train_bpe(train_text, config.bpe_vocab_size)
        _write_tokens(directory, files, train_characters, ready)
        cached = _read_tokens(directory)
        assert cached is not None
    return dataclasses.replace(cached, val_characters=characters - train_characters)


def _read_tokens(directory: Path) -> Dataset | None:
    """What `_write_tokens` wrote, if its bytes are still those. What is damaged is said, and moved out of the way."""
    if not directory.exists():
        return None
    try:
        meta = read_json(directory / "meta.json", 2**20)
        fingerprint = meta["fingerprint"]
        for split in ("train", "val"):
            if sha256(directory / f"{split}.bin") != fingerprint[f"{split}_sha256"]:
                raise UserError(f"{split}.bin is not what was written")
        tokenizer = tok.load_tokenizer(directory / "tokenizer.json")
        if tok.fingerprint(tokenizer) != fingerprint["tokenizer_sha256"]:
            raise UserError("tokenizer.json is not what was written")
        dtype = _dtype(tokenizer)
        train, val = (np.memmap(directory / f"{split}.bin", dtype=dtype, mode="r") for split in ("train", "val"))
        val_bytes = meta["val_bytes"]
        counts = fingerprint["train_tokens"], fingerprint["val_tokens"]
        if (len(train), len(val)) != counts or type(val_bytes) is not int or val_bytes < 1:
            raise UserError("meta.json is not what was written")
    except (ValueError, KeyError, TypeError) as e:
        warnings.warn(f"the cached tokens in {directory} are damaged ({e}): made anew", stacklevel=2)
        with contextlib.suppress(FileNotFoundError):  # another process was first
            aside = tempfile.mkdtemp(dir=directory.parent, prefix="damaged.")
            os.replace(directory, aside)
            shutil.rmtree(aside, ignore_errors=True)
        return None
    return Dataset(
        train=Tokens([train]),
        val=Tokens([val]),
        tokenizer=tokenizer,
        val_characters=None,
        val_bytes=val_bytes,
        fingerprint=fingerprint,
    )


def _dtype(tokenizer: tok.Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def _write_tokens(directory: Path, files: list[Path], train_characters: int, tokenizer: tok.Tokenizer) -> None:
    """Stream the text into train.bin and val.bin beside the tokenizer; the directory appears whole or not at all."""
    make_cache(directory.parent)
    dtype = _dtype(tokenizer)

    def encode(text: str | None) -> np.ndarray:
        if text is None and tokenizer.end_of_text is not None:
            return np.array([tokenizer.end_of_text])
        return tokenizer.encode("\n" if text is None else text)

    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=directory.name + "."))
    try:
        counts, digests = {"train": 0, "val": 0}, {"train": hashlib.sha256(), "val": hashlib.sha256()}
        lengths = {"train": 0, "val": 0}  # bytes of UTF-8
        with contextlib.ExitStack() as stack:
            out = {s: stack.enter_context((partial / f"{s}.bin").open("wb")) for s in counts}
            for split, text in _split(read_text(files), train_characters):
                ids = encode(text).astype(dtype).tobytes()
                out[split].write(ids)
                digests[split].update(ids)
                counts[split] += len(ids) // dtype.itemsize
                lengths[split] += len(("\n" if text is None else text).encode())
        for split, count in counts.items():
            if not count:
                raise UserError(f"the {split} split is empty: the text is too short to split")
        (partial / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        meta = {"fingerprint": _fingerprint(counts, digests, tokenizer), "val_bytes": lengths["val"]}
        (partial / "meta.json").write_text(json.dumps(meta))
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if not (directory / "meta.json").is_file():  # another process may have been first with the same tokens
            raise


def _split(pieces: Iterable[str | None], train_characters: int) -> Iterator[tuple[str, str | None]]:
    """("train" | "val", piece) by character position. None, the end of a document, is one character.

    Pieces end after a newline where they can, so that BPE never meets a word cut in two by our reading.
    """
    at, kept = 0, ""

    def parts(text: str | None) -> Iterator[tuple[str, str | None]]:
        nonlocal at
        length = 1 if text is None else len(text)
        head = max(0, min(length, train_characters - at))
        if text is None:
            yield ("train" if head else "val"), None
        else:
            if head:
                yield "train", text[:head]
            if head < length:
                yield "val", text[head:]
        at += length

    for piece in pieces:
        if piece is None:
            if kept:
                yield from parts(kept)
            kept = ""
            yield from parts(None)
            continue
        piece = kept + piece
        cut = piece.rfind("\n") + 1 or len(piece)
        kept = piece[cut:]
        if cut:
            yield from parts(piece[:cut])
    if kept:
        yield from parts(kept)


def _fingerprint(counts: dict, digests: dict, tokenizer: tok.Tokenizer) -> dict:
    return {
        **{f"{split}_tokens": counts[split] for split in counts},
        **{f"{split}_sha256": digests[split].hexdigest() for split in digests},
        "tokenizer_sha256": tok.fingerprint(tokenizer),
    }


def _from_bins(config: DataConfig, files: list[Path], vocab_size: int | None) -> Dataset:
    """nanoGPT's train.bin and val.bin (bare uint16), or llm.c's shards with a header (`*_val_*.bin` is held out)."""
    if config.tokenizer in ("char", "bpe"):
        raise UserError(
            f"{config.path} is token ids, which tokenizer={config.tokenizer} cannot read: give the one they were made with "
            "(--data.tokenizer tokenizer.json, or byte), or --data.tokenizer ids with --model.vocab-size N"
        )
    if config.tokenizer == "ids":
        if vocab_size is None:
            raise UserError("tokenizer ids needs --model.vocab-size N: token files do not say how many ids there are")
        tokenizer: tok.Tokenizer = tok.IdTokenizer(vocab_size)
    else:
        tokenizer = tok.ByteTokenizer() if config.tokenizer == "byte" else tok.load_tokenizer(config.tokenizer)

    train = [f for f in files if "val" not in f.stem]
    if not train:
        raise UserError(f"{config.path} has validation shards only ({files[0].name}): training needs some too")
    shards = {f: open_shard(f) for f in files}
    limit = max(tokenizer.vocab_size, vocab_size or 0)
    held = {f.name: scan(f, tokens, limit) for f, tokens in shards.items()}
    before, after = [shards[f] for f in train], [shards[f] for f in files if f not in train]
    if not after:
        before, after = cut(before, int(sum(map(len, before)) * (1.0 - config.val_fraction)))
    train_tokens, val_tokens = Tokens(before), Tokens(after)
    return Dataset(
        train=train_tokens,
        val=val_tokens,
        tokenizer=tokenizer,
        val_characters=None,
        val_bytes=None,
        fingerprint={
            "train_tokens": len(train_tokens),
            "val_tokens": len(val_tokens),
            "files": held,
            "tokenizer_sha256": tok.fingerprint(tokenizer),
        },
    )
