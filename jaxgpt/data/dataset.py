"""Open the data of a configuration: text and documents are encoded once, cached, and split by position."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config.serialize import Checked
from jaxgpt.config.validate import LARGEST_SIZE, Interval
from jaxgpt.data.corpus import SPLITS, fetch, find_copy, find_corpus_files, find_user_files, read_text
from jaxgpt.data.mixture import Mixture, read_mixture, recorded_sources
from jaxgpt.data.pipeline import Dataset, Tokens
from jaxgpt.data.shards import find_shards, make_index, open_shard, open_shards, read_index, save_index, write_shards
from jaxgpt.data.tokenizer import (
    CharTokenizer,
    TextEncoder,
    Tokenizer,
    fingerprint,
    load_tokenizer,
    open_tokenizer,
    token_dtype,
    train_bpe,
)
from jaxgpt.errors import UserError
from jaxgpt.files import Json, cache_directory, is_there, make_cache, read_json, sha256, write_whole
from jaxgpt.model import GPTConfig

LOG = logging.getLogger(__name__)
CHANGED = "{} changed while it was read: wait until nothing writes to it, then start again"
TEXT_FORMAT = 3  # version of cached texts. It is increased when the same text gives other tokens
DOCUMENT_FORMAT = 2  # version of cached conversations, likewise
SHARD_TOKENS = 2**24  # the most in a shard of the cache, of which one per array is in memory while it is written
Entry = tuple[dict[str, Tokens], Tokenizer, Json, dict[str, int]]  # see `read_entry`


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """The text or the conversations to learn from, and how a tokenizer turns them into ids.

    >>> DataConfig(path="chats.jsonl", tokenizer="byte").is_chat
    True
    """

    # built-in text: python-docs, shakespeare, sancho or quijote
    corpus: str = "python-docs"
    # your text: a UTF-8 file, a folder of .txt, .bin shards, .jsonl conversations, or a mixture a:0.7 b:0.3. None means corpus
    path: str | None = None
    tokenizer: str = "char"  # char, byte, bpe (trained on the text), ids, or the path of a tokenizer.json
    bpe_vocab_size: Annotated[int, Interval(ge=257, le=LARGEST_SIZE)] = 4096  # tokens of a BPE trained on the text
    # share of the characters of each file, or of all conversations, held out for validation: the last ones
    val_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in (self.path, self.tokenizer):
            raise UserError("data.path and data.tokenizer cannot be empty: name one, or leave the option out")

    @property
    def tokenizer_file(self) -> str | None:
        """The path of a tokenizer.json, if `tokenizer` is one, else None."""
        return None if self.tokenizer in ("char", "byte", "bpe", "ids") else self.tokenizer

    @property
    def is_chat(self) -> bool:
        """Return whether each line is a conversation, a JSON object with a list of "messages"."""
        return (self.path or self.corpus).endswith(".jsonl")

    @property
    def is_packed(self) -> bool:
        """Return whether rows hold several documents, with only parts of them as targets."""
        return self.is_chat

    def open_dataset(self, model: GPTConfig, *, known: Json | None = None) -> Dataset:
        """Return the dataset on which a model is trained. Text is encoded once and cached in files.

        The split is by position: see `val_fraction`, which is of the tokens if .bin files have none for validation.

        known: the fingerprint that a run to resume has recorded. Unless `path` names an existing file, cached tokens with
        it are used, and nothing is downloaded. Raises `UserError` without text, or for a split below one window.
        """
        return open_data(self, block_size=model.block_size, vocab_size=model.vocab_size, known=known)

    def shape_batch(self, tokens_BT: jax.ShapeDtypeStruct) -> Batch:
        """Return the shapes of a training batch, given the shapes of its tokens."""
        if not self.is_packed:
            return Batch(tokens_BT, tokens_BT)
        counted_BT = jax.ShapeDtypeStruct(tokens_BT.shape, bool, sharding=tokens_BT.sharding)
        return Batch(tokens_BT, tokens_BT, counted_BT, tokens_BT)


def open_data(
    config: DataConfig, *, block_size: int, vocab_size: int | None = None, known: Json | None = None
) -> Dataset:
    """Do as `DataConfig.open_dataset`, for windows of `block_size`.

    vocab_size: vocabulary size of the model, which tokenizer "ids" needs.
    """
    if sources := read_mixture(config.path):
        return _open_mixture(config, sources, known, block_size=block_size, vocab_size=vocab_size)
    if config.path is not None and "://" in config.path:
        local = fetch(config.path) if known is None else find_copy(config.path)
        config = dataclasses.replace(config, path=str(local))
    is_here = config.path is not None and is_there(Path(config.path), "Name another text with --data.path.")
    entry = None if known is None or is_here else _find_entry(known, config.is_packed)
    if config.is_packed:
        return _open_conversations(config, entry or _encode_conversations(config), block_size)
    shards = [] if entry else find_shards(config.path)
    if shards:
        dataset = open_shards(config.path or "", shards, config.tokenizer, config.val_fraction, vocab_size)
    else:
        arrays, tokenizer, made_of, about = entry or _open_text(config)
        dataset = Dataset(
            train=arrays["train"],
            val=arrays["val"],
            tokenizer=tokenizer,
            fingerprint=made_of,
            val_characters=about.get("val_characters"),
            val_bytes=about.get("val_bytes"),
        )
    for name, tokens in (("training", dataset.train), ("validation", dataset.val)):
        if len(tokens) <= block_size:
            raise UserError(
                f"the {name} split of {config.path or config.corpus} has {len(tokens)} tokens, "
                f"needed {block_size + 1} for one window of block_size={block_size}: give more "
                "text, a smaller --model.block-size, or another --data.val-fraction"
            )
    return dataset


def resolve_vocab(model: GPTConfig, tokenizer: Tokenizer) -> GPTConfig:
    """Return the model with the tokenizer's vocabulary size, unless its own is larger (padded)."""
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    if model.vocab_size < tokenizer.vocab_size:
        needed = f"needs the tokenizer's {tokenizer.vocab_size} or more, or leave it out"
        raise UserError(f"model.vocab_size={model.vocab_size}: {needed}")
    return model


