"""Text to token ids and back: characters, bytes, byte-pair encoding, or bare numbers.

Every tokenizer saves itself as `tokenizer.json` in the run directory, so that a run can always be sampled:
characters and bytes in a few lines of their own, BPE in Hugging Face's format, unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxgpt.config.validate import LARGEST_SIZE, short
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, parse_json, read_bytes

LARGEST_FILE = 2**26  # bytes of a tokenizer.json; Gemma 3's, of 262,144 tokens, is half as large
LONG = 2**14  # characters from which on a text is encoded by its pieces
WORDS = 2**19  # whose ids are kept: some 100 MB
_PIECE = re.compile(r"\s*\S+(?:(?!\n\S)[^\S ]\s*\S*)*\n?|\s+")
# The patterns of words that `pieces` is right for, as tokenizer.json has them: GPT-4's kind, with 3 digits or one.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
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
        codes = code_points(self.characters)
        self._ids = np.full(codes[-1] + 2, -1, np.int32)  # by code point, and of all those above the last at the end
        self._ids[codes] = np.arange(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        codes = code_points(text)
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
        self._forget()

    def encode(self, text: str) -> np.ndarray:
        """In a long text each word is encoded when first met, by all cores; the library would make objects for every one."""
        if len(text) < LONG or not self._can_be_cut:
            return np.array(self._encoded(text).ids, dtype=np.int32)
        _utf8(text)
        words = pieces(text)
        if len(self._numbers) > WORDS:
            self._forget()
        if new := [word for word in dict.fromkeys(words) if word not in self._numbers]:
            encode = functools.partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
            found = [e.ids for e in _hf(encode, new, _what="the tokenizer cannot read the text")]
            self._numbers.update(zip(new, itertools.count(len(self._numbers))))
            self._ids = np.append(self._ids, np.fromiter(itertools.chain.from_iterable(found), np.int32))
            self._lengths = np.append(self._lengths, np.fromiter(map(len, found), np.int64))
        order = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        starts, lengths = np.cumsum(self._lengths) - self._lengths, self._lengths[order]
        # From where a word's ids stand in the text to where they are known.
        shift = starts[order] - (np.cumsum(lengths) - lengths)
        return self._ids[np.arange(lengths.sum()) + np.repeat(shift, lengths)]

    def _forget(self) -> None:
        """What the words of long texts are."""
        self._numbers: dict[str, int] = {}  # number the words
        self._ids, self._lengths = np.zeros(0, np.int32), np.zeros(0, np.int64)  # of all words in a row, and of each

    @functools.cached_property
    def _can_be_cut(self) -> bool:
        return _can_be_cut(json.loads(self._json))

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


def _can_be_cut(saved: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is known to give the `pieces` of a text the ids that it gives the whole."""
    if saved.get("normalizer") is not None or any(not t["special"] for t in saved.get("added_tokens", [])):
        return False
    match saved.get("pre_tokenizer"):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return words in _WORDS
    return False


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


def code_points(text: str) -> np.ndarray:
    """uint32, one for each character."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)


def pieces(text: str) -> list[str]:
    """A text cut where a word surely ends: before a space that follows no white space, after a newline alone among words.

    There the patterns by which GPT-2, GPT-4 and Llama 3 find words always end one, and none looks back: the pieces have the
    words of the whole. (" \\n" and "\\n\\n" are one word at the end of a text, two before another; "!\\n" is one of GPT-4's.)
    """
    return _PIECE.findall(text)


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
