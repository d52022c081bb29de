"""Text to token ids and back: characters, bytes, byte-pair encoding, or bare numbers.

Every tokenizer saves itself as `tokenizer.json` in the run directory, so that a run can always be sampled:
characters and bytes in a few lines of their own, BPE in Hugging Face's format, unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import json
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxgpt.checks import LARGEST_SIZE, short
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, parse_json, read_bytes

LARGEST_FILE = 2**26  # bytes of a tokenizer.json; Gemma 3's, of 262,144 tokens, is half as large
NONE: Mapping[str, int] = types.MappingProxyType({})
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # GPT-2, Llama 3, Llama 2, Gemma


class Tokenizer(Protocol):
    vocab_size: int  # ids are 0 <= id < vocab_size
    end_of_text: int | None  # the id that separates documents, if there is one
    prefix: tuple[int, ...]  # ids that a text begins with, if the models of this tokenizer want any
    specials: Mapping[str, int]  # ids that no text of a user's has, by how they are written

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32. Special tokens written out in the text are text."""
        ...

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        """(ids, [[start, end], ...]: the characters that each is of). specials: read those that are written out."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; what is not valid UTF-8 becomes U+FFFD."""
        ...

    def to_json(self) -> str:
        """What `tokenizer.json` holds."""
        ...


class CharTokenizer:
    """One id per Unicode character, in code point order, as in nanoGPT and sancho-mini."""

    end_of_text = None
    prefix: tuple[int, ...] = ()
    specials = NONE

    def __init__(self, characters: Iterable[str]):
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters)
        if not self.vocab_size:
            raise UserError("a character tokenizer needs at least one character, got none")
        self._codes = np.array([ord(c) for c in self.characters], dtype=np.uint32)

    def encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        ids = np.minimum(np.searchsorted(self._codes, codes), self.vocab_size - 1)
        unknown = codes[self._codes[ids] != codes]
        if unknown.size:
            named = ", ".join(f"{chr(c)!r} (U+{c:04X})" for c in np.unique(unknown)[:8])
            more = " and more" if np.unique(unknown).size > 8 else ""
            raise UserError(
                f"not in this tokenizer's {self.vocab_size} characters: {named}{more}. "
                "Leave them out, or train with tokenizer byte or bpe, which know every character."
            )
        return ids.astype(np.int32)

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        starts = np.arange(len(text))
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids)

    def to_json(self) -> str:
        return json.dumps({"jaxgpt": "char", "characters": self.characters}, ensure_ascii=False)


class ByteTokenizer:
    """One id per byte of UTF-8: any text, no training, 256 ids."""

    vocab_size = 256
    end_of_text = None
    prefix: tuple[int, ...] = ()
    specials = NONE

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int32)

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        starts = np.repeat(np.arange(len(text)), 1 + np.searchsorted([0x80, 0x800, 0x10000], codes, side="right"))
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return json.dumps({"jaxgpt": "byte"})


class IdTokenizer:
    """Token files without a tokenizer: the text is the numbers, separated by spaces."""

    end_of_text = None
    prefix: tuple[int, ...] = ()
    specials = NONE

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


class BPETokenizer:
    """Any tokenizer of Hugging Face's `tokenizers`, by its JSON text (GPT-2's, Llama 3's, one trained here)."""

    def __init__(self, text: str):
        self._json = text
        self._tokenizer = _hf(_tokenizers().Tokenizer.from_str, text, _what="not a tokenizer.json of Hugging Face's")
        # Off by default in the library: a user who types <|endoftext|> would otherwise inject the special token.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # of ids with holes the count would be too few
        if not 1 <= self.vocab_size <= LARGEST_SIZE:
            raise UserError(f"its ids go up to {self.vocab_size - 1}: needs at least one, below {LARGEST_SIZE:,}")
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials: Mapping[str, int] = {token.content: i for i, token in added.items() if token.special}
        known = (self._tokenizer.token_to_id(t) for t in END_OF_TEXT)
        self.end_of_text = next((i for i in known if i is not None), None)
        # What its template puts before a text: Llama's and Gemma's models write poorly without their first token.
        template = _hf(self._tokenizer.encode, "a", _what="its template cannot be used")
        first = template.special_tokens_mask.index(0) if 0 in template.special_tokens_mask else 0
        self.prefix = tuple(template.ids[:first])

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoded(text).ids, dtype=np.int32)

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        self._tokenizer.encode_special_tokens = not specials
        try:
            found = self._encoded(text)
        finally:
            self._tokenizer.encode_special_tokens = True
        return np.array(found.ids, dtype=np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    def _encoded(self, text: str) -> Any:
        _utf8(text)
        return _hf(self._tokenizer.encode, text, add_special_tokens=False, _what="the tokenizer cannot read the text")

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        return self._json


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; bytes as in GPT-2) of at most `vocab_size` ids.

    The 256 bytes and `<|endoftext|>` are always in it. The same texts give the same tokenizer.
    """
    hf = _tokenizers()
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BPETokenizer(tokenizer.to_str())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, one of ours or any of Hugging Face's. The file need not be trusted."""
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
    """SHA-256 of what the tokenizer saves."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def start_token(tokenizer: Tokenizer) -> tuple[int, str]:
    """Where an empty prompt starts, and its name: the end-of-text token, else a newline, else id 0."""
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text, "the end-of-text token"
    try:
        return int(tokenizer.encode("\n")[0]), "a newline"
    except (UserError, IndexError):
        return 0, f"token 0, {tokenizer.decode([0])!r}"


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as e:  # bytes of the command line that are no text
        raise UserError(f"the text {short(text)} is not Unicode: {text[e.start]!r} at {e.start}") from None


def _hf(call: Callable[..., Any], *args: Any, _what: str, **kwargs: Any) -> Any:
    """Of the library, which raises bare Exception, or where Rust panics a BaseException of its own."""
    try:
        return call(*args, **kwargs)
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise UserError(f"{_what}: {str(e)[:200]}") from None


@functools.cache
def _tokenizers():
    try:
        import tokenizers
    except ImportError:
        raise UserError("BPE needs the tokenizers package: python -m pip install 'jaxgpt[bpe]'") from None
    return tokenizers
