"""Token files on disk and the fixed split: what a run trains and validates on."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.data import template as chat_template
from jaxgpt.data import tokenizer as tok
from jaxgpt.data.cache import SPLITS, read_tokens, write_tokens
from jaxgpt.data.chat import Conversations, encode_all, read_messages
from jaxgpt.data.corpus import corpus_files, read_text, user_files
from jaxgpt.data.packing import Packing
from jaxgpt.data.pairs import END, START, Pairs, encode_pairs, read_pairs
from jaxgpt.data.shards import bin_files, cut, open_shard, scan
from jaxgpt.data.workers import cores, encode_in_order
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, sha256
from jaxgpt.paths import cache_directory

OF_DOCUMENTS = tuple(f"{split}{part}" for split in SPLITS for part in ("", "_answers", "_ends"))
FOR_ALL_CORES = 2**25  # characters of a text from which on a process for each core is worth its start
# Of what the cache holds: raised when the same text, or the same conversations or pairs, give other tokens.
TEXT_FORMAT = 2
DOCUMENT_FORMAT = 2
HELD_OUT = re.compile(r"(?<![a-z])val(id(ation)?)?(?![a-z])", re.IGNORECASE)  # in the name of a token file


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

    train: Tokens | Conversations
    val: Tokens | Conversations
    tokenizer: tok.Tokenizer
    val_characters: int | None = None  # for bits per character; None where the text is not known
    val_bytes: int | None = None  # of the same text in UTF-8, for bits per byte
    fingerprint: dict  # tokens of both splits; SHA-256 of both or, of .bin shards, of each file; and of the tokenizer
    # the chat template that came with the tokenizer, as tokenizer_config.json has it; empty: there was none
    tokenizer_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    said: tuple[str, ...] = ()  # what the user should know about it


def prepare(config: DataConfig, *, block_size: int, vocab_size: int | None = None, encoder: bool = False) -> Dataset:
    """The dataset of a configuration; text is tokenised once and kept in the cache as memory-mapped token files.

    The split is by position: the last `val_fraction` of the characters (of the tokens, for a .bin without a
    validation file; of conversations and pairs, of their number) is held out. vocab_size: the model's, which tokenizer
    "ids" needs. encoder: sources of pairs go to an encoder, apart from their targets; else both are one text.
    Raises `UserError` if there is no text, it is not UTF-8, or a split is shorter than one window.
    """
    if config.is_packed:
        return _from_documents(config, block_size, encoder)
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
            raise _changed(config.path or config.corpus)

    directory = _cached_at(spec)
    cached = read_tokens(directory)
    if cached is None:
        if ready is None:
            train_text = (p for split, p in _split(again(), train_characters) if split == "train" and p)
            ready = tok.train_bpe(train_text, config.bpe_vocab_size)
        counted = {"val_bytes": 0}
        workers = cores() if characters >= FOR_ALL_CORES else 1
        write_tokens(directory, ready, _encoded(again(), train_characters, ready, counted, workers), about=counted)
        cached = read_tokens(directory)
        assert cached is not None
    arrays, tokenizer, fingerprint, about = cached
    return Dataset(
        train=Tokens([arrays["train"]]),
        val=Tokens([arrays["val"]]),
        tokenizer=tokenizer,
        val_characters=characters - train_characters,
        val_bytes=about["val_bytes"],
        fingerprint=fingerprint,
    )


def _from_documents(config: DataConfig, block_size: int, encoder: bool) -> Dataset:
    """Conversations, or pairs: documents of which parts are to be written."""
    path, named = config.path or str(corpus_files(config.corpus)[0]), config.tokenizer
    what = "conversation" if config.is_chat else "pair"
    if not is_there(Path(path), f"Give the path of a {Path(path).suffix} file.") or Path(path).is_dir():
        raise UserError(
            f"no file at {path}: --data.path NAME{Path(path).suffix} takes a file with a {what} on each line"
        )
    ready: tok.Tokenizer | None = None
    if named not in ("char", "bpe"):
        if named == "ids":
            raise UserError(f"tokenizer ids is for .bin token files; {what}s need char, byte, bpe or a tokenizer.json")
        ready = tok.ByteTokenizer() if named == "byte" else tok.load_tokenizer(named)
    beside = Path(named).parent if named not in ("char", "byte", "bpe") else None
    spec: dict[str, Any] = {what: DOCUMENT_FORMAT, "file": sha256(path), "val_fraction": config.val_fraction}
    spec |= {"tokenizer": named} if ready is None else {"tokenizer": tok.fingerprint(ready)}
    spec |= {"bpe_vocab_size": config.bpe_vocab_size} if named == "bpe" else {}
    if config.is_chat and ready is not None:
        spec["template"] = chat_template.fingerprint(chat_template.find_template(ready, beside))

    directory = _cached_at(spec)
    cached = read_tokens(directory, OF_DOCUMENTS)
    if cached is None:
        alphabet, count = set[str](), 0
        for texts in _texts(config, path):  # so that a bad line is told before much is done with the good ones
            count += 1
            if named == "char":
                alphabet.update(*texts)
        train = int(count * (1.0 - config.val_fraction))
        if not 0 < train < count:
            raise UserError(f"{path} has {count} {what}s: needs at least one to train on and one to validate on")
        if named == "char":
            marks = chat_template.plain_characters() if config.is_chat else {START, END}
            ready = tok.CharTokenizer(alphabet | set(marks))
        elif ready is None:
            first = itertools.islice(_texts(config, path), train)
            ready = tok.train_bpe(itertools.chain.from_iterable(first), config.bpe_vocab_size)
        encoded = (
            encode_all(path, ready, chat_template.find_template(ready, beside))
            if config.is_chat
            else encode_pairs(path, ready)
        )
        pieces = _unless_changed(_by_split(encoded, train), path, spec["file"])
        write_tokens(directory, ready, pieces, OF_DOCUMENTS)
        cached = read_tokens(directory, OF_DOCUMENTS)
        assert cached is not None
    arrays, tokenizer, fingerprint, _ = cached
    kind = Pairs if encoder else Conversations
    train, val = (
        kind(arrays[split], arrays[f"{split}_answers"], np.array(arrays[f"{split}_ends"]), block_size)
        for split in SPLITS
    )
    for name, documents in (("training", train), ("validation", val)):
        if not len(documents):
            fits = "an answer that ends" if config.is_chat else "texts that end"
            raise UserError(
                f"no {what} of the {name} split of {path} has {fits} within block_size={block_size} "
                f"tokens: raise --model.block-size, or give shorter {what}s"
            )
    dataset = Dataset(
        train=train, val=val, tokenizer=tokenizer, fingerprint=fingerprint, said=tuple(_about(train, val, what))
    )
    if not config.is_chat:
        return dataset
    template = chat_template.find_template(tokenizer, beside)
    told = {"template_sha256": chat_template.fingerprint(template)}
    return dataclasses.replace(dataset, fingerprint=fingerprint | told, tokenizer_config=template.config())


def _hashed(piece: str | None) -> bytes:
    """Return what a piece of text adds to the digest. The end of a document is a byte that UTF-8 does not have."""
    return b"\xff" if piece is None else piece.encode()


def _changed(source: str) -> UserError:
    return UserError(f"{source} changed while it was read: wait until nothing writes to it, then start again")


def _unless_changed(
    pieces: Iterable[tuple[str, np.ndarray]], path: str, digest: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Pass on what a file was made into. Raises `UserError` at the end if it has another SHA-256 by then."""
    yield from pieces
    if sha256(path) != digest:
        raise _changed(path)


