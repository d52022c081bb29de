"""Convert our tokenizers to Hugging Face's `tokenizer.json`, with the same ids."""

from __future__ import annotations

import itertools
import json
from typing import Any

from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer


def tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """Return the text of tokenizer.json, or None for a run that has ids and no tokenizer."""
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.to_json()
    if isinstance(tokenizer, CharTokenizer):
        # Each character is a word. An unknown one is an error, as in ours: there is no token for it.
        return _render(
            model={"type": "WordLevel", "vocab": {c: i for i, c in enumerate(tokenizer.characters)}, "unk_token": ""},
            pre_tokenizer={"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
            decoder={"type": "Fuse"},
        )
    if isinstance(tokenizer, ByteTokenizer):
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return _render(
            model={"type": "BPE", "vocab": {name: byte for byte, name in enumerate(list_byte_names())}, "merges": []},
            pre_tokenizer=byte_level,
            decoder=byte_level,
        )
    return None


def _render(**parts: Any) -> str:
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    return json.dumps(empty | {"post_processor": None} | parts, ensure_ascii=False, indent=2) + "\n"


def list_byte_names() -> list[str]:
    """Return the character for each byte in byte-level vocabularies (GPT-2, Radford et al. 2019).

    A visible character stands for itself, other bytes have the characters from U+0100 on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = itertools.count(256)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def tokenizer_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    """Return the tokenizer_config.json that transformers' AutoTokenizer needs next to tokenizer.json."""
    tokens = {"eos_token": tokenizer.end_of_text, "bos_token": next(iter(tokenizer.prefix), None)}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,  # true would drop spaces before punctuation when decoding
        **{name: tokenizer.decode([token]) for name, token in tokens.items() if token is not None},
    }