def encode_whole(files: list[Path], tokenizer: Tokenizer) -> tuple[np.ndarray, str]:
    """Return (ids, text) of files to evaluate, both in memory, separated as for training."""
    documents = ["".join(read_text(file)) for file in files]
    text, end = "\n".join(documents), tokenizer.end_of_text
    if end is None:
        return tokenizer.encode(text), text
    ids = [i for document in documents for i in (tokenizer.encode(document), [end])]
    return np.concatenate(ids[:-1], dtype=np.int32), text


def _open_mixture(config: DataConfig, sources: dict[str, float], known: Json | None, **model: Any) -> Dataset:
    """Return the dataset of several sources, by path and weight, which need one tokenizer."""
    if config.tokenizer == "bpe":
        raise UserError(f"tokenizer bpe is trained on one text, not on {config.path}: give a tokenizer.json, or byte")
    before, unknown = recorded_sources(known or {}), None if known is None else {}
    datasets = {}
    for n, path in enumerate(sources):
        part = dataclasses.replace(config, path=path)
        datasets[path] = open_data(part, known=before[n] if n < len(before) else unknown, **model)
    tokenizers = [dataset.tokenizer for dataset in datasets.values()]
    one = tokenizers[0]
    if len(set(map(fingerprint, tokenizers))) > 1:
        if config.tokenizer == "char" and not any("files" in d.fingerprint for d in datasets.values()):
            union = CharTokenizer("".join(t.characters for t in tokenizers if isinstance(t, CharTokenizer)))
            file = cache_directory() / "tokens" / f"{fingerprint(union)}.json"
            write_whole(file, union.to_json())
            return _open_mixture(dataclasses.replace(config, tokenizer=str(file)), sources, known, **model)
        sizes = " and ".join(str(tokenizer.vocab_size) for tokenizer in tokenizers)
        needed = "needs one for all: --data.tokenizer byte, or the tokenizer.json of the token files"
        raise UserError(f"{' and '.join(sources)} have different tokenizers, of {sizes} tokens: a mixture {needed}")
    train, val = (Mixture({p: (w, vars(datasets[p])[name]) for p, w in sources.items()}) for name in SPLITS)
    made_of = [{"weight": round(weight, 6), **datasets[path].fingerprint} for path, weight in sources.items()]
    lengths = {"train_tokens": len(train), "val_tokens": len(val)}
    return Dataset(
        train=train,
        val=val,
        tokenizer=one,
        fingerprint=lengths | {"tokenizer_sha256": fingerprint(one), "mixture": made_of},
        notes=tuple(f"{path}: {note}" for path, dataset in datasets.items() for note in dataset.notes),
    )


