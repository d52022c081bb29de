r"""Convert tokenizers to the fields of GGUF and back, so that llama.cpp encodes texts as we do.

- Characters and bytes are model "rwkv", the only one in llama.cpp without special tokens: it takes the longest token that
  matches. Each byte of a character outside the vocabulary has the unknown token. But if its first byte also begins a
  character in the vocabulary, llama.cpp appends tokens until the memory is full.
- Byte-level BPE is "gpt2": llama.cpp knows patterns of words by a name (`PRE_TOKENIZERS`), and does not normalize.
- BPE with byte fallback and U+2581 for spaces is "llama", SentencePiece's. A token's score is the rank of its first merge.
  llama.cpp merges any two neighbours that make a token, so a tokenizer must have all these merges.
- Rows of the embedding without a token are UNUSED, and llama.cpp's own samplers never choose them.
- llama.cpp ends texts also at tokens that it knows by name, such as `</s>`, whatever the file says.
- A BPE is made from a file's tokens, their types, and its merges ("gpt2") or scores ("llama"), to encode as llama.cpp does.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxgpt.config.validate import LARGEST_SIZE, check_count, check_value, short
from jaxgpt.data.tokenizer import WORDS, BPETokenizer, ByteTokenizer, CharTokenizer, IdTokenizer, Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import Json
from jaxgpt.hf.source import PLAIN_TOKEN, list_byte_names, special_ids

GGML = "tokenizer.ggml."
CHAT_TEMPLATE = "tokenizer.chat_template"
ENDS = ("eos", "eom", "eot")  # llama.cpp ends a text at each of them
BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>")  # what chat templates call bos_token: Llama 3, Llama 2, Gemma
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's types of tokens
SPACE = "\u2581"  # a space, in SentencePiece's vocabularies
LONGEST = 2**10  # characters of a token that are cut in two at every place
NOT_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes

# The words of Mistral's Tekken, as its tokenizer.json spells them.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _sequence(first: Json, *, use_regex: bool = False) -> Json:
    return {"type": "Sequence", "pretokenizers": [first, BYTE_LEVEL | {"use_regex": use_regex}]}


def _split(pattern: dict[str, str], behavior: str = "Isolated") -> Json:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


# name in llama.cpp -> (pre-tokenizer, whether a word that is a token is never split)
PRE_TOKENIZERS = {
    "gpt-2": (BYTE_LEVEL, False),
    "llama-bpe": (_sequence(_split({"Regex": WORDS[0]})), True),
    "dbrx": (_sequence(_split({"Regex": WORDS[0]})), False),
    "qwen2": (_sequence(_split({"Regex": WORDS[1]})), False),
    "smollm": (_sequence({"type": "Digits", "individual_digits": True}, use_regex=True), False),
    "tekken": (_sequence(_split({"Regex": TEKKEN_WORDS})), True),
}
# Names in llama.cpp of what is the same: src/llama-vocab.cpp.
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "olmo": "gpt-2", "phi-2": "gpt-2", "smaug-bpe": "dbrx"}
ALIASES |= {"stablelm2": "qwen2", "deepseek-r1-qwen": "qwen2", "starcoder": "smollm", "refact": "smollm"}
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


def _escape(text: bytes) -> str:
    """Spell a token as llama.cpp's "rwkv" does. llama.cpp reads hexadecimal digits in lower case only."""
    if len(text) > 1:
        return text.decode()
    named = {b"\n": r"\n", b"\r": r"\r", b"\t": r"\t", b"\\": r"\\"}
    return named.get(text) or (text.decode() if 0x20 <= text[0] < 0x7F else rf"\x{text[0]:02x}")


BYTE_TOKENS = [_escape(bytes([i])) for i in range(256)]


