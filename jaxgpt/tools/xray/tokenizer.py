"""Describe a run's tokenizer to `tokenizer.js`, which encodes what is typed on a page."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer, find_word_pattern
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json
from jaxgpt.tools.html_page import Arrays

PLAIN_BPE = {"dropout": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "byte_fallback": False}


def describe_tokenizer(tokenizer: Tokenizer, arrays: Arrays) -> dict[str, Any]:
    """Return the fields of `tokenizer.js`.

    Raises:
        UserError: for a tokenizer other than characters, bytes and byte-level BPE with a known pattern.
    """
    alphabet, pattern, triples, whole_words = None, None, [], False
    if isinstance(tokenizer, CharTokenizer):
        tokens = [c.encode() for c in tokenizer.characters]
    elif isinstance(tokenizer, ByteTokenizer):
        tokens = [bytes([b]) for b in range(256)]
        alphabet = list(range(256))
    elif isinstance(tokenizer, BPETokenizer):
        tokens, alphabet, pattern, triples, whole_words = _read_bpe(tokenizer)
    else:
        raise UserError("the page needs text, and this run's tokens are bare ids: train with a tokenizer of text")
    ends = np.cumsum([len(token) for token in tokens], dtype=np.int32)
    return {
        "bytes": arrays.put(np.frombuffer(b"".join(tokens), np.uint8)),
        "ends": arrays.put(ends),
        "alphabet": None if alphabet is None else arrays.put(np.array(alphabet, np.int32)),
        # \s of JavaScript has U+FEFF and lacks U+0085.
        "pattern": pattern and pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}"),
        "merges": arrays.put(np.array(triples, np.int32).reshape(-1, 3)),
        "whole_words": whole_words,
    }


def _read_bpe(tokenizer: BPETokenizer) -> tuple[list[bytes], list[int], str, list[tuple[int, int, int]], bool]:
    """Return (bytes of each token, token of each byte, pattern of words, merges, whether words are looked up whole)."""
    saved = parse_json(tokenizer.to_json(), "the tokenizer")
    model, added = saved["model"], saved.get("added_tokens", [])
    pattern = find_word_pattern(saved.get("pre_tokenizer"))
    unusual = [
        *(["a normalizer"] if saved.get("normalizer") is not None else []),
        *(["another pattern of words"] if pattern is None else []),
        *(["added tokens that are not special"] if any(not token["special"] for token in added) else []),
        *(["another model than BPE"] if model.get("type", "BPE") != "BPE" else []),
        *(name for name, usual in PLAIN_BPE.items() if (model.get(name) or usual) != usual),
    ]
    letters, vocab = _byte_letters(), model.get("vocab", {})
    if not unusual and any(letter not in vocab for letter in letters):
        unusual = ["a vocabulary without some of the 256 bytes"]
    if unusual or pattern is None:
        raise UserError(
            f"the page cannot encode as this run's tokenizer does, which has {', '.join(unusual)}: it knows "
            "characters, bytes and byte-level BPE as GPT-2, GPT-4 and Llama 3 have it"
        )
    codes = {letter: byte for byte, letter in enumerate(letters)}
    tokens = [b""] * tokenizer.vocab_size
    for text, i in [*vocab.items(), *((token["content"], token["id"]) for token in added)]:
        tokens[i] = bytes(codes[c] for c in text) if all(c in codes for c in text) else text.encode()
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    triples = [(vocab[left], vocab[right], vocab[left + right]) for left, right in pairs]
    return tokens, [vocab[letter] for letter in letters], pattern, triples, bool(model.get("ignore_merges"))


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary, as GPT-2's."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]