def _cached_at(spec: dict[str, Any]) -> Path:
    """Return the directory of the tokens that `spec` describes: everything that decides them has to be in it."""
    key = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:24]
    return cache_directory() / "tokens" / key


def _texts(config: DataConfig, path: str) -> Iterator[list[str]]:
    """Of each document."""
    if config.is_chat:
        return ([m["content"] for m in messages] for _, messages in read_messages(path))
    return (texts for _, *texts in read_pairs(path))


def _about(train: Conversations, val: Conversations, what: str) -> Iterator[str]:
    n, m, block_size = len(train.lengths), len(val.lengths), train.block_size
    filled = Packing(train).filled
    yield f"{n:,} training and {m:,} validation {what}s, in rows of {block_size} tokens that are {filled:.1%} full"
    shortened, left_out = train.shortened + val.shortened, train.left_out + val.left_out
    if shortened or left_out:
        shorter = (
            f"of which {shortened:,} end after the last answer that fits, and {left_out:,}" if shortened else "which"
        )
        yield f"longer than block_size={block_size}: {shortened + left_out:,} {what}s, {shorter} are left out"


def _by_split(encoded: Iterable[tuple[np.ndarray, np.ndarray]], train: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name in OF_DOCUMENTS, what comes next in it), of which the first `train` documents are for training."""
    ends = dict.fromkeys(SPLITS, 0)
    for number, (ids, answers) in enumerate(encoded):
        split = SPLITS[number >= train]
        ends[split] += len(ids)
        yield split, ids
        yield f"{split}_answers", answers
        yield f"{split}_ends", np.array([ends[split]])


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
