"""Prepare the dataset of a configuration: encode its text once and split it by position."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig, GPTConfig
from jaxgpt.data.bpe import train_bpe
from jaxgpt.data.cache import SPLITS, CachedTokens, cache_entry, change_error, find_tokens, read_tokens, write_tokens
from jaxgpt.data.corpus import find_corpus_files, find_user_files, read_text
from jaxgpt.data.documents import prepare_documents
from jaxgpt.data.shards import find_shards, prepare_shards
from jaxgpt.data.tokenizer import CharTokenizer, Tokenizer, fingerprint, open_tokenizer
from jaxgpt.data.tokens import Dataset, Tokens
from jaxgpt.data.workers import count_cores, encode_in_order
from jaxgpt.errors import UserError
from jaxgpt.files import is_there

LOG = logging.getLogger(__name__)
# Characters; encoding a text of at least this length repays starting a process per core, and is reported.
FOR_ALL_CORES = 2**25
REPORT_EVERY = 5.0  # seconds between lines that tell how much of a text is read
Cut = tuple[int, tuple[str, ...]]  # characters of a document for training, and the splits that get a token for its end
TEXT_FORMAT = 2  # version of cached texts; increased when the same text gives other tokens


def prepare(
    config: DataConfig,
    *,
    block_size: int,
    vocab_size: int | None = None,
    encoder: bool = False,
    with_prefix: bool = True,
    known: dict[str, Any] | None = None,
) -> Dataset:
    """Return the dataset of a configuration. Text is encoded once and cached as memory-mapped token files.

    The split is by position: the last `val_fraction` of the characters of each file is held out. For .bin files without
    one for validation it is a fraction of the tokens, for conversations and pairs a fraction of their number.

    Args:
        config: the data and their tokenizer.
        block_size: tokens per window. Each split needs at least `block_size + 1`.
        vocab_size: the model's vocabulary size, which tokenizer "ids" needs.
        encoder: whether the source of a pair goes to an encoder. Otherwise source and target are one text.
        with_prefix: whether conversations and pairs begin with the tokenizer's prefix.
        known: fingerprint of an earlier dataset, to split as it was split. Earlier versions held out the last part of a
            folder. Unless `config.path` names an existing file, cached tokens with this fingerprint are used instead
            of the text.

    Raises:
        UserError: there is no text, it is not UTF-8, or a split is shorter than one window.
    """
    by_file = known is None or "split" in known
    if config.path is not None and is_there(Path(config.path), "Name another text with --data.path."):
        known = None
    if config.is_packed:
        return prepare_documents(config, block_size, encoder, with_prefix, known)
    if known is not None and (cached := find_tokens(known)) is not None:
        return _from_cache(cached)
    shards = find_shards(config.path)
    dataset = prepare_shards(config, shards, vocab_size) if shards else _from_text(config, by_file)
    source = config.path or config.corpus
    for name, tokens in (("training", dataset.train), ("validation", dataset.val)):
        if len(tokens) <= block_size:
            raise UserError(
                f"the {name} split of {source} has {len(tokens)} tokens, needed {block_size + 1} for one window of "
                f"block_size={block_size}: give more text, a smaller --model.block-size, or another --data.val-fraction"
            )
    return dataset


def prepare_for(
    model: GPTConfig, data: DataConfig, *, with_prefix: bool = True, known: dict[str, Any] | None = None
) -> Dataset:
    """Return the dataset for training a model: see `prepare`."""
    return prepare(
        data,
        block_size=model.block_size,
        vocab_size=model.vocab_size,
        encoder=model.n_encoder_layer > 0,
        with_prefix=with_prefix,
        known=known,
    )


def _from_text(config: DataConfig, by_file: bool) -> Dataset:
    name, source = config.tokenizer, config.path or config.corpus
    text = _Text(find_user_files(config.path) if config.path else find_corpus_files(config.corpus), source)
    tokenizer = open_tokenizer(name, "a text needs")
    lengths, alphabet = [0], set[str]()
    for piece in text:
        if piece is None:
            lengths.append(0)
        else:
            lengths[-1] += len(piece)
        if name == "char":
            alphabet.update("\n" if piece is None else piece)
    characters = sum(lengths) + len(lengths) - 1
    if not characters:
        raise UserError(f"{source} is empty: there is nothing to learn from")
    if name == "char":
        tokenizer = CharTokenizer(alphabet)
    by_file = by_file and len(lengths) > 1
    cuts = _cut(lengths, 1.0 - config.val_fraction, by_file=by_file)
    train_characters = int(characters * (1.0 - config.val_fraction))
    spec = {
        "format": TEXT_FORMAT,
        "text": text.digest,
        "train_characters": [cut for cut, _ in cuts] if by_file else train_characters,
        "tokenizer": name if config.tokenizer_file is None or tokenizer is None else fingerprint(tokenizer),
    }
    if name == "bpe":
        spec["bpe_vocab_size"] = config.bpe_vocab_size
    directory = cache_entry(spec)
    cached = read_tokens(directory)
    if cached is None:
        if tokenizer is None:
            text.task = "learning the tokens of"
            train_text = (piece for split, piece in _split(text, cuts) if split == "train" and piece)
            tokenizer = train_bpe(train_text, config.bpe_vocab_size)
        text.task = "encoding"
        counts = {"val_bytes": 0, "val_characters": 0}
        workers = count_cores() if characters >= FOR_ALL_CORES else 1
        pieces = _to_encode(text, cuts, tokenizer.end_of_text, counts)
        cached = write_tokens(directory, tokenizer, encode_in_order(pieces, tokenizer, workers), counts=counts)
    dataset = _from_cache(cached)
    return dataclasses.replace(dataset, fingerprint=dataset.fingerprint | ({"split": "by file"} if by_file else {}))


def _from_cache(cached: CachedTokens) -> Dataset:
    return Dataset(
        train=Tokens([cached.arrays["train"]]),
        val=Tokens([cached.arrays["val"]]),
        tokenizer=cached.tokenizer,
        val_characters=cached.counts.get("val_characters"),
        val_bytes=cached.counts.get("val_bytes"),
        fingerprint=cached.fingerprint,
    )


class _Text:
    """The text of files in pieces, with None between two files. Every reading must give the same SHA-256.

    A long reading logs what it is for, `task`, and how far it has come.
    """

    def __init__(self, files: list[Path], source: str):
        self._files, self._source, self.digest, self.task = files, source, "", "reading"

    def __iter__(self) -> Iterator[str | None]:
        size = sum(file.stat().st_size for file in self._files)
        if size >= FOR_ALL_CORES:
            self._report(f"{size / 1e6:,.0f} MB")
        digest, done, reported = hashlib.sha256(), 0, time.monotonic()
        for piece in read_text(self._files):
            # Hash the end of a document as a byte that never occurs in UTF-8.
            raw = b"\xff" if piece is None else piece.encode()
            digest.update(raw)
            yield piece
            done += len(raw)
            if time.monotonic() - reported > REPORT_EVERY:
                self._report(f"{done / size:.0%}")
                reported = time.monotonic()
        if self.digest not in ("", digest.hexdigest()):
            raise change_error(self._source)
        self.digest = digest.hexdigest()

    def _report(self, progress: str) -> None:
        LOG.warning("%s %s: %s", self.task, self._source, progress)  # of this level, so that it is shown by default


def _to_encode(
    pieces: Iterable[str | None], cuts: list[Cut], end_of_text: int | None, counts: dict[str, int]
) -> Iterator[tuple[str, str | np.ndarray]]:
    """Yield (split, text or ids), and add the size of the validation split to `counts`."""
    for split, piece in _split(pieces, cuts):
        text = "\n" if piece is None else piece
        if split == "val":
            counts["val_bytes"] += len(text.encode())
            counts["val_characters"] += len(text)
        yield split, np.array([end_of_text]) if piece is None and end_of_text is not None else text


def _cut(lengths: list[int], share: float, *, by_file: bool) -> list[Cut]:
    """Return where to cut documents of these lengths. Without `by_file` all are one text, and an end is a character."""
    if by_file:
        return [(int(length * share), SPLITS) for length in lengths]
    cuts, left = [], int((sum(lengths) + len(lengths) - 1) * share)
    for length in lengths:
        cuts.append((max(left, 0), SPLITS[:1] if left > length else SPLITS[1:]))
        left -= length + 1
    return cuts


def _split(pieces: Iterable[str | None], cuts: list[Cut]) -> Iterator[tuple[str, str | None]]:
    """Yield ("train" or "val", piece). None is the end of a document."""
    of_documents = iter(cuts)
    left, ends = next(of_documents)
    for piece in _whole_lines(pieces):
        if piece is None:
            yield from ((split, None) for split in ends)
            left, ends = next(of_documents)
        else:
            if piece[:left]:
                yield "train", piece[:left]
            if piece[left:]:
                yield "val", piece[left:]
            left = max(left - len(piece), 0)


def _whole_lines(pieces: Iterable[str | None]) -> Iterator[str | None]:
    """Move the ends of pieces to newlines where possible, so that reading in pieces cuts no word in two for BPE."""
    rest = ""
    for piece in pieces:
        if piece is None:
            yield from (rest, None) if rest else (None,)
            rest = ""
        else:
            text = rest + piece
            end = text.rfind("\n") + 1 or len(text)
            rest = text[end:]
            if end:
                yield text[:end]
    if rest:
        yield rest


def encode_whole(files: list[Path], tokenizer: Tokenizer) -> tuple[np.ndarray, str]:
    """Return (ids, text) of files to evaluate, both in memory, with files separated as for training."""
    documents = ["".join(piece for piece in read_text([file]) if piece) for file in files]
    text, end = "\n".join(documents), tokenizer.end_of_text
    if end is None:
        return tokenizer.encode(text), text
    ids = [part for document in documents for part in (tokenizer.encode(document), np.array([end], np.int32))]
    return np.concatenate(ids[:-1]), text


def resolve_vocab(model: GPTConfig, tokenizer: Tokenizer) -> GPTConfig:
    """Return the model with its vocabulary size set to the tokenizer's, unless it has a larger (padded) one."""
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    if model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}: "
            f"take {tokenizer.vocab_size} or more, or leave it out"
        )
    return model