def tokenizer_fields(tokenizer: Tokenizer, vocab_size: int, *, chat_template: str | None, ends: Sequence[int]) -> Json:
    """Return the fields of GGUF for a tokenizer, as Python values: lists are arrays, ids are unsigned.

    vocab_size: number of rows of the embedding. chat_template: in Jinja. ends: ids that end a text, the usual one first
    and the end of a chat's turns last, by default the tokenizer's own. Raises `UserError` if llama.cpp cannot encode as
    this tokenizer does, and warns of texts that it encodes differently.
    """
    if tokenizer.vocab_size > vocab_size or {*ends} - {*range(vocab_size)}:
        raise UserError(f"{tokenizer.vocab_size:,} tokens, with ends {[*ends]}, do not fit into {vocab_size:,} rows")
    own = [tokenizer.end_of_text] if tokenizer.end_of_text is not None else []
    fields: Json
    if isinstance(tokenizer, IdTokenizer):  # the size is in ARCHITECTURE.vocab_size
        return {GGML + "model": "none"}
    if isinstance(tokenizer, BPETokenizer):
        fields = _bpe_fields(tokenizer, vocab_size)
        own = own or [*ends][:1]
        if not own:  # llama.cpp would take token 11
            _refuse("no token that ends a text")
    else:
        characters = tokenizer.characters if isinstance(tokenizer, CharTokenizer) else ""
        if not characters.isascii():
            when = "a character outside this vocabulary begins with the same byte of UTF-8 as one in it"
            warnings.warn(f"llama.cpp fills the memory when {when}: check prompts", stacklevel=2)
        tokens = BYTE_TOKENS if isinstance(tokenizer, ByteTokenizer) else [_escape(c.encode()) for c in characters]
        # Unused tokens begin with a byte that UTF-8 never contains.
        unused = [rf"\xff[PAD{i}]" for i in range(len(tokens), vocab_size)]
        kinds = [NORMAL] * len(tokens) + [UNUSED] * len(unused)
        fields = {"model": "rwkv", "tokens": tokens + unused, "token_type": kinds}
    ends = [*dict.fromkeys(ends)] or own
    if len(ends) > 3:
        raise UserError(f"{len(ends)} tokens end a text: llama.cpp has 3 at most")
    names = ((), ENDS[:1], ENDS[::2], ENDS)[len(ends)]
    fields |= {f"{name}_token_id": end for name, end in zip(names, ends, strict=True)}
    ids = special_ids(tokenizer, ends[-1] if ends else None)  # as in an export to Hugging Face
    known = [i for text, i in tokenizer.specials.items() if text in BEGINNINGS]
    named = {"bos": [*tokenizer.prefix, *known, *own, ids["bos"]][0], "padding": ids["pad"]}
    if fields["model"] == "rwkv":
        named["unknown"] = ids["unk"]
    fields |= {f"{name}_token_id": i for name, i in named.items() if i is not None}
    if len(tokenizer.prefix) > 1:
        _refuse(f"{len(tokenizer.prefix)} tokens before each text")
    fields |= {"add_bos_token": bool(tokenizer.prefix), "add_eos_token": False}
    if unused := [i for i, kind in enumerate(fields["token_type"]) if kind == UNUSED]:
        fields["suppress_tokens"] = unused
    template = {} if chat_template is None else {CHAT_TEMPLATE: chat_template}
    return {GGML + name: value for name, value in fields.items()} | template


