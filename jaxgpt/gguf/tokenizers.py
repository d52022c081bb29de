r"""Convert tokenizers to the fields of GGUF and back, so that llama.cpp encodes texts as we do.

- Characters and bytes are written as model "rwkv", the only one in llama.cpp without special tokens: it takes the
  longest token that matches the bytes of the text. A character outside the vocabulary has token -1, which
  `llama_decode` refuses; but if its first byte is that of a character in the vocabulary, llama.cpp appends tokens until
  the memory is full.
- Byte-level BPE is "gpt2". llama.cpp identifies a pattern of words by a name (`jaxgpt.gguf.bpe.PRE_TOKENIZERS`), does not
  normalize (Qwen's texts that are not in NFC differ), and always has an end token: a tokenizer without one gets a token
  that no text contains.
- BPE with byte fallback and U+2581 for spaces is "llama", SentencePiece's, with a score for each token: the rank of its
  first merge. llama.cpp merges any two neighbours that make a token, so a tokenizer must have all these merges.
- Rows of the embedding without a token are UNUSED, and llama.cpp's own samplers never choose them.
- llama.cpp ends texts also at tokens that it knows by name, such as `<|endoftext|>`, `</s>` and `<|im_end|>`, and treats
  them as special, whatever the file says.
- Options of added tokens (`lstrip`, `rstrip`, `single_word`) are refused: llama.cpp has none.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgpt.config.validate import LARGEST_SIZE, short
from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, IdTokenizer, Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.gguf.bpe import (
    NORMAL,
    UNUSED,
    bpe_fields,
    byte_level_json,
    find_never,
    find_pre_tokenizer,
    list_tokens,
    sentencepiece_json,
)

GGML = "tokenizer.ggml."
JSON, CHAT_TEMPLATE = "tokenizer.huggingface.json", "tokenizer.chat_template"
ENDS = ("eos", "eom", "eot")  # llama.cpp ends a text at each of them
BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>")  # what chat templates call bos_token: Llama 3, Llama 2, Gemma
ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def tokenizer_fields(
    tokenizer: Tokenizer, vocab_size: int, *, chat_template: str | None, ends: Sequence[int]
) -> dict[str, Any]:
    """Return the fields of GGUF for a tokenizer, as Python values: lists are arrays, ids are unsigned.

    Args:
        tokenizer: the tokenizer.
        vocab_size: number of rows of the embedding. Those without a token get a name.
        chat_template: a chat template in Jinja, or None.
        ends: ids that end a text, the usual one first and that of a chat's turns last. Empty means the tokenizer's own.

    Raises:
        UserError: llama.cpp cannot encode as this tokenizer does. A warning names the texts it encodes differently.
    """
    if tokenizer.vocab_size > vocab_size or any(not 0 <= end < vocab_size for end in ends):
        raise UserError(f"{tokenizer.vocab_size:,} tokens with ends {[*ends]} do not fit into {vocab_size:,} rows")
    template = {} if chat_template is None else {CHAT_TEMPLATE: chat_template}
    match tokenizer:
        case IdTokenizer():  # the size is in ARCHITECTURE.vocab_size
            return {GGML + "model": "none"}
        case CharTokenizer(characters=characters):
            if not characters.isascii():
                warnings.warn(
                    "llama.cpp fills the memory when a text has a character outside this vocabulary whose first byte of "
                    "UTF-8 is that of one in it: check the characters of prompts",
                    stacklevel=2,
                )
            fields = _rwkv_fields([c.encode() for c in characters], vocab_size)
        case ByteTokenizer():
            fields = _rwkv_fields([bytes([i]) for i in range(256)], vocab_size)
        case BPETokenizer():
            fields = bpe_fields(tokenizer, vocab_size)
            template[JSON] = tokenizer.to_json()
        case _:
            raise UserError(f"a {type(tokenizer).__name__} cannot be written as GGUF: needs char, byte, ids or BPE")
    own = [tokenizer.end_of_text] if tokenizer.end_of_text is not None else []
    if isinstance(tokenizer, BPETokenizer):  # llama.cpp's default is token 11
        never = find_never(fields["tokens"], fields["token_type"])
        own = own or [*ends][:1] or [never]
        if own == [None]:
            raise UserError("the tokenizer has no token that ends a text, and no unused one: llama.cpp needs one")
    fields |= _name_ends([*dict.fromkeys(ends)] or own)
    if begin := [*tokenizer.prefix, *(i for text, i in tokenizer.specials.items() if text in BEGINNINGS), *own][:1]:
        fields["bos_token_id"] = begin[0]
    if len(tokenizer.prefix) > 1:
        raise UserError(f"the tokenizer begins texts with {len(tokenizer.prefix)} tokens: llama.cpp adds one at most")
    fields |= {"add_bos_token": bool(tokenizer.prefix), "add_eos_token": False}
    if unused := [i for i, kind in enumerate(fields["token_type"]) if kind == UNUSED]:
        fields["suppress_tokens"] = unused
    return {GGML + name: value for name, value in fields.items()} | template


def _name_ends(ends: list[int]) -> dict[str, int]:
    if len(ends) > len(ENDS):
        raise UserError(f"{len(ends)} tokens end a text: llama.cpp has {len(ENDS)} at most")
    names = ((), ENDS[:1], ENDS[::2], ENDS)[len(ends)]
    return {f"{name}_token_id": end for name, end in zip(names, ends, strict=True)}


def _rwkv_fields(texts: list[bytes], vocab_size: int) -> dict[str, Any]:
    # Unused tokens begin with a byte that UTF-8 never contains.
    unused = [rf"\xff[PAD{i}]" for i in range(len(texts), vocab_size)]
    return {
        "model": "rwkv",
        "tokens": [_escape(text) for text in texts] + unused,
        "token_type": [NORMAL] * len(texts) + [UNUSED] * len(unused),
    }


def _escape(text: bytes) -> str:
    """Spell a token as llama.cpp's "rwkv" does; llama.cpp reads hexadecimal digits in lower case only."""
    for letter, character in ESCAPES.items():
        if text == character:
            return "\\" + letter.decode()
    if len(text) == 1:
        return "\\\\" if text == b"\\" else text.decode() if 0x20 <= text[0] < 0x7F else rf"\x{text[0]:02x}"
    return text.decode()


