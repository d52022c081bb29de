"""Convert text to token ids and back: by characters, bytes or byte-pair encoding, or as bare ids.

The tokenizer of a run is saved in its directory as `tokenizer.json`, so that the run can always be sampled. BPE has the
format of Hugging Face's `tokenizers`, unchanged. The others have a format of our own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxgpt.config.validate import LARGEST_SIZE, short
from jaxgpt.errors import UserError
from jaxgpt.files import Json, is_there, parse_json, read_bytes

LARGEST_FILE = 2**26  # bytes of a tokenizer.json. Gemma 3's, of 262,144 tokens, is half as large
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # GPT-2, Llama 3, Llama 2, Gemma

MOST_GROWTH = 1024  # times as long as a text may become by the rules of a tokenizer.json. Known ones reach 16
EMPTY = re.compile(r"[?*|^$(]|\\[bBAzZGK]|\{0|^$")  # in expressions that may match nothing, and so insert text anywhere
CONTEXT = 2**12  # characters around a piece of a text that decide its tokens
Located = tuple[np.ndarray, np.ndarray]  #: ids, and [start, end) of each in characters, int64 of shape [len(ids), 2]
MOST_WORDS = 2**19  # words kept with their ids: about 100 MB
# What a ByteLevel pre-tokenizer splits by: the pattern of GPT-2.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Patterns of GPT-4 in tokenizer.json, with 3 digits or 1. `split_words` cuts no word of these.
WORDS = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("{1,3}", "")
)
# A word with what precedes it. It ends, in this order: before a space, or after a single newline between words,
# before punctuation or whitespace after an ASCII letter or digit, where whitespace no longer joins it to the next word.
_PIECE = re.compile(
    r" ?\S+(?:(?= )|\n(?=\S))"
    r"|\s*\S*[0-9A-Za-z](?=[\s!-/:-@\[-`{-~])"
    r"|\s*\S+(?:[^\S \n]\s*\S*|\n(?!\S)\s*\S*)*\n?|\s+"
)


class Tokenizer(Protocol):
    """What every tokenizer can do: turn a text into ids and back, and write itself as JSON."""

    vocab_size: int  # ids are 0 <= id < vocab_size
    end_of_text: int | None = None  # the id that separates documents, if there is one
    prefix: tuple[int, ...] = ()  # ids that a text begins with, if models of this tokenizer expect any
    # whether the pieces of a text, cut where words end, may be encoded by themselves
    is_splittable: bool = True
    # ids of special tokens, by their text. `encode` never returns them
    specials: Mapping[str, int] = types.MappingProxyType({})
    saved: Mapping[str, Any]  # what tokenizer.json holds

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a whole text, int32. Streams cannot be encoded. Special tokens written out are text."""
        ...

    def locate(self, text: str, *, specials: bool) -> Located:
        """Encode a text; with `specials` the special tokens that are written out in it as their ids."""
        raise UserError("this tokenizer cannot encode conversations: give char, byte, bpe or a tokenizer.json")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens included. Invalid UTF-8 becomes U+FFFD."""
        ...

    def to_json(self) -> str:
        """Return the text of `tokenizer.json`."""
        return json.dumps(dict(self.saved), ensure_ascii=False)


class CharTokenizer(Tokenizer):
    """One id per Unicode character, in code point order, as in nanoGPT and sancho-mini."""

    def __init__(self, characters: Iterable[str]):
        self.characters = "".join(sorted(set(characters)))
        self.saved = {"jaxgpt": "char", "characters": self.characters}
        self.vocab_size = len(self.characters)
        if not self.vocab_size:
            raise UserError("a character tokenizer needs at least one character, got none")
        codes = _to_code_points(self.characters)
        self._ids = np.full(codes[-1] + 2, -1, np.int32)  # by code point. The last entry is for all larger code points
        self._ids[codes] = np.arange(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text. Raises `UserError` for characters that are not in the vocabulary."""
        codes = _to_code_points(text)
        ids = self._ids.take(codes, mode="clip")
        if ids.size and ids.min() < 0:
            unknown = np.unique(codes[ids < 0])
            named = ", ".join(f"{chr(c)!r} (U+{c:04X})" for c in unknown[:8])
            more = " and more" if unknown.size > 8 else ""
            remedy = "Leave them out, or train with tokenizer byte or bpe, which know every character."
            raise UserError(f"not in this tokenizer's {self.vocab_size} characters: {named}{more}. {remedy}")
        return ids

    def locate(self, text: str, *, specials: bool) -> Located:
        """Return (ids, spans): one character per token."""
        starts = np.arange(len(text))
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        return "".join(self.characters[i] for i in ids)


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8: 256 ids for any text, without training."""

    vocab_size = 256
    saved = types.MappingProxyType({"jaxgpt": "byte"})

    def encode(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of a text."""
        return np.frombuffer(_encode_utf8(text), dtype=np.uint8).astype(np.int32)

    def locate(self, text: str, *, specials: bool) -> Located:
        """Return (ids, spans): the bytes of one character have the same span."""
        lengths = 1 + np.searchsorted([0x80, 0x800, 0x10000], _to_code_points(text), side="right")
        starts = np.repeat(np.arange(len(text)), lengths)
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of bytes. Invalid UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


