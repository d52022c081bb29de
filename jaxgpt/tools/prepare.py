"""Turn text into token shards that `jaxgpt train --data.path` reads: the same bytes with any number of workers.

One process reads documents in order and cuts them into pieces of bounded size. Workers encode batches of them, and the
first process writes the tokens in order, now and then: all files are whole. `index.json` says what is written, up to which
piece of which document: after a kill, what it does not list is written again.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import glob
import gzip
import hashlib
import io
import itertools
import re
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from jaxgpt.config.validate import Fraction, Interval
from jaxgpt.data.corpus import SPLITS, decode_text, parse_line
from jaxgpt.data.tokenizer import (
    CONTEXT,
    END_OF_TEXT,
    ByteTokenizer,
    Tokenizer,
    encode_piece,
    fingerprint,
    load_tokenizer,
    token_dtype,
    train_bpe,
)
from jaxgpt.errors import UserError, first_line, reason_of, shell_line
from jaxgpt.files import Json, Result, Say, is_there, open_file
from jaxgpt.tools.executor import Executor, Workers, count_threads, open_executor

KIND = re.compile(r"(?s).*\.(?:(txt|jsonl)(?:\.(gz|zst))?|parquet)")
TAKES = "a source is .txt or .jsonl, also .gz or .zst, .parquet, a folder or glob of them, or OWNER/NAME[:CONFIG] on the Hub"
PIECE = 2**20  # characters, or bytes of a batch, that are encoded at once: a longer document is cut
LONGEST_LINE = 2**26  # bytes of a line of .jsonl
SAMPLE = 2**26  # characters that a tokenizer is trained on, the same share of each source
START = [0, 0, 0]  # a position: source, row in it, piece of the row
SAY_EVERY = 10.0  # seconds between lines about the progress
# Up to the last place where every pattern that `split_words` knows ends a word: a cut there changes no token.
WORDS = re.compile(r"(?s).*\S(?:(?= )|\n(?=\S))")


class Part(NamedTuple):
    """A document or a part of one."""

    split: str
    text: str
    size: int  # in bytes
    is_last: bool  # whether it is the last of its document
    following: list[int]  # position after it
    before: str  # up to `CONTEXT` characters before it in its document
    after: str  # and after it


def prepare(
    sources: tuple[str, ...],
    *,
    out: str,
    tokenizer: str = "gpt2",
    column: str = "text",
    val_fraction: Fraction = 0.0005,
    shard_tokens: Annotated[int, Interval(ge=1000, le=2**31 - 1)] = 100_000_000,
    workers: Workers = Workers(),  # noqa: B008, it is frozen
    say: Say = lambda text: None,
) -> Result:
    """Turn text into token shards for training.

    A .txt file is a document, and so is each line of .jsonl and each row. Interrupted, the same command goes on.

    Args:
        sources: .txt and .jsonl files, also .gz and .zst, .parquet, folders and globs of them, OWNER/NAME[:CONFIG] on
            the Hub, or hf:FOLDER, a copy of such a dataset
        out: the folder to write
        tokenizer: gpt2 or another id on the Hub, a tokenizer.json, byte, or bpe:32768, which is trained on a sample
        column: the text in .jsonl, .parquet and datasets
        val_fraction: share of the documents to hold out, chosen by the hash of their text
        shard_tokens: tokens per shard, of which the last has fewer
        workers: where the text is encoded, which changes no byte. By default a process for each core
    """
    # Not with the module, which each worker imports: jax takes 1.5 s.
    from jaxgpt.data.shards import delete_written, write_shards
    from jaxgpt.runs.directory import lock_run

    names, place, again = find_sources(sources), Path(out), "the same command goes on from where it was"
    workers = dataclasses.replace(workers, on=workers.on or f"local:{count_threads()}", gpus=workers.gpus or 0)
    learned = re.fullmatch(r"bpe:(\d{3,7})", tokenizer)
    chosen = None if learned else find_tokenizer(tokenizer)
    given = {"sources": list(names), "tokenizer": tokenizer if chosen is None else fingerprint(chosen)}
    given |= {"column": column, "val_fraction": val_fraction, "shard_tokens": shard_tokens}
    if place.is_dir():
        read_index(place, given, names)  # before a lock is put into a folder of something else
    lock, index = lock_run(place, fresh=False, doing="prepared", option="--out"), {"at": None}
    try:
        index = read_index(place, given, names)
        check_files(place, index)
        if index["at"] is None:
            say(f"{place} is complete already")
            return describe(place, index)
        if learned and index["at"] == START:
            say(f"learning {tokenizer} from a sample of the text")
            chosen = train_bpe(sample_texts(list(names), column, val_fraction), int(learned[1]))
        chosen = chosen or load_tokenizer(place / "tokenizer.json")
        with open_executor(workers, place) as executor:
            assert executor is not None
            encoded = encode_sources(index, place / "tokenizer.json", executor, say)
            with contextlib.closing(encoded):
                write_shards(place, index, chosen, encoded, find_end(chosen))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted: {again}") from None
    except OSError as e:  # what cannot be read is a `UserError` already
        raise UserError(f"cannot write into {place}: {reason_of(e)}. Make room: {again}") from None
    finally:
        if index["at"] == START:  # nothing to go on from
            delete_written(place, keep=())
        lock.release()
    return describe(place, index)


def describe(place: Path, index: Json) -> Result:
    """Return the folder and the index of complete shards."""
    said = []
    for split, name in zip(SPLITS, ("training", "validation"), strict=True):
        shards = [shard for shard in index["shards"] if shard["file"].startswith(split)]
        tokens, documents = (sum(shard[key] for shard in shards) for key in ("tokens", "documents"))
        said.append(f"{tokens:,} {name} tokens of {documents:,} documents (shards: {len(shards):,})")
    next_line = shell_line("jaxgpt", "train", "--data.path", place)
    return Result({"place": str(place), "index": index}, f"{place}: {'; '.join(said)}\nnext: {next_line}")


def read_index(place: Path, given: Json, names: dict[str, int]) -> Json:
    """Return the index to go on from. Raises `UserError` if the folder holds something else, or other arguments."""
    from jaxgpt.data import shards

    if (held := shards.read_index(place)) is None:
        others = sorted(p.name for p in place.iterdir() if not re.fullmatch(r"\.lock|index\.json\.\w{8}", p.name))
        if others:
            raise UserError(f"{place} holds something else, such as {others[0]}: name another --out")
    elif held["at"] != START:
        then, done = held["arguments"], len(names) if held["at"] is None else held["at"][0]
        differing = [f"{key} ({then.get(key)!s:.60}, now {x!s:.60})" for key, x in given.items() if then.get(key) != x]
        if not differing:  # a file that is not read to its end may have been repaired
            differing = [f"size of {name}" for name in [*names][:done] if held["bytes"].get(name) != names[name]]
        if held["open"]:  # shards of earlier versions, which appended to files
            differing = ["version of jaxgpt"]
        if differing:
            raise UserError(f"{place} was begun with another {', '.join(differing)}: name another --out, or delete it")
        return held | {"bytes": names}
    return shards.make_index(given, names) | {"text": {split: {"bytes": 0, "characters": 0} for split in SPLITS}}


def check_files(place: Path, index: Json) -> None:
    """Raise `UserError` unless the files that an index lists are as they were written."""
    from jaxgpt.data.shards import check_shards, check_tokenizer, open_shard, scan

    if index["at"] != START:
        check_tokenizer(path := place / "tokenizer.json", load_tokenizer(path), index)
        known = {place / shard["file"]: shard["tokens"] for shard in index["shards"]}
        # A file may have more tokens than the index says, if the end came between the two.
        found = {f.name: scan(f, open_shard(f)[:tokens], 2**32) for f, tokens in known.items() if f.exists()}
        check_shards(place, index["shards"], found)


# Sources.


def find_sources(names: Iterable[str]) -> dict[str, int]:
    """Return the files and datasets that names stand for, in order, with their bytes, or 0 for a dataset."""
    found: dict[str, int] = {}
    for name in names:
        path, is_dataset = Path(name), name.startswith("hf:")
        if is_dataset or is_there(path, TAKES):
            kept = path.rglob("*") if path.is_dir() else [path]
        else:
            kept = map(Path, glob.glob(name, recursive=True))
            is_dataset = bool(re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name, re.ASCII)) and not KIND.fullmatch(name)
        files = sorted(f for f in kept if f.is_file() and KIND.fullmatch(f.name))
        if is_dataset and not files:
            found[name if name.startswith("hf:") else f"hf:{name}"] = 0
        elif not files:
            raise UserError(f"nothing to read at {name}: {TAKES}")
        for file in files:
            with open_file(file) as f:
                found[str(file)] = f.seek(0, 2)
    if not any(size or name.startswith("hf:") for name, size in found.items()):
        raise UserError(f"{', '.join(found)[:200] or 'no source'}: there is no text; {TAKES}")
    return found


def read_rows(name: str, column: str, skip: int) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a source from row `skip` on: each number, and parts of a text or an object with columns."""
    kind = KIND.fullmatch(name)
    if name.startswith("hf:"):
        import datasets

        path, _, config = name.removeprefix("hf:").partition(":")
        found = datasets.load_dataset(path, config or None, split="train", streaming=True)
        yield from enumerate(found.skip(skip), skip)
        return
    with open_file(name) as raw:
        if kind is None or kind[1] is None:
            import pyarrow.parquet

            # Else a column of a row group is read at once, however large it is.
            file = pyarrow.parquet.ParquetFile(raw, buffer_size=PIECE, pre_buffer=False)
            if column not in file.schema_arrow.names:
                read_column(dict.fromkeys(file.schema_arrow.names), column, name)  # raises
            batches = file.iter_batches(16, columns=[column])
            values = (value for batch in batches for value in batch.to_pylist())
            yield from itertools.islice(enumerate(values), skip, None)
            return
        f: Any = gzip.GzipFile(fileobj=raw) if kind[2] == "gz" else raw
        if kind[2] == "zst":
            import pyarrow

            f = io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"), PIECE)  # notices a file that is cut
        if kind[1] == "txt":
            yield 0, decode_text(f, name)
            return
        for row, line in enumerate(iter(lambda: f.readline(LONGEST_LINE + 1), b"")):
            if len(line) > LONGEST_LINE:
                raise UserError(f"{name}:{row + 1}: the line is longer than {LONGEST_LINE:,} bytes: cut it")
            line = line if row else line.removeprefix(codecs.BOM_UTF8)
            if row >= skip and line.strip():
                yield row, parse_row(line, f"{name}:{row + 1}", column)


