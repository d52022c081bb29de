"""Convert the parts of a tokenizer.json to the fields that llama.cpp reads for byte-pair encoding, and back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxgpt.config.validate import short
from jaxgpt.data.tokenizer import WORDS, BPETokenizer
from jaxgpt.errors import UserError
from jaxgpt.hf.tokenizers import list_byte_names

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's types of tokens
SPACE = "\u2581"  # a space, in SentencePiece's vocabularies
LONGEST = 2**10  # characters of a token that are cut in two at every place
NOT_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes
PLAIN = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))  # other values are refused

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _sequence(first: dict[str, Any], *, use_regex: bool) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [first, BYTE_LEVEL | {"use_regex": use_regex}]}


def _split(pattern: dict[str, str], behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


# name in llama.cpp -> (pre-tokenizer, whether a word that is a token is never split)
PRE_TOKENIZERS = {
    "gpt-2": (BYTE_LEVEL, False),
    "llama-bpe": (_sequence(_split({"Regex": WORDS[0]}), use_regex=False), True),
    "dbrx": (_sequence(_split({"Regex": WORDS[0]}), use_regex=False), False),
    "qwen2": (_sequence(_split({"Regex": WORDS[1]}), use_regex=False), False),
    "smollm": (_sequence({"type": "Digits", "individual_digits": True}, use_regex=True), False),
}
# other names of the same, in files of llama.cpp's converter
ALIASES = {
    "olmo": "gpt-2",
    "phi-2": "gpt-2",
    "mpt": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "dbrx",
    "deepseek-r1-qwen": "qwen2",
    "starcoder": "smollm",
}

_PREPEND = {"type": "Prepend", "prepend": SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}
# (normalizer, pre-tokenizer, whether a text gets a space before it)
SENTENCEPIECE = (
    ({"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]}, None, True),
    (_REPLACE, None, False),
    (_REPLACE, _split({"String": " "}, "MergedWithPrevious"), False),
    *((None, _METASPACE | {"prepend_scheme": scheme}, scheme != "never") for scheme in ("first", "always", "never")),
)


def bpe_fields(tokenizer: BPETokenizer, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a BPE, without "tokenizer.ggml." in their names.

    Raises `UserError` for parts that llama.cpp does not have.
    """
    parts = tokenizer.parts()
    model, added = parts["model"], parts["added_tokens"]
    if model["type"] != "BPE":
        _refuse(f"a model {model['type']}, not BPE")
    for name in PLAIN:
        if model.get(name):
            _refuse(f"{name} {short(model[name])}")
    for token in added:
        if strips := [name for name in ("single_word", "lstrip", "rstrip") if token[name]]:
            _refuse(f"{strips[0]} of the added token {short(token['content'])}")
    tokens, special = list_tokens(parts), {token["id"]: token["special"] for token in added}
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    if any(len(pair) != 2 or " " in pair[0] + pair[1] for pair in merges):
        _refuse("merges of texts with spaces")
    kinds = {i: (CONTROL if special[i] else USER_DEFINED) if i in special else NORMAL for i in tokens}
    if model["byte_fallback"]:
        fields = _sentencepiece_fields(parts, tokens, kinds, merges)
    else:
        fields = _byte_level_fields(parts, tokens)
        fields["merges"] = [f"{left} {right}" for left, right in merges]
    fields["tokens"] = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    fields["token_type"] = [kinds.get(i, UNUSED) for i in range(vocab_size)]
    if "scores" in fields:
        fields["scores"] = [-float(fields["scores"].get(i, len(merges))) for i in range(vocab_size)]
    if len(set(fields["tokens"])) < vocab_size:
        _refuse("a token with the name of an unused one, [PAD...]")
    return fields


def find_never(tokens: list[str], kinds: list[int]) -> int | None:
    """Return a token that no text has: one that is unused, or byte 0xFF, which UTF-8 never contains; None if there is none."""
    never = [i for i, kind in enumerate(kinds) if kind == UNUSED or (kind == BYTE and tokens[i] == "<0xFF>")]
    return next(iter(never), tokens.index("ÿ") if "ÿ" in tokens else None)


def _refuse(part: str) -> NoReturn:
    raise UserError(f"llama.cpp cannot encode as this tokenizer does, which has {part}")


