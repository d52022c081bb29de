"""Byte-pair encoding with Hugging Face's `tokenizers`."""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxgpt.config.validate import LARGEST_SIZE, short
from jaxgpt.errors import UserError

LONG_TEXT = 2**14  # characters; texts of at least this length are encoded word by word
MOST_WORDS = 2**19  # words whose ids are kept: about 100 MB
_PIECE = re.compile(r"\s*\S+(?:(?!\n\S)[^\S ]\s*\S*)*\n?|\s+")
# What a ByteLevel pre-tokenizer splits by, GPT-2's.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Patterns whose words `split_words` never cuts, as tokenizer.json spells them: GPT-4's, with 3 digits or 1.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # GPT-2, Llama 3, Llama 2, Gemma


class BPETokenizer:
    """A tokenizer of Hugging Face's `tokenizers`: GPT-2's, Llama 3's, or one trained here.

    It implements `jaxgpt.data.tokenizer.Tokenizer`.
    """

    def __init__(self, text: str):
        """Load the text of a tokenizer.json. Raises `UserError` if it is damaged."""
        self._json = text
        self._tokenizer = _load(text, specials=False)
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # not the number of ids, which may have gaps
        if not 1 <= self.vocab_size <= LARGEST_SIZE:
            raise UserError(
                f"its ids go up to {self.vocab_size - 1}: needs at least one id, all below {LARGEST_SIZE:,}"
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials: Mapping[str, int] = {token.content: i for i, token in added.items() if token.special}
        # Special ones first: in Gemma's vocabulary "</s>" is HTML, not the end of a text.
        known = [self.specials.get(t) for t in END_OF_TEXT] + [self._tokenizer.token_to_id(t) for t in END_OF_TEXT]
        self.end_of_text = next((i for i in known if i is not None), None)
        # Tokens that its template puts before a text. Llama and Gemma models generate poorly without them.
        template = _call_library(self._tokenizer.encode, "a", what="its template cannot be used")
        first = template.special_tokens_mask.index(0) if 0 in template.special_tokens_mask else 0
        self.prefix = tuple(template.ids[:first])
        self._lock = threading.Lock()  # guards the known words
        self._clear_words()

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32. Special tokens written out in the text are encoded as text."""
        # Encode each distinct word of a long text once, on all cores: the library creates objects for each occurrence.
        if len(text) < LONG_TEXT or not self._is_splittable:
            return np.array(self._encode_whole(text).ids, dtype=np.int32)
        encode_utf8(text)
        words = split_words(text)
        with self._lock:
            if len(self._word_index) > MOST_WORDS:
                self._clear_words()
            if new := [word for word in dict.fromkeys(words) if word not in self._word_index]:
                encode = functools.partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
                found = [e.ids for e in _call_library(encode, new, what="the tokenizer cannot read the text")]
                self._word_index.update(zip(new, itertools.count(len(self._word_index))))
                self._ids = np.append(self._ids, np.fromiter(itertools.chain.from_iterable(found), np.int32))
                self._lengths = np.append(self._lengths, np.fromiter(map(len, found), np.int64))
            order = np.fromiter(map(self._word_index.__getitem__, words), np.int64, len(words))
            starts, lengths = np.cumsum(self._lengths) - self._lengths, self._lengths[order]
            # Offset from the ids of a word in the result to those in self._ids.
            shift = starts[order] - (np.cumsum(lengths) - lengths)
            return self._ids[np.arange(lengths.sum()) + np.repeat(shift, lengths)]

    def _clear_words(self) -> None:
        self._word_index: dict[str, int] = {}  # index into _lengths of each known word of long texts
        self._ids = np.zeros(0, np.int32)  # ids of all known words, concatenated
        self._lengths = np.zeros(0, np.int64)  # number of ids of each known word

    @functools.cached_property
    def _is_splittable(self) -> bool:
        """Return whether encoding the pieces of `split_words` is known to give the ids of the undivided text."""
        saved = json.loads(self._json)
        if saved.get("normalizer") is not None or any(not t["special"] for t in saved.get("added_tokens", [])):
            return False
        return find_word_pattern(saved.get("pre_tokenizer")) is not None

    def locate(self, text: str, *, specials: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, [start, end) of each in characters): see `Tokenizer.locate`."""
        found = self._encode_whole(text, specials=specials)
        return np.array(found.ids, dtype=np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    @functools.cached_property
    def _special(self) -> Any:
        """Return a second object of the library, which reads special tokens in texts; only conversations need it."""
        return _load(self._json, specials=True)

    def _encode_whole(self, text: str, *, specials: bool = False) -> Any:
        encode_utf8(text)
        encode = (self._special if specials else self._tokenizer).encode
        return _call_library(encode, text, add_special_tokens=False, what="the tokenizer cannot read the text")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens included; invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        """Return the text of tokenizer.json, unchanged."""
        return self._json

    def parts(self) -> dict[str, Any]:
        """Return tokenizer.json parsed, with the fields that it leaves out, as the installed library writes them."""
        return json.loads(self._tokenizer.to_str())


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; bytes as in GPT-2) of at most `vocab_size` ids.

    The vocabulary always contains the 256 bytes and `<|endoftext|>`. The same texts give the same tokenizer.
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
    r"""Cut a text into pieces to encode separately: before a space after a word, after a single newline between words.

    There the patterns of GPT-2, GPT-4 and Llama 3 always end a word, and they never look behind, so the pieces contain
    the words of the text. Cuts elsewhere would be wrong: `" \n"` and `"\n\n"` are one word at the end of a text, but
    two before a word, and GPT-4 reads `"!\n"` as one.
    """
    return _PIECE.findall(text)


def encode_utf8(text: str) -> bytes:
    """Encode a text as UTF-8. Raises `UserError` for characters that are not Unicode, such as lone surrogates."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as e:  # such as undecodable bytes of the command line
        raise UserError(f"the text {short(text)} is not Unicode: {text[e.start]!r} at {e.start}") from None


def _call_library(call: Callable[..., Any], *args: Any, what: str, **kwargs: Any) -> Any:
    """Call the library; turn its bare `Exception`, and the `BaseException` of a Rust panic, into `UserError`."""
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


def find_word_pattern(pre_tokenizer: Any) -> str | None:
    """Return the pattern by which a byte-level pre-tokenizer splits text, if it is one of WORDS; else None.

    pre_tokenizer: as tokenizer.json has it.
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