def parse_row(line: bytes, where: str, column: str) -> Any:
    """Parse a line of .jsonl. What is wrong in other columns does not matter, such as NaN or a key that appears twice."""
    row = parse_line(line, where, object_pairs_hook=tuple, parse_constant=float, parse_int=float)
    if not isinstance(row, tuple):
        return row
    if [name for name, _ in row].count(column) > 1:
        raise UserError(f"{where}: column {column!r} appears twice: leave one")
    return dict(row)


def read_pieces(names: Sequence[str], column: str, val_fraction: float, start: Sequence[int] = START) -> Iterator[Part]:
    """Yield the texts of sources from a position on. The hash of its first piece decides the split of a document.

    Raises `UserError` for a source that cannot be read.
    """
    for source in range(start[0], len(names)):
        name, split = names[source], ""
        row = skip = start[1] if source == start[0] else 0
        try:
            for row, value in read_rows(name, column, skip):
                where = f"{name}, row {row + 1}"
                parts = value if isinstance(value, Iterator) else [read_column(value, column, where)]
                for number, (before, text, after) in enumerate(cut(parts)):
                    raw, is_last = text.encode(), not after
                    if not number:
                        draw = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")
                        split = SPLITS[draw < val_fraction * 2**64]
                    if raw and [source, row, number] >= list(start):
                        following = [source, row + 1, 0] if is_last else [source, row, number + 1]
                        yield Part(split, text, len(raw), is_last, following, before, after)
        except UserError:
            raise
        except ImportError as e:
            raise UserError(f"{name} needs {e.name}: python -m pip install 'jaxgpt[prepare]'") from None
        except Exception as e:  # a dozen packages for networks, formats and compression raise their own
            why = f"cannot be read at or after row {row + 1:,}: {first_line(e)[:200]}"
            raise UserError(f"{name} {why}. If it is damaged, fetch it again or leave it out") from None


