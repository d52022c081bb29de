"""Prepare conversations and pairs: documents in which the model generates only some of the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.data.bpe import train_bpe
from jaxgpt.data.cache import SPLITS, CachedTokens, cache_entry, change_error, find_tokens, read_tokens, write_tokens
from jaxgpt.data.chat import template as chat_template
from jaxgpt.data.chat.conversations import Conversations, encode_all, read_messages
from jaxgpt.data.corpus import find_corpus_files
from jaxgpt.data.pairs import TARGET_END, TARGET_START, Pairs, encode_pairs, read_pairs
from jaxgpt.data.tokenizer import CharTokenizer, fingerprint, open_tokenizer
from jaxgpt.data.tokens import Dataset
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, sha256

OF_DOCUMENTS = tuple(f"{split}{part}" for split in SPLITS for part in ("", "_answers", "_ends"))
FORMAT = 2  # version of cached conversations and pairs; increased when the same file gives other tokens


def prepare_documents(
    config: DataConfig, block_size: int, encoder: bool, with_prefix: bool, known: dict[str, Any] | None
) -> Dataset:
    """Return the dataset of a file of conversations or pairs: see `dataset.prepare`."""
    kind = "conversation" if config.is_chat else "pair"
    tokenizer_directory = None if config.tokenizer_file is None else Path(config.tokenizer_file).parent
    cached = None if known is None else find_tokens(known, OF_DOCUMENTS)
    cached = cached or _encode_file(config, kind, tokenizer_directory, with_prefix)
    arrays, documents_of = cached.arrays, Pairs if encoder else Conversations
    train, val = (
        documents_of(arrays[split], arrays[f"{split}_answers"], arrays[f"{split}_ends"], block_size) for split in SPLITS
    )
    for name, documents in (("training", train), ("validation", val)):
        if not len(documents):
            fits = "an answer that ends" if config.is_chat else "texts that end"
            raise UserError(
                f"no {kind} of the {name} split of {config.path or config.corpus} has {fits} within "
                f"block_size={block_size} tokens: raise --model.block-size, or give shorter {kind}s"
            )
    made_of: dict[str, Any] = {}
    if with_prefix and cached.tokenizer.prefix:
        made_of["prefix"] = list(cached.tokenizer.prefix)
    tokenizer_config = None
    if config.is_chat:
        template = chat_template.find_template(cached.tokenizer, tokenizer_directory, with_prefix=with_prefix)
        made_of["template_sha256"], tokenizer_config = chat_template.fingerprint(template), template.config()
    return Dataset(
        train=train,
        val=val,
        tokenizer=cached.tokenizer,
        fingerprint=cached.fingerprint | made_of,
        tokenizer_config=tokenizer_config,
        notes=tuple(_describe(train, val, kind)),
    )


def _encode_file(config: DataConfig, kind: str, tokenizer_directory: Path | None, with_prefix: bool) -> CachedTokens:
    """Return the tokens of the file, cached or newly encoded."""
    path, name = config.path or str(find_corpus_files(config.corpus)[0]), config.tokenizer
    suffix = Path(path).suffix
    if not is_there(Path(path), f"Give the path of a {suffix} file.") or Path(path).is_dir():
        raise UserError(f"no file at {path}: --data.path NAME{suffix} takes a file with a {kind} on each line")
    tokenizer = open_tokenizer(name, f"{kind}s need")
    spec: dict[str, Any] = {kind: FORMAT, "file": sha256(path), "val_fraction": config.val_fraction}
    spec["tokenizer"] = name if tokenizer is None else fingerprint(tokenizer)
    spec |= {"bpe_vocab_size": config.bpe_vocab_size} if name == "bpe" else {}
    if config.is_chat and tokenizer is not None:
        template = chat_template.find_template(tokenizer, tokenizer_directory, with_prefix=with_prefix)
        spec["template"] = chat_template.fingerprint(template)
    elif tokenizer is not None and with_prefix and tokenizer.prefix:
        spec["prefix"] = tokenizer.prefix

    directory = cache_entry(spec)
    if (cached := read_tokens(directory, OF_DOCUMENTS)) is not None:
        return cached
    alphabet, count = set[str](), 0
    for texts in _texts(config, path):  # an invalid line raises here, before any is encoded
        count += 1
        if name == "char":
            alphabet.update(*texts)
    train = int(count * (1.0 - config.val_fraction))
    if not 0 < train < count:
        raise UserError(f"{path} has {count} {kind}s: needs at least one to train on and one to validate on")
    if name == "char":
        marks = chat_template.list_plain_characters() if config.is_chat else TARGET_START + TARGET_END
        tokenizer = CharTokenizer(alphabet | set(marks))
    elif tokenizer is None:
        first = itertools.islice(_texts(config, path), train)
        tokenizer = train_bpe(itertools.chain.from_iterable(first), config.bpe_vocab_size)
    if config.is_chat:
        template = chat_template.find_template(tokenizer, tokenizer_directory, with_prefix=with_prefix)
        encoded = encode_all(path, tokenizer, template)
    else:
        encoded = encode_pairs(path, tokenizer, with_prefix=with_prefix)
    return write_tokens(directory, tokenizer, _by_split(encoded, train, path, spec["file"]), OF_DOCUMENTS)


def _texts(config: DataConfig, path: str) -> Iterator[list[str]]:
    """Yield the texts of each document."""
    if config.is_chat:
        return ([m["content"] for m in messages] for _, messages in read_messages(path))
    return (texts for _, *texts in read_pairs(path))


def _by_split(
    encoded: Iterable[tuple[np.ndarray, np.ndarray]], train: int, path: str, digest: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name in OF_DOCUMENTS, its next values); the first `train` documents are for training.

    Raises `UserError` at the end if the SHA-256 of the file has changed.
    """
    ends = dict.fromkeys(SPLITS, 0)
    for number, (ids, answers) in enumerate(encoded):
        split = SPLITS[number >= train]
        ends[split] += len(ids)
        yield split, ids
        yield f"{split}_answers", answers
        yield f"{split}_ends", np.array([ends[split]])
    if sha256(path) != digest:
        raise change_error(path)


def _describe(train: Conversations, val: Conversations, kind: str) -> Iterator[str]:
    """Yield the lines to print before training."""
    n, m, block_size = len(train.lengths), len(val.lengths), train.block_size
    filled = train.packing.filled
    yield f"{n:,} training and {m:,} validation {kind}s, in rows of {block_size} tokens that are {filled:.1%} full"
    shortened, left_out = train.shortened + val.shortened, train.left_out + val.left_out
    if shortened or left_out:
        ends = f"of which {shortened:,} end after the last answer that fits, and {left_out:,}" if shortened else "which"
        yield f"longer than block_size={block_size}: {shortened + left_out:,} {kind}s, {ends} are left out"