def _bpe_fields(tokenizer: BPETokenizer, vocab_size: int) -> Json:
    """Return the fields of a BPE. Raises `UserError` for parts that llama.cpp does not have."""
    parts = tokenizer.parts()
    model, added = parts["model"], parts["added_tokens"]
    normalizer, pre_tokenizer = parts["normalizer"], parts["pre_tokenizer"]
    if model["type"] != "BPE":
        _refuse(f"a model {model['type']}, not BPE")
    for part in (model, *added):
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "single_word", "lstrip", "rstrip"):
            if part.get(name):
                _refuse(f"{name} {short(part[name])}")
    ids = model["vocab"] | {token["content"]: token["id"] for token in added}
    tokens, special = {i: text for text, i in ids.items()}, {token["id"]: token["special"] for token in added}
    if len(tokens) < len(ids):
        _refuse("two tokens of one id")
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    if any(len(pair) != 2 or " " in pair[0] + pair[1] for pair in merges):
        _refuse("merges of texts with spaces")
    fields: Json
    differs: list[str] = []
    has_fallback, vocab, words = model["byte_fallback"], model["vocab"], json.dumps(pre_tokenizer)
    names = [f"<0x{byte:02X}>" for byte in range(256)] if has_fallback else list_byte_names()
    missing = {byte for byte, name in enumerate(names) if name not in vocab}
    kinds = dict.fromkeys(tokens, NORMAL)
    kinds |= {i: CONTROL if is_special else USER_DEFINED for i, is_special in special.items()}
    if has_fallback:
        found = [spaced for n, p, spaced in SENTENCEPIECE if (n, p) == (normalizer, pre_tokenizer)]
        if not found:
            _refuse(f"the normalizer {json.dumps(normalizer)[:200]} and the pre-tokenizer {words[:200]}")
        if found[0] and normalizer is None:
            differs.append("that begin with a space")
        fields = {"model": "llama", "pre": "default", "scores": None, "add_space_prefix": found[0]}
    else:
        if normalizer == {"type": "NFC"}:
            differs.append("that are not in NFC")
        elif normalizer is not None:
            _refuse(f"a normalizer {normalizer['type']}")

        def spell(pre: Any, whole: bool) -> str:  # without an option that changes no ids
            return re.sub(r'"trim_offsets": \w+', "", json.dumps([pre, whole], sort_keys=True))

        wanted = spell(pre_tokenizer, model["ignore_merges"])
        known = [name for name, (pre, whole) in PRE_TOKENIZERS.items() if spell(pre, whole) == wanted]
        if not known:
            _refuse(f"ignore_merges {model['ignore_merges']} and the pre-tokenizer {words[:400]}")
        if model["unk_token"] is None:  # both leave out a byte without a token, but other tokens merge across it in one
            differs += [f"with the byte 0x{byte:02X}" for byte in sorted(missing - NOT_IN_UTF8)]
            missing.clear()
        fields = {"model": "gpt2", "pre": known[0], "merges": [f"{left} {right}" for left, right in merges]}
    if differs:
        warnings.warn(f"llama.cpp may encode otherwise: texts {', '.join(differs)}", stacklevel=3)
    if missing:
        _refuse(f"no tokens for {len(missing)} of the 256 bytes")
    if has_fallback:
        kinds |= dict.fromkeys((vocab[name] for name in names), BYTE)
        unknown = vocab.get(model["unk_token"])
        if unknown is not None:
            fields["unknown_token_id"], kinds[unknown] = unknown, UNKNOWN
        # llama.cpp would print U+2581 of a token that the user defined, and merges make it anyway.
        kinds |= {i: NORMAL for i, text in tokens.items() if kinds[i] == USER_DEFINED and SPACE in text}
        known = {*merges}
        for pair in (pair for i, text in tokens.items() if kinds[i] == NORMAL for pair in _cuts(text)):
            if pair not in known and all(len(part) == 1 or part in vocab for part in pair):
                _refuse(f"byte fallback, and no merge of {short(pair[0])} and {short(pair[1])}")
        ranks = {left + right: rank for rank, (left, right) in reversed([*enumerate(merges)])}  # the first merge
        fields["scores"] = [-float(ranks.get(tokens.get(i, ""), len(merges))) for i in range(vocab_size)]
    fields["tokens"] = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    fields["token_type"] = [kinds.get(i, UNUSED) for i in range(vocab_size)]
    if len({*fields["tokens"]}) < vocab_size:
        _refuse("a token with the name of an unused one, [PAD...]")
    return fields


def _cuts(token: str) -> list[tuple[str, str]]:
    """Return a token cut in two at every place. Raises `UserError` if it is too long: all cuts are a square of that."""
    if len(token) > LONGEST:
        raise UserError(f"the token {short(token)} has more than {LONGEST:,} characters")
    return [(token[:cut], token[cut:]) for cut in range(1, len(token))]


def _refuse(part: str) -> NoReturn:
    raise UserError(f"llama.cpp cannot encode as this tokenizer does, which has {part}")


def read_tokenizer(fields: Json) -> Tokenizer:
    """Return the tokenizer of a file. Raises `UserError` if its fields are damaged, or of a kind that is not known."""
    if fields.get(GGML + "model") == "none":
        key = f"{fields.get('general.architecture')}.vocab_size"
        return IdTokenizer(check_count(key, fields.get(key), 1, LARGEST_SIZE))
    parts = _make_parts(fields, _read_list(fields, "tokens", str))
    return BPETokenizer(json.dumps(parts, ensure_ascii=False))


