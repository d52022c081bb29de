"""Convert text to token ids and back: by characters, bytes or byte-pair encoding, or as bare ids.

The tokenizer of a run is saved in its directory as `tokenizer.json`, so that the run can always be sampled. BPE is in
Hugging Face's format, unchanged; the others are in a format of our own.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxgpt.config.validate import LARGEST_SIZE, short
from jaxgpt.data.bpe import BPETokenizer, encode_utf8
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, parse_json, read_bytes

LARGEST_FILE = 2**26  # bytes of a tokenizer.json; Gemma 3's, of 262,144 tokens, is half as large


class Tokenizer(Protocol):
    """Interface of the tokenizers."""

    vocab_size: int  # ids are 0 <= id < vocab_size
    end_of_text: int | None = None  # the id that separates documents, if there is one
    prefix: tuple[int, ...] = ()  # ids that a text begins with, if models of this tokenizer expect any
    # ids of special tokens, by their text; `encode` never returns them
    specials: Mapping[str, int] = types.MappingProxyType({})

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32. Special tokens written out in the text are encoded as text."""
        ...

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, [start, end) of each in characters, int64 of shape [len(ids), 2]).

        `specials` encodes special tokens that are written out in the text as their ids.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        ...

    def to_json(self) -> str:
        """Return the text of `tokenizer.json`."""
        ...


class CharTokenizer(Tokenizer):
    """One id per Unicode character, in code point order, as in nanoGPT and sancho-mini."""

    def __init__(self, characters: Iterable[str]):
        """Make the vocabulary of the distinct characters. Raises `UserError` if there are none."""
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters)
        if not self.vocab_size:
            raise UserError("a character tokenizer needs at least one character, got none")
        codes = to_code_points(self.characters)
        self._ids = np.full(codes[-1] + 2, -1, np.int32)  # by code point; the last entry is for all larger code points
        self._ids[codes] = np.arange(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32. Raises `UserError` for characters that are not in the vocabulary."""
        codes = to_code_points(text)
        ids = self._ids.take(codes, mode="clip")
        if ids.size and ids.min() < 0:
            unknown = codes[ids < 0]
            named = ", ".join(f"{chr(c)!r} (U+{c:04X})" for c in np.unique(unknown)[:8])
            more = " and more" if np.unique(unknown).size > 8 else ""
            raise UserError(
                f"not in this tokenizer's {self.vocab_size} characters: {named}{more}. "
                "Leave them out, or train with tokenizer byte or bpe, which know every character."
            )
        return ids

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, [start, end) of each): one character per token."""
        starts = np.arange(len(text))
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        return "".join(self.characters[i] for i in ids)

    def to_json(self) -> str:
        """Return the characters in JSON."""
        return json.dumps({"jaxgpt": "char", "characters": self.characters}, ensure_ascii=False)


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8: 256 ids for any text, without training."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of a text, int32."""
        return np.frombuffer(encode_utf8(text), dtype=np.uint8).astype(np.int32)

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, [start, end) of each): the bytes of one character have the same span."""
        lengths = 1 + np.searchsorted([0x80, 0x800, 0x10000], to_code_points(text), side="right")
        starts = np.repeat(np.arange(len(text)), lengths)
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of bytes; invalid UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return the name of the tokenizer in JSON."""
        return json.dumps({"jaxgpt": "byte"})


class IdTokenizer(Tokenizer):
    """Bare ids, for token files without a tokenizer: the text is the ids, separated by spaces."""

    def __init__(self, vocab_size: int):
        """Accept ids below `vocab_size`."""
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        """Parse ids, int32. Raises `UserError` for other words, and for ids that are not in the vocabulary."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise UserError(
                f"this run has no tokenizer, so its text is token ids like '15 42'; got {short(text)}"
            ) from None
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"token {i} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        return np.array(ids, dtype=np.int32)

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        """Raise `UserError`: conversations need a tokenizer of text."""
        raise UserError("tokenizer ids cannot encode conversations: give char, byte, bpe or a tokenizer.json")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids as text, separated by spaces."""
        return " ".join(str(int(i)) for i in ids)

    def to_json(self) -> str:
        """Return the vocabulary size in JSON."""
        return json.dumps({"jaxgpt": "ids", "vocab_size": self.vocab_size})


def open_tokenizer(name: str, what: str) -> Tokenizer | None:
    """Return the tokenizer that `data.tokenizer` names; None for char and bpe, which are made from the text.

    Raises `UserError` for ids, which cannot encode text; `what` is part of its message, such as "a text needs".
    """
    if name in ("char", "bpe"):
        return None
    if name == "ids":
        raise UserError(f"tokenizer ids is for .bin token files; {what} char, byte, bpe or a tokenizer.json")
    return ByteTokenizer() if name == "byte" else load_tokenizer(name)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a `tokenizer.json`, ours or Hugging Face's, from an untrusted file. Raises `UserError` if it is damaged."""
    if not is_there(Path(path), "Give the path of a tokenizer.json."):
        raise UserError(f"no tokenizer at {path}: give char, byte, bpe, ids, or the path of a tokenizer.json")
    raw = read_bytes(path, LARGEST_FILE)
    values = parse_json(raw, f"{path} is not a tokenizer.json: it")
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a tokenizer.json: it holds {type(values).__name__}, not an object")
    try:
        return _tokenizer(values, raw)
    except UserError as e:
        raise UserError(f"{path} cannot be used: {e}") from None


def _tokenizer(values: dict[str, Any], raw: bytes) -> Tokenizer:
    match values:
        case {"jaxgpt": "char", "characters": str(characters)}:
            found = CharTokenizer(characters)
            if found.characters != characters or any("\ud800" <= c <= "\udfff" for c in characters):
                raise UserError("its characters are not distinct, or not in the order of their code points")
            return found
        case {"jaxgpt": "byte"}:
            return ByteTokenizer()
        case {"jaxgpt": "ids", "vocab_size": int(vocab_size)} if 0 < vocab_size <= LARGEST_SIZE:
            return IdTokenizer(vocab_size)
        case {"jaxgpt": kind}:
            raise UserError(f"kind of tokenizer {short(kind)} unknown or damaged: needs char, byte or ids")
    return BPETokenizer(raw.decode("utf-8"))


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the tokenizer's JSON."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def find_start_token(tokenizer: Tokenizer) -> tuple[int, str]:
    """Return (id, description) of the token that replaces an empty prompt: end of text, else a newline, else id 0."""
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text, "the end-of-text token"
    try:
        return int(tokenizer.encode("\n")[0]), "a newline"
    except (UserError, IndexError):
        return 0, f"token 0, {tokenizer.decode([0])!r}"


def to_code_points(text: str) -> np.ndarray:
    """Return the code points of a text, uint32."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
