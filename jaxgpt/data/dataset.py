"""Token files on disk and the fixed split: what a run trains and validates on."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig, Experiment, GPTConfig
from jaxgpt.data import tokenizer as tok
from jaxgpt.data.bpe import train_bpe
from jaxgpt.data.cache import Cached, cached_at, changed, find_tokens, read_tokens, write_tokens
from jaxgpt.data.corpus import corpus_files, read_text, user_files
from jaxgpt.data.documents import from_documents
from jaxgpt.data.shards import bin_files, cut, open_shard, scan
from jaxgpt.data.tokens import Dataset, Tokens
from jaxgpt.data.workers import cores, encode_in_order
from jaxgpt.errors import UserError
from jaxgpt.files import is_there

FOR_ALL_CORES = 2**25  # characters of a text from which on a process for each core is worth its start
TEXT_FORMAT = 2  # of what the cache holds of texts; raised when the same text gives other tokens
HELD_OUT = re.compile(r"(?<![a-z])val(id(ation)?)?(?![a-z])", re.IGNORECASE)  # in the name of a token file


def prepare(
    config: DataConfig,
    *,
    block_size: int,
    vocab_size: int | None = None,
    encoder: bool = False,
    prefixed: bool = True,
    known: dict[str, Any] | None = None,
) -> Dataset:
    """The dataset of a configuration; text is tokenised once and kept in the cache as memory-mapped token files.

    The split is by position: the last `val_fraction` of the characters (of the tokens, for a .bin without a
    validation file; of conversations and pairs, of their number) is held out. vocab_size: the model's, which tokenizer
    "ids" needs. encoder: sources of pairs go to an encoder, apart from their targets; else both are one text.
    prefixed: conversations and pairs begin with the tokens that the tokenizer begins texts with; see `RunMetadata.prefixed`.
    known: the fingerprint of what it gave before. Where no path is named, or nothing is there any more, the tokens in the
    cache with that fingerprint are enough.
    Raises `UserError` if there is no text, it is not UTF-8, or a split is shorter than one window.
    """
    if config.path is not None and is_there(Path(config.path), "Name another text with --data.path."):
        known = None
    if config.is_packed:
        return from_documents(config, block_size, encoder, prefixed, known)
    if known is not None and (cached := find_tokens(known)) is not None:
        return _of_text(cached)
    shards = bin_files(config.path)
    if config.path and len(shards) and config.tokenizer != "ids":
        _refuse_both(Path(config.path), shards)
    dataset = _from_bins(config, shards, vocab_size) if shards else _from_text(config)
    source = config.path or config.corpus
    for name, tokens in (("training", dataset.train), ("validation", dataset.val)):
        if len(tokens) <= block_size:
            raise UserError(
                f"the {name} split of {source} has {len(tokens)} tokens, needed {block_size + 1} for one window of "
                f"block_size={block_size}: give more text, a smaller --model.block-size, or another --data.val-fraction"
            )
    return dataset


def prepare_for(
    model: GPTConfig, data: DataConfig, *, prefixed: bool = True, known: dict[str, Any] | None = None
) -> Dataset:
    """Prepare the dataset that a model is trained on: see `prepare`."""
    return prepare(
        data,
        block_size=model.block_size,
        vocab_size=model.vocab_size,
        encoder=model.n_encoder_layer > 0,
        prefixed=prefixed,
        known=known,
    )


def _from_text(config: DataConfig) -> Dataset:
    files = user_files(config.path) if config.path else corpus_files(config.corpus)
    digest, characters, seen = hashlib.sha256(), 0, np.zeros(sys.maxunicode + 1, bool)
    for piece in read_text(files):
        text = "\n" if piece is None else piece
        digest.update(_hashed(piece))
        characters += len(text)
        if config.tokenizer == "char":
            seen[tok.code_points(text)] = True
    if not characters:
        raise UserError(f"{config.path or config.corpus} is empty: there is nothing to learn from")
    train_characters = int(characters * (1.0 - config.val_fraction))

    spec = {
        "format": TEXT_FORMAT,
        "text": digest.hexdigest(),
        "train_characters": train_characters,
        "tokenizer": config.tokenizer,
    }
    ready: tok.Tokenizer | None = None
    if config.tokenizer == "char":
        ready = tok.CharTokenizer(map(chr, np.flatnonzero(seen)))
    elif config.tokenizer == "byte":
        ready = tok.ByteTokenizer()
    elif config.tokenizer == "bpe":
        spec["bpe_vocab_size"] = config.bpe_vocab_size
    elif config.tokenizer == "ids":
        raise UserError("tokenizer ids is for .bin token files; a text needs char, byte, bpe or a tokenizer.json")
    else:
        ready = tok.load_tokenizer(config.tokenizer)
        spec["tokenizer"] = tok.fingerprint(ready)

    def again() -> Iterator[str | None]:
        """Read the text once more. Raises `UserError` where it is not the text of the digest, and so of the cache's key."""
        other = hashlib.sha256()
        for piece in read_text(files):
            other.update(_hashed(piece))
            yield piece
        if other.digest() != digest.digest():
            raise changed(config.path or config.corpus)

    directory = cached_at(spec)
    cached = read_tokens(directory)
    if cached is None:
        if ready is None:
            train_text = (p for split, p in _split(again(), train_characters) if split == "train" and p)
            ready = train_bpe(train_text, config.bpe_vocab_size)
        counted = {"val_bytes": 0, "val_characters": characters - train_characters}
        workers = cores() if characters >= FOR_ALL_CORES else 1
        write_tokens(directory, ready, _encoded(again(), train_characters, ready, counted, workers), about=counted)
        cached = read_tokens(directory)
        assert cached is not None
    return _of_text(cached, characters - train_characters)