def _open_text(config: DataConfig) -> Entry:
    """Return the tokens of a text, split and encoded, from the cache if they are there."""
    name, source = config.tokenizer, config.path or config.corpus
    files = find_user_files(config.path) if config.path else find_corpus_files(config.corpus)
    tokenizer = open_tokenizer(name, "a text needs")
    digest, lengths, alphabet = hashlib.sha256(), [0] * len(files), set[str]()
    for number, piece in _read_pieces(files, digest):
        lengths[number] += len(piece)
        if name == "char":
            alphabet.update(piece)
    if not sum(lengths):
        raise UserError(f"{source} is empty: there is nothing to learn from")
    if name == "char":
        tokenizer = CharTokenizer(alphabet | {"\n"} if len(files) > 1 else alphabet)
    cuts = [int(length * (1.0 - config.val_fraction)) for length in lengths]
    spec: Json = {
        "format": TEXT_FORMAT,
        "text": digest.hexdigest(),
        "train_characters": cuts if len(files) > 1 else cuts[0],
        "tokenizer": name if config.tokenizer_file is None or tokenizer is None else fingerprint(tokenizer),
    }
    if name == "bpe":
        spec["bpe_vocab_size"] = config.bpe_vocab_size
    entry = read_entry(_entry(spec))
    if entry is None:
        if tokenizer is None:
            pieces = _split_text(source, files, cuts, spec["text"])
            texts = (piece for name, piece in pieces if name == "train" and piece)
            tokenizer = train_bpe(texts, config.bpe_vocab_size)
        about = {"val_bytes": 0, "val_characters": 0}
        pieces = _split_text(source, files, cuts, spec["text"])
        entry = write_entry(spec, tokenizer, _encode_text(pieces, tokenizer, about), about)
    arrays, tokenizer, made_of, about = entry
    return arrays, tokenizer, made_of | ({"split": "by file"} if len(files) > 1 else {}), about


def _read_pieces(files: list[Path], digest: Any) -> Iterator[tuple[int, str]]:
    """Yield (number of the file, piece of its text), and update the digest of all of it.

    A piece ends at a newline where possible, lest BPE be trained on words that are cut in two.
    """
    for number, file in enumerate(files):
        if number:
            digest.update(b"\xff")  # a byte that UTF-8 never has
        rest = ""
        for piece in read_text(file):
            digest.update(piece.encode())
            rest += piece
            end = rest.rfind("\n") + 1 or len(rest)
            yield number, rest[:end]
            rest = rest[end:]
        yield number, rest


def _split_text(source: str, files: list[Path], cuts: list[int], text: str) -> Iterator[tuple[str, str | None]]:
    """Yield ("train" or "val", piece), with None for the end of a document.

    cuts: how many characters of each file are for training. text: the digest that it must have.
    """
    digest, left, last = hashlib.sha256(), list(cuts), 0
    for number, piece in _read_pieces(files, digest):
        if number != last:
            yield from ((name, None) for name in SPLITS)
            last = number
        parts = zip(SPLITS, (piece[: left[number]], piece[left[number] :]), strict=True)
        yield from ((name, part) for name, part in parts if part)
        left[number] = max(left[number] - len(piece), 0)
    if digest.hexdigest() != text:
        raise UserError(CHANGED.format(source))


