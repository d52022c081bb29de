"""Text to token ids and back: characters, bytes, byte-pair encoding, or bare numbers.

Every tokenizer saves itself as `tokenizer.json` in the run directory, so that a run can always be sampled:
characters and bytes in a few lines of their own, BPE in Hugging Face's format, unchanged.
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
    vocab_size: int  # ids are 0 <= id < vocab_size
    end_of_text: int | None = None  # the id that separates documents, if there is one
    prefix: tuple[int, ...] = ()  # ids that a text begins with, if the models of this tokenizer want any
    specials: Mapping[str, int] = types.MappingProxyType(
        {}
    )  # ids that no text of a user's has, by how they are written

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32. Special tokens written out in the text are text."""
        ...

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, [[start, end], ...]: the characters of each). specials: encode those that are written out."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; what is not valid UTF-8 becomes U+FFFD."""
        ...

    def to_json(self) -> str:
        """Return the text of `tokenizer.json`."""
        ...


class CharTokenizer(Tokenizer):
    """One id per Unicode character, in code point order, as in nanoGPT and sancho-mini."""

    def __init__(self, characters: Iterable[str]):
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters)
        if not self.vocab_size:
            raise UserError("a character tokenizer needs at least one character, got none")
        codes = to_code_points(self.characters)
        self._ids = np.full(codes[-1] + 2, -1, np.int32)  # by code point, and of all those above the last at the end
        self._ids[codes] = np.arange(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
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
        starts = np.arange(len(text))
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids)

    def to_json(self) -> str:
        return json.dumps({"jaxgpt": "char", "characters": self.characters}, ensure_ascii=False)


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8: any text, no training, 256 ids."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(encode_utf8(text), dtype=np.uint8).astype(np.int32)

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        lengths = 1 + np.searchsorted([0x80, 0x800, 0x10000], to_code_points(text), side="right")
        starts = np.repeat(np.arange(len(text)), lengths)
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return json.dumps({"jaxgpt": "byte"})


class IdTokenizer(Tokenizer):
    """Token files without a tokenizer: the text is the numbers, separated by spaces."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise UserError(
                f"this run has no tokenizer, so its text is numbers like '15 42'; got {short(text)}"
            ) from None
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"token {i} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        return np.array(ids, dtype=np.int32)

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        raise UserError(
            "tokenizer ids has no text, and conversations are text: give char, byte, bpe or a tokenizer.json"
        )

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def to_json(self) -> str:
        return json.dumps({"jaxgpt": "ids", "vocab_size": self.vocab_size})


def open_tokenizer(name: str, what: str) -> Tokenizer | None:
    """Return the tokenizer of `data.tokenizer`; None for char and bpe, which are made from the text.

    what: what is to be encoded, with its verb. Raises `UserError` for ids, which have no text.
    """
    if name in ("char", "bpe"):
        return None
    if name == "ids":
        raise UserError(f"tokenizer ids is for .bin token files; {what} char, byte, bpe or a tokenizer.json")
    return ByteTokenizer() if name == "byte" else load_tokenizer(name)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer in a `tokenizer.json`, one of ours or any of Hugging Face's. The file need not be trusted."""
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
                raise UserError("its characters are not each once, in the order of their code points")
            return found
        case {"jaxgpt": "byte"}:
            return ByteTokenizer()
        case {"jaxgpt": "ids", "vocab_size": int(vocab_size)} if 0 < vocab_size <= LARGEST_SIZE:
            return IdTokenizer(vocab_size)
        case {"jaxgpt": kind}:
            raise UserError(f"kind of tokenizer {short(kind)} unknown or damaged, known are char, byte, ids")
    return BPETokenizer(raw.decode("utf-8"))


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of what the tokenizer saves."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def find_start_token(tokenizer: Tokenizer) -> tuple[int, str]:
    """Return the first token of an empty prompt, and its name: the end-of-text token, else a newline, else id 0."""
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text, "the end-of-text token"
    try:
        return int(tokenizer.encode("\n")[0]), "a newline"
    except (UserError, IndexError):
        return 0, f"token 0, {tokenizer.decode([0])!r}"


def to_code_points(text: str) -> np.ndarray:
    """Return the code points of a text, uint32."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