def _of_text(cached: Cached, val_characters: int | None = None) -> Dataset:
    arrays, tokenizer, fingerprint, about = cached
    return Dataset(
        train=Tokens([arrays["train"]]),
        val=Tokens([arrays["val"]]),
        tokenizer=tokenizer,
        val_characters=val_characters or about.get("val_characters"),
        val_bytes=about.get("val_bytes"),
        fingerprint=fingerprint,
    )


def encode_whole(files: list[Path], tokenizer: tok.Tokenizer) -> tuple[np.ndarray, str]:
    """Return (ids, text) of a text to evaluate, in memory: between two files stands what training has there."""
    documents = ["".join(piece for piece in read_text([file]) if piece) for file in files]
    text, end = "\n".join(documents), tokenizer.end_of_text
    if end is None:
        return tokenizer.encode(text), text
    ids = [part for document in documents for part in (tokenizer.encode(document), np.array([end], np.int32))]
    return np.concatenate(ids[:-1]), text


def _hashed(piece: str | None) -> bytes:
    """Return what a piece of text adds to the digest. The end of a document is a byte that UTF-8 does not have."""
    return b"\xff" if piece is None else piece.encode()


def _encoded(
    pieces: Iterable[str | None],
    train_characters: int,
    tokenizer: tok.Tokenizer,
    counted: dict[str, int],
    workers: int,
) -> Iterator[tuple[str, np.ndarray]]:
    """(split, the ids that come next in it). counted: to its val_bytes are added those of the validation split."""

    def texts() -> Iterator[tuple[str, str | np.ndarray]]:
        for split, text in _split(pieces, train_characters):
            if split == "val":
                counted["val_bytes"] += len(("\n" if text is None else text).encode())
            if text is None and tokenizer.end_of_text is not None:
                yield split, np.array([tokenizer.end_of_text])
            else:
                yield split, "\n" if text is None else text

    return encode_in_order(texts(), tokenizer, workers)


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


def _refuse_both(root: Path, shards: list[Path]) -> None:
    """Raise `UserError` for a folder of token files in which there are texts as well."""
    text = next((p for p in sorted(root.rglob("*.txt")) if p.is_file()), None) if root.is_dir() else None
    if text is not None:
        raise UserError(
            f"{root} has both token files ({shards[0].name}) and texts ({text.relative_to(root)}): give the path of one "
            "file, put one kind elsewhere, or give --data.tokenizer ids to read the token files"
        )


def _from_bins(config: DataConfig, files: list[Path], vocab_size: int | None) -> Dataset:
    """nanoGPT's train.bin and val.bin (bare uint16), or llm.c's shards with a header.

    Files with the word val, valid or validation in their names are held out; without any, the end of the tokens is.
    """
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

    train = [f for f in files if not HELD_OUT.search(f.stem)]
    if not train:
        raise UserError(f"{config.path} has validation shards only ({files[0].name}): training needs some too")
    shards = {f: open_shard(f) for f in files}
    limit = max(tokenizer.vocab_size, vocab_size or 0)
    held = {f.name: scan(f, tokens, limit) for f, tokens in shards.items()}
    val = [f for f in files if f not in train]
    before, after = [shards[f] for f in train], [shards[f] for f in val]
    said: tuple[str, ...] = ()
    if val:
        more = f" and {len(val) - 3} more" if len(val) > 3 else ""
        said = (f"held out for validation: {', '.join(f.name for f in val[:3])}{more}",)
    else:
        if len(files) > 1:
            said = (
                f"no file is named val: of the {len(files)} files the last {100 * config.val_fraction:g}% of the tokens are "
                "held out",
            )
        before, after = cut(before, int(sum(map(len, before)) * (1.0 - config.val_fraction)))
    train_tokens, val_tokens = Tokens(before), Tokens(after)
    return Dataset(
        train=train_tokens,
        val=val_tokens,
        tokenizer=tokenizer,
        fingerprint={
            "train_tokens": len(train_tokens),
            "val_tokens": len(val_tokens),
            "files": held,
            "tokenizer_sha256": tok.fingerprint(tokenizer),
        },
        said=said,
    )


def resolve_vocab(model: GPTConfig, tokenizer: tok.Tokenizer) -> GPTConfig:
    """The model with its vocabulary known: the tokenizer's, unless a larger (padded) one was asked for."""
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    if model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}: "
            f"take {tokenizer.vocab_size} or more, or leave it out"
        )
    return model


def vocabulary(experiment: Experiment) -> int:
    """The size of the vocabulary with which an experiment would train; reads its text only if it must."""
    model = experiment.model
    if model.vocab_size is not None:
        return model.vocab_size
    vocab_size = resolve_vocab(model, prepare_for(model, experiment.data).tokenizer).vocab_size
    assert vocab_size is not None
    return vocab_size