def _encode_text(
    pieces: Iterable[tuple[str, str | None]], tokenizer: Tokenizer, about: dict[str, int]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the tokens of pieces by split. Count the text that is held out."""
    end, dtype = tokenizer.end_of_text, token_dtype(tokenizer.vocab_size)
    encoders = {name: TextEncoder(tokenizer) for name in SPLITS}
    for name, piece in pieces:
        text = "\n" if piece is None else piece
        if name == "val":
            about["val_bytes"] += len(text.encode())
            about["val_characters"] += len(text)
        if piece is not None or end is None:
            ids = encoders[name].encode(text)
        else:
            ids = np.append(encoders[name].encode("", is_last=True), end)
        yield {name: ids.astype(dtype)}
    yield {name: encoder.encode("", is_last=True).astype(dtype) for name, encoder in encoders.items()}


def _open_conversations(config: DataConfig, entry: Entry, block_size: int) -> Dataset:
    """Return the dataset of a file of conversations, in which the model generates the tokens of the assistant."""
    from jaxgpt.data import template as chat  # with what writes chats, which no text needs
    from jaxgpt.data.conversations import Conversations

    arrays, tokenizer, made_of, _ = entry
    splits = []
    for name in SPLITS:
        ends = np.concatenate(arrays[f"{name}_ends"].shards)
        splits.append(Conversations(arrays[name], arrays[f"{name}_answers"], ends, block_size))
    train, val = splits
    most, longest = np.quantile(np.append(train.needed, val.needed), (0.9, 1.0), method="higher")
    for name, conversations in (("training", train), ("validation", val)):
        if not len(conversations):
            raise UserError(
                f"no conversation of the {name} split of {config.path or config.corpus} has an answer that ends within "
                f"block_size={block_size} tokens: raise --model.block-size ({most} holds nine conversations in ten, "
                f"{longest} all), or give shorter ones"
            )
    if tokenizer.prefix:
        made_of["prefix"] = list(tokenizer.prefix)
    template = _find_template(config, tokenizer)
    made_of["template_sha256"] = chat.fingerprint(template)
    counts = f"{len(train.lengths):,} training and {len(val.lengths):,} validation conversations"
    notes = [f"{counts}, in rows of {block_size} tokens that are {train.filled:.1%} full"]
    if config.tokenizer_file is not None and isinstance(template, chat.Turns):
        turn = f"{template.before.format(role='user', Role='User')}...{template.end}"
        notes.append(f"the tokenizer has no chat template: a turn is written as {turn!r}")
    shortened, left_out = train.shortened + val.shortened, train.left_out + val.left_out
    if shortened or left_out:
        notes.append(
            f"longer than block_size={block_size}: {shortened:,} conversations end after the last answer that fits, "
            f"{left_out:,} are left out; --model.block-size {most} holds nine in ten, {longest} all"
        )
    return Dataset(
        train=train,
        val=val,
        tokenizer=tokenizer,
        fingerprint=made_of,
        tokenizer_config=template.config(),
        notes=tuple(notes),
    )


def _find_template(config: DataConfig, tokenizer: Tokenizer) -> Any:
    from jaxgpt.data.template import find_template

    file = config.tokenizer_file
    return find_template(tokenizer, None if file is None else Path(file).parent)


def _encode_conversations(config: DataConfig) -> Entry:
    """Return the cache entry of a file of conversations, which is encoded if there is none."""
    from jaxgpt.data import template as chat
    from jaxgpt.data.conversations import encode_all, read_messages
    from jaxgpt.data.tools import spell_out

    path, name = config.path or str(find_corpus_files(config.corpus)[0]), config.tokenizer
    if not is_there(Path(path), "Give the path of a .jsonl file.") or Path(path).is_dir():
        raise UserError(f"no file at {path}: --data.path NAME.jsonl takes a file with a conversation on each line")
    tokenizer = open_tokenizer(name, "conversations need")
    spec: Json = {"conversation": DOCUMENT_FORMAT, "file": sha256(path), "val_fraction": config.val_fraction}
    spec["tokenizer"] = name if tokenizer is None else fingerprint(tokenizer)
    if name == "bpe":
        spec["bpe_vocab_size"] = config.bpe_vocab_size
    if tokenizer is not None:
        spec["template"] = chat.fingerprint(_find_template(config, tokenizer))
    if (entry := read_entry(_entry(spec))) is not None:
        return entry

    def read() -> Iterator[list[str]]:
        for _, messages, tools in read_messages(path):
            yield [message["content"] for message in spell_out(messages, tools)]

    alphabet, count = set(chat.PLAIN_CHARACTERS), 0
    for texts in read():  # an invalid line raises here, before any is encoded
        count += 1
        alphabet.update(*texts)
    train = int(count * (1.0 - config.val_fraction))
    if not 0 < train < count:
        raise UserError(f"{path} has {count} conversations: give at least one to train on and one to validate on")
    if name == "char":
        tokenizer = CharTokenizer(alphabet)
    elif tokenizer is None:
        tokenizer = train_bpe(itertools.chain.from_iterable(itertools.islice(read(), train)), config.bpe_vocab_size)

    def split() -> Iterator[dict[str, np.ndarray]]:
        ends, dtype = dict.fromkeys(SPLITS, 0), token_dtype(tokenizer.vocab_size)
        encoded = encode_all(path, tokenizer, _find_template(config, tokenizer))
        for number, (ids, answers) in enumerate(encoded):
            name = SPLITS[number >= train]
            ends[name] += len(ids)
            yield {name: ids.astype(dtype), f"{name}_answers": answers, f"{name}_ends": np.array([ends[name]])}
        if sha256(path) != spec["file"]:
            raise UserError(CHANGED.format(path))

    return write_entry(spec, tokenizer, split(), {})


# The cache of tokens: a directory of shards for each text with a tokenizer.


def _entry(spec: Json) -> Path:
    """Return the directory of a specification, which must contain everything that determines the tokens."""
    key = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:24]
    return cache_directory() / "tokens" / key


def _find_entry(known: Json, is_packed: bool) -> Entry | None:
    """Return the entry with a known fingerprint, if it is undamaged, whatever it was made from."""
    for tokenizer in sorted((cache_directory() / "tokens").glob("*/tokenizer.json")):
        # It may be of an earlier version, damaged, or just being written.
        with contextlib.suppress(UserError, LookupError, TypeError):
            made_of = _read_record(tokenizer.parent)["fingerprint"]
            is_known = made_of.items() <= known.items()
            if is_known and ("train_ends_sha256" in made_of) == is_packed:
                return read_entry(tokenizer.parent)
    return None


def _read_record(directory: Path) -> Json:
    """Return the index of an entry, or the meta.json of one of version 0.2.0."""
    return read_index(directory) or read_json(directory / "meta.json", 2**20)


def read_entry(directory: Path) -> Entry | None:
    """Return (arrays by name, tokenizer, fingerprint, counts) of an entry after hashing it, or None if it is damaged."""
    if not directory.exists():
        return None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # and so `UserError`
        record, tokenizer = _read_record(directory), load_tokenizer(directory / "tokenizer.json")
        arrays, about = _open_arrays(directory, record, tokenizer), record["about"]
        if _describe(arrays, tokenizer) == record["fingerprint"]:
            return arrays, tokenizer, record["fingerprint"], about
    LOG.warning("the cached tokens in %s are damaged: encoding the text again", directory)
    return None


def _open_arrays(directory: Path, record: Json, tokenizer: Tokenizer) -> dict[str, Tokens]:
    """Return the arrays of an entry by name: train, val and, of conversations, train_answers, train_ends, ..."""
    arrays: dict[str, list[np.ndarray]] = {}
    for shard in record.get("shards", ()):
        arrays.setdefault(shard["file"].rpartition("_")[0], []).append(open_shard(directory / shard["file"]))
    for file in [] if arrays else directory.glob("*.bin"):  # of version 0.2.0, without headers
        dtypes = {"answers": np.bool_, "ends": np.int64}
        dtype = dtypes.get(file.stem.rpartition("_")[2], token_dtype(tokenizer.vocab_size))
        arrays[file.stem] = [np.memmap(file, dtype, "r")]
    return {name: Tokens(shards) for name, shards in sorted(arrays.items())}


def _describe(arrays: dict[str, Tokens], tokenizer: Tokenizer) -> Json:
    """Return the fingerprint of the arrays of an entry."""
    lengths = {f"{split}_tokens": len(arrays[split]) for split in SPLITS}
    digests = {}
    for name, array in arrays.items():
        digest = hashlib.sha256()
        for shard in array.shards:
            digest.update(shard)
        digests[f"{name}_sha256"] = digest.hexdigest()
    return {**lengths, **digests, "tokenizer_sha256": fingerprint(tokenizer)}


def write_entry(
    spec: Json, tokenizer: Tokenizer, batches: Iterable[dict[str, np.ndarray]], about: dict[str, int]
) -> Entry:
    """Write batches of arrays by name as the entry of a specification, and return it.

    It appears complete or not at all. `about` is recorded with the tokens, and may grow while the batches are made.
    """
    directory, index = _entry(spec), make_index(spec | {"shard_tokens": SHARD_TOKENS}, {})
    make_cache(directory.parent)
    with tempfile.TemporaryDirectory(dir=directory.parent, ignore_cleanup_errors=True) as partial:
        folder = Path(partial)
        write_shards(folder, index, tokenizer, ((batch, [1, 0, 0]) for batch in batches), tokenizer.end_of_text)
        arrays = _open_arrays(folder, index, tokenizer)
        for split in SPLITS:
            if split not in arrays:
                raise UserError(f"the {split} split is empty: the text is too short to split")
        made_of = _describe(arrays, tokenizer)
        save_index(folder, index | {"fingerprint": made_of, "about": about})
        try:
            os.replace(partial, directory)
        except OSError:
            if read_entry(directory) is None:  # else another process was first with the same tokens
                shutil.rmtree(directory)
                os.replace(partial, directory)
    return arrays, tokenizer, made_of, about