def _make_parts(fields: Json, tokens: list[str]) -> Json:
    """Return the tokenizer.json of a BPE in a file of another program."""
    kind = fields.get(GGML + "model")
    kinds = _read_list(fields, "token_type", int, len(tokens))
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    if len(vocab) + kinds.count(UNUSED) < len(tokens):
        raise UserError("two tokens have the same text")
    # SentencePiece's own tokens of spaces are made by merges.
    added = [
        {"id": i, "content": token, "special": kinds[i] != USER_DEFINED, **PLAIN_TOKEN}
        for token, i in vocab.items()
        if kinds[i] in (UNKNOWN, CONTROL) or (kinds[i] == USER_DEFINED and SPACE not in token)
    ]
    if kind == "gpt2":
        model, parts, has_begin = _byte_level_parts(fields)
    elif kind == "llama":
        model, parts, has_begin = _sentencepiece_parts(fields, tokens, vocab)
    else:
        raise UserError(f"{GGML}model={short(kind)} is not read, only gpt2, llama and none: give --tokenizer FILE")
    begin = fields.get(GGML + "bos_token_id")
    if fields.get(GGML + "add_bos_token", has_begin) and begin is not None:
        first = tokens[check_count(f"{GGML}bos_token_id", begin, 0, len(tokens) - 1)]
        special, text = {"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        parts["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [special, text],
            "pair": [special, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {first: {"id": first, "ids": [begin], "tokens": [first]}},
        }
    model = {"type": "BPE", "vocab": vocab, **model}
    return {"version": "1.0", "added_tokens": added, "model": model, **parts}


def _byte_level_parts(fields: Json) -> tuple[Json, Json, bool]:
    """Return (model, other parts, whether a text begins with a token unless the file says) of a "gpt2"."""
    given = str(fields.get(GGML + "pre"))
    pre = ALIASES.get(given, given)
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"{GGML}pre={short(pre)} is unknown: jaxgpt reads {', '.join([*PRE_TOKENIZERS, *ALIASES])}")
    words, whole = PRE_TOKENIZERS[pre]
    merges = [pair.split(" ") for pair in _read_list(fields, "merges", str)]
    if any(len(pair) != 2 for pair in merges):
        raise UserError(f"{GGML}merges is damaged: each must be two tokens and a space")
    model = {"merges": merges, "ignore_merges": whole}
    return model, {"pre_tokenizer": words, "decoder": BYTE_LEVEL}, pre in ("llama-bpe", "tekken")


def _sentencepiece_parts(fields: Json, tokens: list[str], vocab: Mapping[str, int]) -> tuple[Json, Json, bool]:
    """Return what `_byte_level_parts` does of a "llama", whose merges are all cuts of a token in two, by its score."""
    scores = _read_list(fields, "scores", float, len(tokens))
    merges = []
    for token, i in vocab.items():
        merges += [(-scores[i], pair) for pair in _cuts(token) if pair[0] in vocab and pair[1] in vocab]
    merges.sort(key=lambda merge: merge[0])
    unknown = check_count(f"{GGML}unknown_token_id", fields.get(GGML + "unknown_token_id", 0), 0, len(tokens) - 1)
    model = {
        "merges": [pair for _, pair in merges],
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": tokens[unknown],
    }
    is_spaced = fields.get(GGML + "add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders: list[Json] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if is_spaced:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizer = SENTENCEPIECE[not is_spaced][0]
    return model, {"normalizer": normalizer, "decoder": {"type": "Sequence", "decoders": decoders}}, True


def _read_list(fields: Json, name: str, kind: type, length: int | None = None) -> list[Any]:
    """Return a list of values of one kind, with one for each token. Raises `UserError` if it is anything else."""
    values = fields.get(GGML + name)
    is_list = isinstance(values, list) and all(type(x) is kind for x in values)
    if not is_list or length not in (None, len(values)):
        raise UserError(f"{GGML}{name} is missing or damaged: it must be a list, with a value for each token")
    return values


def read_chat_template(fields: Json) -> str | None:
    """Return the chat template in the fields of a GGUF, in Jinja, or None if it has none."""
    return check_value(CHAT_TEMPLATE, fields.get(CHAT_TEMPLATE), str | None)


def read_ends(fields: Json) -> list[int]:
    """Return the ids that end a text, from the fields of a GGUF: the `ends` of `tokenizer_fields`."""
    found = (fields.get(f"{GGML}{name}_token_id") for name in ENDS)
    return [end for end in found if type(end) is int]
