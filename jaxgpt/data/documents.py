"""Conversations and pairs of texts, prepared: documents of which parts are to be written."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.data import tokenizer as tok
from jaxgpt.data.bpe import train_bpe
from jaxgpt.data.cache import SPLITS, Cached, cached_at, changed, find_tokens, read_tokens, write_tokens
from jaxgpt.data.chat import template as chat_template
from jaxgpt.data.chat.conversations import Conversations, encode_all, read_messages
from jaxgpt.data.corpus import corpus_files
from jaxgpt.data.pairs import END, START, Pairs, encode_pairs, read_pairs
from jaxgpt.data.tokens import Dataset
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, sha256

OF_DOCUMENTS = tuple(f"{split}{part}" for split in SPLITS for part in ("", "_answers", "_ends"))
FORMAT = 2  # of what the cache holds of conversations and pairs; raised when the same file gives other tokens


def from_documents(
    config: DataConfig, block_size: int, encoder: bool, prefixed: bool, known: dict[str, Any] | None = None
) -> Dataset:
    """Return the dataset of a file of conversations or pairs: see `dataset.prepare`."""
    what = "conversation" if config.is_chat else "pair"
    beside = None if config.tokenizer_file is None else Path(config.tokenizer_file).parent
    cached = None if known is None else find_tokens(known, OF_DOCUMENTS)
    arrays, tokenizer, fingerprint, _ = cached or _tokenised(config, beside, prefixed)
    path = config.path or config.corpus
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
    if prefixed and tokenizer.prefix:
        fingerprint = fingerprint | {
            "prefix": list(tokenizer.prefix)
        }  # earlier versions wrote none: see `RunMetadata.prefixed`
    dataset = Dataset(
        train=train, val=val, tokenizer=tokenizer, fingerprint=fingerprint, said=tuple(_about(train, val, what))
    )
    if not config.is_chat:
        return dataset
    template = chat_template.find_template(tokenizer, beside, prefixed=prefixed)
    told = {"template_sha256": chat_template.fingerprint(template)}
    return dataclasses.replace(dataset, fingerprint=fingerprint | told, tokenizer_config=template.config())


def _tokenised(config: DataConfig, beside: Path | None, prefixed: bool) -> Cached:
    """Return the tokens of the file, from the cache or made for it. beside: where the tokenizer's file lies."""
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
    spec: dict[str, Any] = {what: FORMAT, "file": sha256(path), "val_fraction": config.val_fraction}
    spec |= {"tokenizer": named} if ready is None else {"tokenizer": tok.fingerprint(ready)}
    spec |= {"bpe_vocab_size": config.bpe_vocab_size} if named == "bpe" else {}
    if config.is_chat and ready is not None:
        spec["template"] = chat_template.fingerprint(chat_template.find_template(ready, beside, prefixed=prefixed))
    elif ready is not None and prefixed and ready.prefix:
        spec["prefix"] = ready.prefix

    directory = cached_at(spec)
    cached = read_tokens(directory, OF_DOCUMENTS)
    if cached is None:
        alphabet, count = set[str](), 0
        for texts in _texts(config, path):  # a bad line raises here, before the good ones are encoded
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
            ready = train_bpe(itertools.chain.from_iterable(first), config.bpe_vocab_size)
        encoded = (
            encode_all(path, ready, chat_template.find_template(ready, beside, prefixed=prefixed))
            if config.is_chat
            else encode_pairs(path, ready, prefixed=prefixed)
        )
        pieces = _unless_changed(_by_split(encoded, train), path, spec["file"])
        write_tokens(directory, ready, pieces, OF_DOCUMENTS)
        cached = read_tokens(directory, OF_DOCUMENTS)
        assert cached is not None
    return cached


def _unless_changed(
    pieces: Iterable[tuple[str, np.ndarray]], path: str, digest: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Pass on what a file was made into. Raises `UserError` at the end if it has another SHA-256 by then."""
    yield from pieces
    if sha256(path) != digest:
        raise changed(path)


def _texts(config: DataConfig, path: str) -> Iterator[list[str]]:
    """Yield the texts of each document."""
    if config.is_chat:
        return ([m["content"] for m in messages] for _, messages in read_messages(path))
    return (texts for _, *texts in read_pairs(path))


def _about(train: Conversations, val: Conversations, what: str) -> Iterator[str]:
    n, m, block_size = len(train.lengths), len(val.lengths), train.block_size
    filled = train.packing.filled
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