def list_tokens(parts: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each token by id. Raises `UserError` if two have the same id."""
    vocab = parts["model"]["vocab"]
    if not isinstance(vocab, dict):  # Unigram's has scores
        _refuse(f"a model {parts['model']['type']}, not BPE")
    ids = vocab | {token["content"]: token["id"] for token in parts["added_tokens"]}
    tokens = {i: text for text, i in ids.items()}
    if len(tokens) < len(ids):
        _refuse("two tokens of one id")
    return tokens


def _byte_level_fields(parts: Mapping[str, Any], tokens: dict[int, str]) -> dict[str, Any]:
    pre_tokenizer, normalizer, model = parts["pre_tokenizer"], parts["normalizer"], parts["model"]
    if normalizer not in (None, {"type": "NFC"}):
        _refuse(f"a normalizer {normalizer['type']}")
    if normalizer:
        warnings.warn("llama.cpp does not normalize texts to NFC, as this tokenizer does: others differ", stacklevel=4)
    wanted = (_drop_offsets(pre_tokenizer), model["ignore_merges"])
    names = [name for name, (pre, whole) in PRE_TOKENIZERS.items() if (_drop_offsets(pre), whole) == wanted]
    if not names:
        _refuse(f"ignore_merges {model['ignore_merges']} and the pre-tokenizer {json.dumps(pre_tokenizer)[:400]}")
    missing = [byte for byte, name in enumerate(list_byte_names()) if name not in model["vocab"]]
    if model["unk_token"] is not None and missing:
        _refuse(f"an unk_token, and no tokens for {len(missing)} of the 256 bytes")
    if used := [f"0x{byte:02X}" for byte in missing if byte not in NOT_IN_UTF8]:
        warnings.warn(f"this tokenizer drops bytes, and so does llama.cpp: {', '.join(used[:8])}", stacklevel=4)
    return {"model": "gpt2", "pre": names[0]}


def _drop_offsets(value: Any) -> Any:
    """Return a part without `trim_offsets`, which changes no ids."""
    if isinstance(value, list):
        return [_drop_offsets(item) for item in value]
    if isinstance(value, dict):
        return {name: _drop_offsets(item) for name, item in value.items() if name != "trim_offsets"}
    return value


def _sentencepiece_fields(
    parts: Mapping[str, Any], tokens: dict[int, str], kinds: dict[int, int], merges: list[tuple[str, ...]]
) -> dict[str, Any]:
    normalizer, pre_tokenizer, model = parts["normalizer"], parts["pre_tokenizer"], parts["model"]
    found = [spaced for n, p, spaced in SENTENCEPIECE if (n, p) == (normalizer, pre_tokenizer)]
    if not found:
        _refuse(
            f"the normalizer {json.dumps(normalizer)[:200]} and the pre-tokenizer {json.dumps(pre_tokenizer)[:200]}"
        )
    if found[0] and normalizer is None:
        warnings.warn("llama.cpp adds a space also before a text that begins with one", stacklevel=4)
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    if any(name not in model["vocab"] for name in byte_names):
        _refuse("no tokens for some of the 256 bytes")
    for name in byte_names:
        kinds[model["vocab"][name]] = BYTE
    if model["unk_token"] in model["vocab"]:
        kinds[model["vocab"][model["unk_token"]]] = UNKNOWN
    for i, text in tokens.items():
        if kinds[i] == USER_DEFINED and SPACE in text:  # llama.cpp would print U+2581, and merges make it anyway
            kinds[i] = NORMAL
    _check_merges([tokens[i] for i in tokens if kinds[i] == NORMAL], set(model["vocab"]), set(merges))
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = {i: ranks[text] for i, text in tokens.items() if text in ranks}
    fields = {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": found[0]}
    if model["unk_token"] in model["vocab"]:
        fields["unknown_token_id"] = model["vocab"][model["unk_token"]]
    return fields


def _check_merges(texts: list[str], vocab: set[str], merges: set[tuple[str, ...]]) -> None:
    """Raise `UserError` unless every two neighbours that make a token are a merge, as llama.cpp assumes."""
    for text in texts:
        _check_length(text)
        for cut in range(1, len(text)):
            pair = text[:cut], text[cut:]
            if pair not in merges and all(len(part) == 1 or part in vocab for part in pair):
                _refuse(f"byte fallback, and no merge of {short(pair[0])} and {short(pair[1])}")


def _check_length(text: str) -> None:
    if len(text) > LONGEST:  # all its cuts would be a square of that
        raise UserError(f"the token {short(text)} has {len(text):,} characters: needs at most {LONGEST:,}")


def find_pre_tokenizer(name: Any) -> str:
    """Return the name in PRE_TOKENIZERS of llama.cpp's pre-tokenizer. Raises `UserError` if it is not known."""
    found = ALIASES.get(name, name) if isinstance(name, str) else None
    if found not in PRE_TOKENIZERS:
        raise UserError(f"tokenizer.ggml.pre is {short(name)}: needs one of {', '.join([*PRE_TOKENIZERS, *ALIASES])}")
    return found


def byte_level_json(tokens: list[str], kinds: list[int], merges: list[str], pre: Any, prefix: int | None) -> str:
    """Return a tokenizer.json of byte-level BPE. prefix: the id that begins a text, or None.

    Raises `UserError` for a damaged merge, and for a pre-tokenizer that is not known.
    """
    name = find_pre_tokenizer(pre)
    pre_tokenizer, whole = PRE_TOKENIZERS[name]
    pairs = [merge.split(" ") for merge in merges]
    if damaged := [merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2]:
        raise UserError(f"tokenizer.ggml.merges has {short(damaged[0])}: needs two tokens and a space between them")
    return _render(
        tokens,
        kinds,
        prefix,
        normalizer={"type": "NFC"} if name == "qwen2" else None,  # as all models of this name have
        pre_tokenizer=pre_tokenizer,
        decoder=BYTE_LEVEL,
        model={"ignore_merges": whole, "merges": pairs},
    )


def sentencepiece_json(
    tokens: list[str], kinds: list[int], scores: list[float], prefix: int | None, *, unknown: Any, spaced: bool
) -> str:
    """Return a tokenizer.json of BPE with byte fallback. prefix: the id that begins a text, or None.

    Args:
        tokens: text of each token.
        kinds: type of each token.
        scores: of any two neighbours that make a token, those of the highest score are merged first.
        prefix: the id that begins a text, or None.
        unknown: the id for what has no token, which must be one of the ids.
        spaced: whether a text gets a space before it.
    """
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise UserError(
            f"tokenizer.ggml.unknown_token_id is {short(unknown)}: needs the id of one of {len(tokens):,} tokens"
        )
    ids = {text: i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (NORMAL, USER_DEFINED)}
    merges: list[tuple[float, str, str]] = []
    for text, i in ids.items():
        _check_length(text)
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in ids and text[cut:] in ids]
        merges += [(-scores[i], *pair) for pair in sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    merges.sort(key=lambda merge: merge[0])
    back = [_REPLACE | {"pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []
    return _render(
        tokens,
        kinds,
        prefix,
        normalizer=SENTENCEPIECE[0 if spaced else 1][0],
        decoder={"type": "Sequence", "decoders": back + strip},
        model={
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": tokens[unknown],
            "merges": [m[1:] for m in merges],
        },
    )


def _render(tokens: list[str], kinds: list[int], prefix: int | None, *, model: dict[str, Any], **parts: Any) -> str:
    """Return a tokenizer.json. All tokens are in the vocabulary of its model: ids of others would be assigned anew."""
    vocab = {text: i for i, text in enumerate(tokens) if not (kinds[i] == UNUSED and text == f"[PAD{i}]")}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": text, **flags, "special": kinds[i] != USER_DEFINED}
        for i, text in enumerate(tokens)
        if kinds[i] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    if prefix is not None:
        begin = tokens[prefix]
        single = [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        known = {begin: {"id": begin, "ids": [prefix], "tokens": [begin]}}
        template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}
        parts["post_processor"] = template
    usual = {"type": "BPE", **PLAIN, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    empty |= {"pre_tokenizer": None, "post_processor": None}
    return json.dumps(empty | parts | {"model": usual | model | {"vocab": vocab}}, ensure_ascii=False)