def _unescape(token: str) -> bytes:
    def read(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes.fromhex(code[1:].decode()) if len(code) == 3 else ESCAPES.get(code, code)

    return re.sub(rb"\\(x[0-9a-f]{2}|[^x])", read, token.encode("utf-8", "surrogatepass"), flags=re.DOTALL)


def read_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in the fields of a GGUF, which are untrusted. Raises `UserError` if it is not known.

    A `tokenizer.huggingface.json` is returned as it is, if its tokens are those of the file. Otherwise BPE is
    rebuilt from tokens, merges or scores, and the name of the pre-tokenizer.
    """
    model = fields.get(GGML + "model")
    if model in ("none", "no_vocab"):
        size = fields.get(f"{fields.get('general.architecture')}.vocab_size")
        if type(size) is not int or not 0 < size <= LARGEST_SIZE:
            raise UserError(f"a GGUF without a vocabulary needs its size in ARCHITECTURE.vocab_size, got {short(size)}")
        return IdTokenizer(size)
    tokens = _read_list(fields, "tokens", str)
    kinds = (
        _read_list(fields, "token_type", int, len(tokens)) if GGML + "token_type" in fields else [NORMAL] * len(tokens)
    )
    if not 0 < len(set(tokens)) == len(tokens) <= LARGEST_SIZE:
        raise UserError(
            f"{GGML}tokens has {len(tokens):,} tokens, {len(set(tokens)):,} of them distinct: needs distinct ones"
        )
    if model == "rwkv":
        return _read_rwkv(tokens, kinds)
    if model not in ("gpt2", "llama"):
        raise UserError(f"{GGML}model is {short(model)}: needs gpt2, llama, rwkv or none")
    if (text := fields.get(JSON)) is not None:
        return _check_json(text, tokens)
    prefix = _read_prefix(fields, len(tokens))
    if model == "gpt2":
        merges = _read_list(fields, "merges", str)
        return BPETokenizer(byte_level_json(tokens, kinds, merges, fields.get(GGML + "pre"), prefix))
    scores = _read_list(fields, "scores", float, len(tokens))
    unknown, spaced = fields.get(GGML + "unknown_token_id", 0), fields.get(GGML + "add_space_prefix", True)
    return BPETokenizer(sentencepiece_json(tokens, kinds, scores, prefix, unknown=unknown, spaced=bool(spaced)))


def read_chat_template(fields: Mapping[str, Any]) -> str | None:
    """Return the chat template in the fields of a GGUF, in Jinja; None if it has none."""
    template = fields.get(CHAT_TEMPLATE)
    if template is not None and not isinstance(template, str):
        raise UserError(f"{CHAT_TEMPLATE} is {type(template).__name__}: needs a text")
    return template


def read_ends(fields: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text, from the fields of a GGUF: the `ends` of `tokenizer_fields`."""
    found = [fields.get(f"{GGML}{name}_token_id") for name in ENDS]
    return [end for end in found if type(end) is int]


def _read_list(fields: Mapping[str, Any], name: str, kind: type, length: int | None = None) -> list[Any]:
    values = fields.get(GGML + name)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise UserError(f"{GGML}{name} is missing or damaged: needs a list of {kind.__name__}")
    if length is not None and len(values) != length:
        raise UserError(f"{GGML}{name} has {len(values):,} entries for {length:,} tokens")
    return values


def _read_prefix(fields: Mapping[str, Any], size: int) -> int | None:
    """Return the id that begins a text, or None. The defaults are llama.cpp's."""
    sentencepiece = fields[GGML + "model"] == "llama"
    usual = sentencepiece or find_pre_tokenizer(fields.get(GGML + "pre")) == "llama-bpe"
    if not fields.get(GGML + "add_bos_token", usual):
        return None
    begin = fields.get(GGML + "bos_token_id", 1 if sentencepiece else None)
    if type(begin) is not int or not 0 <= begin < size:
        raise UserError(f"{GGML}bos_token_id is {short(begin)}: needs the id of one of {size:,} tokens")
    return begin


def _read_rwkv(tokens: list[str], kinds: list[int]) -> Tokenizer:
    used = [token for token, kind in zip(tokens, kinds, strict=True) if kind != UNUSED]
    texts = [_unescape(token) for token in used]
    if used == tokens[: len(used)]:
        if texts == [bytes([i]) for i in range(256)]:
            return ByteTokenizer()
        characters = [text.decode("utf-8", errors="replace") for text in texts]
        if all(len(c) == 1 for c in characters) and characters == sorted(set(characters)):
            return CharTokenizer("".join(characters))
    raise UserError("this vocabulary of rwkv is neither the 256 bytes nor characters in the order of their code points")


def _check_json(text: Any, tokens: list[str]) -> BPETokenizer:
    if not isinstance(text, str):
        raise UserError(f"{JSON} is {type(text).__name__}: needs the text of a tokenizer.json")
    try:
        tokenizer = BPETokenizer(text)
    except UserError as e:
        raise UserError(f"{JSON} cannot be used: {e}") from None
    for i, token in list_tokens(tokenizer.parts()).items():
        if i >= len(tokens) or tokens[i] != token:
            raise UserError(f"{JSON} and {GGML}tokens differ: token {i} is {short(token)} in the first")
    return tokenizer