def read_column(row: Any, column: str, where: str) -> str:
    """Return the text in a column of a row. Raises `UserError` if there is none."""
    held = row if isinstance(row, dict) else {}
    if column not in held:
        has = ", ".join(map(str, held))[:300] or type(row).__name__
        raise UserError(f"{where}: there is no column {column!r}, it has {has}: give --column")
    if not isinstance(held[column], str | None):
        raise UserError(f"{where}: column {column!r} is no text: give another --column")
    return (held[column] or "").encode(errors="replace").decode()  # JSON can hold half of a surrogate pair


def cut(parts: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (what is before it, piece, what is after it) of a document, cut at the end of a word where there is one."""
    rest, at = "", 0  # from the context of the next piece on, and where that piece begins
    for part in itertools.chain(parts, [None]):
        rest += part or ""
        while len(rest) - at > PIECE + (0 if part is None else CONTEXT):
            found = WORDS.match(rest, at, at + PIECE)
            end = at + PIECE if found is None else found.end()
            yield rest[max(at - CONTEXT, 0) : at], rest[at:end], rest[end : end + CONTEXT]
            at = end
        start = max(at - CONTEXT, 0)
        rest, at = rest[start:], at - start
    yield rest[:at], rest[at:], ""


def sample_texts(names: Sequence[str], column: str, val_fraction: float) -> Iterator[str]:
    """Yield texts to train a tokenizer on: the beginning of each source, without held-out documents."""
    for name in names:
        left = SAMPLE // len(names)
        for piece in read_pieces([name], column, val_fraction):
            if left <= 0:
                break
            if piece.split == "train":
                yield piece.text[:left]
                left -= len(piece.text)


# Tokens.


def find_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer: byte, a file, a folder or one of the Hub. Raises `UserError` if it cannot end documents."""
    if name == "byte":
        return ByteTokenizer()
    if not name.endswith(".json") and not Path(name).is_file():
        from jaxgpt.hf.source import find_directory

        path = find_directory("openai-community/gpt2" if name == "gpt2" else name, ["tokenizer.json"])
        name = str(path / "tokenizer.json")
    found = load_tokenizer(name)
    if find_end(found) is None:
        ends = ", ".join(END_OF_TEXT)
        raise UserError(f"{name} has no token for the end of a document, such as {ends}: add one, or give another")
    return found


def find_end(tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a document: for bytes 255, which UTF-8 never has."""
    return 255 if isinstance(tokenizer, ByteTokenizer) else tokenizer.end_of_text


_load = functools.cache(load_tokenizer)  # once in a process


def encode_batch(file: Path, batch: list[Part]) -> dict[str, np.ndarray]:
    """Return the tokens of each split, in order, with the ends of documents: the task of an executor."""
    tokenizer = _load(file)
    end = np.array([find_end(tokenizer)])
    parts = {split: [end[:0]] for split in SPLITS}
    for piece in batch:
        ids = encode_piece(tokenizer, piece.before, piece.text, piece.after)
        parts[piece.split] += [ids, end] if piece.is_last else [ids]
    return {split: np.concatenate(part).astype(token_dtype(tokenizer.vocab_size)) for split, part in parts.items()}


def encode_sources(
    index: Json, file: Path, executor: Executor, say: Say
) -> Generator[tuple[dict[str, np.ndarray], list[int]]]:
    """Yield the tokens of the sources from the index's position on, each batch with the position after it.

    The bytes and characters of each split are counted in the index, in which the end of a document is a newline.
    Each process loads the tokenizer from `file`.
    """
    given, names = index["arguments"], [*index["bytes"]]
    done, said = 0, time.monotonic()
    waiting = deque[tuple[list[Part], Future]]()
    pieces = read_pieces(names, given["column"], given["val_fraction"], index["at"])
    for batch in itertools.chain(join_pieces(pieces), [None]):
        if batch is not None:
            waiting.append((batch, executor.submit(encode_batch, file.absolute(), batch)))
        while waiting and (batch is None or len(waiting) > 2 * executor.size):
            encoded, future = waiting.popleft()
            tokens = future.result()
            for piece in encoded:
                done += piece.size
                counts = index["text"][piece.split]
                counts["bytes"] += piece.size + piece.is_last
                counts["characters"] += len(piece.text) + piece.is_last
            following = encoded[-1].following
            if time.monotonic() - said > SAY_EVERY:
                said = time.monotonic()
                say(f"{done / 1e6:,.0f} MB of text; source {following[0] + 1:,} of {len(names):,}")
            yield tokens, following
    if not index["text"]["train"]["bytes"]:
        wrong = "there is no text" if index["at"] == START else f"val_fraction={given['val_fraction']} holds all out"
        index["at"] = START
        raise UserError(f"{', '.join(names)[:200]}: {wrong}: give more text")


def join_pieces(pieces: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield batches of pieces."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size + 256 * len(batch) > PIECE:  # a million short texts are too many
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