class IdTokenizer(Tokenizer):
    """Bare ids, for token files without a tokenizer: the text is the ids, separated by spaces."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.saved = {"jaxgpt": "ids", "vocab_size": vocab_size}

    def encode(self, text: str) -> np.ndarray:
        """Parse ids. Raises `UserError` for other words, and for ids that are not in the vocabulary."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            message = f"this run has no tokenizer, so its text is token ids like '15 42'; got {short(text)}"
            raise UserError(message) from None
        if (unknown := next((i for i in ids if not 0 <= i < self.vocab_size), None)) is not None:
            raise UserError(f"token {unknown} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids as text, separated by spaces."""
        return " ".join(str(int(i)) for i in ids)


class BPETokenizer(Tokenizer):
    """A `Tokenizer` of Hugging Face's `tokenizers`: GPT-2's, Llama 3's, or one trained here."""

    def __init__(self, text: str):
        self._json, self._tokenizer = text, _load(text, specials=False)
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # not the number of ids, which may have gaps
        if not 1 <= self.vocab_size <= LARGEST_SIZE:
            raise UserError(f"it has {self.vocab_size:,} ids: needs at least one, all below {LARGEST_SIZE:,}")
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials: Mapping[str, int] = {token.content: i for i, token in added.items() if token.special}
        # Special ones first: in Gemma's vocabulary "</s>" is HTML, not the end of a text.
        known = [self.specials.get(t) for t in END_OF_TEXT] + [self._tokenizer.token_to_id(t) for t in END_OF_TEXT]
        self.end_of_text = next((i for i in known if i is not None), None)
        # Tokens that its template puts before a text. Llama and Gemma models generate poorly without them.
        template = _call_library(self._tokenizer.encode, "a", what="its template cannot be used")
        first = template.special_tokens_mask.index(0) if 0 in template.special_tokens_mask else 0
        self.prefix = tuple(template.ids[:first])
        # The ids of words, as bytes.
        encode = self._encode_whole
        self._encode_word = functools.lru_cache(MOST_WORDS)(lambda w: np.array(encode(w).ids, np.int32).tobytes())

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, word by word if that is known to give the same."""
        if self.is_splittable:
            # The library creates objects for each occurrence of a word, and takes twice the time.
            return np.frombuffer(bytearray().join(map(self._encode_word, split_words(text))), np.int32)
        return np.array(self._encode_whole(text).ids, dtype=np.int32)

    @functools.cached_property
    def is_splittable(self) -> bool:  # type: ignore[bad-override]
        """Return whether encoding the pieces of `split_words` is known to give the ids of the undivided text."""
        held = json.loads(self._json)
        is_plain = held.get("normalizer") is None and all(t["special"] for t in held.get("added_tokens", []))
        return is_plain and find_word_pattern(held.get("pre_tokenizer")) is not None

    def locate(self, text: str, *, specials: bool) -> Located:
        """Return (ids, spans): see `Tokenizer.locate`."""
        found = self._encode_whole(text, specials=specials)
        return np.array(found.ids, dtype=np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    @functools.cached_property
    def _special(self) -> Any:
        """Return a second object of the library, which reads special tokens in texts. Only conversations need it."""
        return _load(self._json, specials=True)

    def _encode_whole(self, text: str, *, specials: bool = False) -> Any:
        _encode_utf8(text)
        encode = (self._special if specials else self._tokenizer).encode
        return _call_library(encode, text, add_special_tokens=False, what="the tokenizer cannot read the text")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens included. Invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        """Return the text of tokenizer.json, unchanged."""
        return self._json

    def parts(self) -> Json:
        """Return tokenizer.json parsed, with the fields that it leaves out, as the installed library writes them."""
        return json.loads(self._tokenizer.to_str())


def encode_piece(tokenizer: Tokenizer, before: str, text: str, after: str) -> np.ndarray:
    """Return the ids of a piece of a longer text, given what is before it and after it, of which `CONTEXT` is enough.

    A token belongs to the piece in which it begins, so that all pieces of a text have the ids of the whole: SentencePiece,
    for example, puts a space before a text, but not before each piece.
    """
    if tokenizer.is_splittable or not (before or after):
        return tokenizer.encode(text)
    ids, spans = tokenizer.locate(before + text + after, specials=False)
    starts = spans[:, 0] - len(before)
    return ids[(starts >= 0) & ((starts < len(text)) | (not after))]


class TextEncoder:
    """The ids of a text that comes in pieces."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._before, self._rest = tokenizer, "", ""

    def encode(self, text: str, *, is_last: bool = False) -> np.ndarray:
        """Return the next ids, of all of the text but its end, which what follows may change."""
        if self._tokenizer.is_splittable:
            return self._tokenizer.encode(text)
        text = self._rest + text
        at = len(text) if is_last else max(len(text) - CONTEXT, 0)
        ids = encode_piece(self._tokenizer, self._before, text[:at], text[at:])
        self._before, self._rest = "" if is_last else (self._before + text[:at])[-CONTEXT:], text[at:]
        return ids


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909, with bytes as in GPT-2) of at most `vocab_size` ids.

    The vocabulary always contains the 256 bytes and `<|endoftext|>`, the only special token. The same texts give the same tokenizer.
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


