"""Our tokenizers as a `tokenizer.json` of Hugging Face's, with the same ids."""

from __future__ import annotations

import json
from typing import Any

from jaxgpt.data.bpe import BPETokenizer
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer


def tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """None: the run has numbers and no tokenizer."""
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.to_json()
    if isinstance(tokenizer, CharTokenizer):
        # Each character a word. An unknown one is an error there as here, since there is no token for it.
        return _file(
            model={"type": "WordLevel", "vocab": {c: i for i, c in enumerate(tokenizer.characters)}, "unk_token": ""},
            pre_tokenizer={"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
            decoder={"type": "Fuse"},
        )
    if isinstance(tokenizer, ByteTokenizer):
        names = _byte_names()
        return _file(
            model={"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []},
            pre_tokenizer={
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
            decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        )
    return None


def _file(**parts: Any) -> str:
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    return json.dumps(empty | {"post_processor": None} | parts, ensure_ascii=False, indent=2) + "\n"


def _byte_names() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself where it can be seen, else one from
    U+0100 on, in order (GPT-2, Radford et al. 2019)."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    names = {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return [names[byte] for byte in range(256)]


def tokenizer_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    """What transformers' AutoTokenizer wants beside it."""
    tokens = {"eos_token": tokenizer.end_of_text, "bos_token": next(iter(tokenizer.prefix), None)}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,  # else decoding drops spaces before punctuation
        **{name: tokenizer.decode([token]) for name, token in tokens.items() if token is not None},
    }