def split_words(text: str) -> list[str]:
    r"""Cut a text into pieces to encode separately, at most of the ends of its words.

    There the patterns of GPT-2, GPT-4 and Llama 3 always end a word, and they never look behind, so the pieces contain
    the words of the text. Cuts elsewhere would be wrong: `" \n"` and `"\n\n"` are one word at the end of a text, but
    two before a word, and GPT-4 reads `"!\n"` as one.
    """
    return _PIECE.findall(text)


def find_word_pattern(pre_tokenizer: Any) -> str | None:
    """Return the pattern by which a byte-level pre-tokenizer splits text, or None if it is not one of WORDS.

    pre_tokenizer: the entry in tokenizer.json.
    """
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2_WORDS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if words in WORDS:
            return words
    return None


def open_tokenizer(name: str, what: str) -> Tokenizer | None:
    """Return the tokenizer that `data.tokenizer` names, or None for char and bpe, which are made from the text.

    Raises `UserError` for ids, which cannot encode text. `what` is part of its message, such as "a text needs".
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
    try:
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
                raise UserError(f"kind of tokenizer {short(kind)} unknown or damaged: it must be char, byte or ids")
            case dict():
                check_growth(values)
                return BPETokenizer(raw.decode("utf-8-sig"))
        raise UserError(f"it holds {type(values).__name__}, not an object")
    except UserError as e:
        raise UserError(f"{path} cannot be used: {e}") from None


def check_growth(parts: Mapping[str, Any]) -> None:
    """Raise `UserError` if the rules of a tokenizer.json may turn a character into more than MOST_GROWTH.

    Each rule may multiply a text, so a few of them fill the memory, and the library then ends the process.
    """
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        growth, left = 1, [parts.get(name)]
        while left:
            rule = left.pop()
            left += rule.values() if isinstance(rule, dict) else rule if isinstance(rule, list) else ()
            match rule:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                    growth *= max(1, -(-len(new) // len(old)))
                case {"type": "Replace", "pattern": {"Regex": str(old)}, "content": str(new)}:
                    growth *= max(1, len(new) + bool(EMPTY.search(old)))
                case {"type": "Replace", "content": str(new)}:
                    growth *= 1 + len(new)
                case {"type": "ByteLevel"}:
                    growth *= 2
        if growth > MOST_GROWTH:
            raise UserError(f"its {name} may make a text {growth:.3g} times as long: at most {MOST_GROWTH:,} is safe")


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer as JSON, by which a run recognises its tokenizer."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of tokens in files."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def find_start_token(tokenizer: Tokenizer) -> tuple[int, str]:
    """Return (id, description) of the token that replaces an empty prompt: end of text, else a newline, else id 0."""
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text, "the end-of-text token"
    try:
        return int(tokenizer.encode("\n")[0]), "a newline"
    except (UserError, IndexError):
        return 0, f"token 0, {tokenizer.decode([0])!r}"


def _encode_utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as e:  # a lone surrogate, such as undecodable bytes of the command line
        raise UserError(f"the text {short(text)} is not Unicode: {text[e.start]!r} at {e.start}") from None


def _to_code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)


def _call_library(call: Callable[..., Any], *args: Any, what: str, **kwargs: Any) -> Any:
    """Call the library. Turn its bare `Exception`, and the `BaseException` of a Rust panic, into `UserError`."""
    try:
        return call(*args, **kwargs)
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {str(e)[:200]}") from None


def _load(text: str, *, specials: bool) -> Any:
    """Load an object of the library. `specials` is never changed afterwards: other threads encode with it too."""
    tokenizer = _call_library(_tokenizers().Tokenizer.from_str, text, what="not a tokenizer.json of Hugging Face's")
    # Off by default in the library, where a user who types <|endoftext|> injects the special token.
    tokenizer.encode_special_tokens = not specials
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _tokenizers():
    try:
        import tokenizers
    except ImportError:
        raise UserError("BPE needs the tokenizers package: python -m pip install 'jaxgpt[bpe]'") from None
    return tokenizers
