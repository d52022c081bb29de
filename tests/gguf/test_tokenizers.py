"""Tokenizers survive the way to GGUF and back, and short imitations of llama.cpp's encoders give the same ids.

llama.cpp itself is asked in test_llama_cpp.py.
"""

import itertools
import json
import random
import re
import unicodedata
from contextlib import nullcontext

import pytest

from jaxgpt.data.tokenizer import WORDS, BPETokenizer, ByteTokenizer, CharTokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.gguf.tokenizers import read_chat_template, read_ends, read_tokenizer, tokenizer_fields
from jaxgpt.hf.source import special_ids
from tests.conftest import TEXT
from tests.helpers import begin_with, split_by

SPANISH = "En un lugar de la Mancha, ¿qué ñandú? — «sí», 🐎\n"
ODD = "\x00\t\r\n\\\x7f \u2581ab<0x41>n"
SPACE = "\u2581"
NORMAL, USER_DEFINED, UNUSED = 1, 4, 5
END = "<|endoftext|>"
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def texts_of(alphabet, seed=0):
    """200 texts: pieces of prose, in which every seventh character is replaced."""
    rng = random.Random(seed)
    starts = [rng.randrange(len(TEXT) - 60) for _ in range(200)]
    pieces = [TEXT[start : start + rng.randrange(1, 60)] for start in starts]
    return ["".join(rng.choice(alphabet) if rng.random() < 1 / 7 else c for c in piece) for piece in pieces]


TEXTS = texts_of([*SPANISH, "  ", "\n\n", "'s", "'LL", "2026", "漢字", "\u00a0", END, "e\u0301", SPACE, "\t"])


@pytest.fixture(scope="module")
def trained():
    return train_bpe([TEXT + SPANISH], 400)


def change(tokenizer, **parts):
    """The same tokenizer with other parts; a dictionary changes fields of a part."""
    saved = tokenizer.parts()
    return BPETokenizer(json.dumps(saved | {n: saved[n] | p if n == "model" else p for n, p in parts.items()}))


def sentencepiece(*, spaced):
    """BPE as transformers makes it of SentencePiece's files: every two tokens that make a token are a merge."""
    learned = "th he in nd ar el the and _t _the _and _a __ lan lance ce can nc dent not ho se tho who los"
    learned = learned.replace("_", SPACE).split()
    letters = sorted({*TEXT, SPACE, "é"} - {" ", "\n"})
    specials = ["<unk>", "<s>", "</s>", "\n\n", SPACE * 3]
    vocab = {t: i for i, t in enumerate([*specials, *(f"<0x{b:02X}>" for b in range(256)), *learned, *letters])}
    cuts = [(t[:cut], t[cut:]) for t in (*learned, SPACE * 3) for cut in range(1, len(t))]
    merges = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": t, "special": i < 3, **flags} for i, t in enumerate(specials)]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    back = [replace | {"pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    fallback = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    saved = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if spaced else replace,
        "post_processor": begin_with({"<s>": 1}),
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **fallback},
    }
    return BPETokenizer(json.dumps(saved))


def make(name, trained):
    if "spaced" in name:
        return sentencepiece(spaced=name == "spaced")
    vocab = trained.parts()["model"]["vocab"]
    parts = {
        "gpt-2": {},
        "llama-bpe": {  # no merges make "zebra": only a whole word finds it
            "model": {"vocab": vocab | {"zebra": len(vocab)}, "ignore_merges": True},
            "pre_tokenizer": split_by(WORDS[0]),
            "post_processor": begin_with({END: trained.end_of_text}),
        },
        "dbrx": {"pre_tokenizer": split_by(WORDS[0])},
        "qwen2": {"pre_tokenizer": split_by(WORDS[1]), "normalizer": {"type": "NFC"}},
    }
    return change(trained, **parts[name])


def fields_of(tokenizer, vocab_size=None, *, chat_template=None, ends=()):
    return tokenizer_fields(tokenizer, vocab_size or tokenizer.vocab_size, chat_template=chat_template, ends=ends)


# After llama-vocab.cpp of llama.cpp, version of llama-cpp-python 0.3.36.


def unescape(token):
    """Read a token of "rwkv" as llama.cpp does."""
    named = {"n": "\n", "r": "\r", "t": "\t"}
    parts = re.findall(r"\\x([0-9a-f]{2})|\\([^x])|([^\\])", token, flags=re.DOTALL)
    return b"".join(bytes.fromhex(code) or (named.get(other, other) + plain).encode() for code, other, plain in parts)


def rwkv(fields, text):
    """llm_tokenizer_rwkv_session: the longest token that matches, else the unknown one for a byte."""
    tokens = {unescape(token): i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    raw, found = text.encode(), []
    while raw:
        size = max((n for n in range(1, 9) if raw[:n] in tokens), default=0)
        found.append(tokens[raw[:size]] if size else fields["tokenizer.ggml.unknown_token_id"])
        raw = raw[size or 1 :]
    return found


def spm(fields, text):
    """llm_tokenizer_spm_session: merge the two neighbours whose token has the highest score, the leftmost first."""
    tokens, kinds, scores = (fields["tokenizer.ggml." + name] for name in ("tokens", "token_type", "scores"))
    ids, found = {token: i for i, token in enumerate(tokens)}, []
    own = "|".join(re.escape(token) for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED)
    for piece in filter(None, re.split(f"({own})", text)):
        if kinds[ids.get(piece, 0)] == USER_DEFINED:
            found.append(ids[piece])
            continue
        parts = [*(" " * fields["tokenizer.ggml.add_space_prefix"] + piece).replace(" ", SPACE)]
        while pairs := [(-scores[ids[a + b]], n) for n, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]:
            at = min(pairs)[1]
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        found += [i for p in parts for i in ([ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()])]
    return found


@pytest.mark.parametrize("characters", [TEXT + SPANISH, ODD, None])
@pytest.mark.filterwarnings("ignore:llama.cpp fills the memory")
def test_characters_and_bytes(characters):
    tokenizer = ByteTokenizer() if characters is None else CharTokenizer(characters)
    fields = fields_of(tokenizer, tokenizer.vocab_size + 3)
    for text in [*TEXTS, ODD, SPANISH, ODD[::-1] * 3]:
        text = "".join(c for c in text if c in (characters or text))
        assert rwkv(fields, text) == tokenizer.encode(text).tolist()
    if characters:
        assert rwkv(fields, "a漢[PAD"[:3]) == [
            tokenizer.encode(c)[0] for c in "a\n\n\n\n"
        ]  # no unused token begins here
        with pytest.warns(UserWarning, match="fills the memory") if not characters.isascii() else nullcontext():
            fields_of(tokenizer)
    assert fields["tokenizer.ggml.suppress_tokens"] == [*range(tokenizer.vocab_size, tokenizer.vocab_size + 3)]


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "dbrx", "qwen2", "spaced", "unspaced"])
@pytest.mark.filterwarnings("ignore:llama.cpp may encode otherwise")
def test_bpe(name, trained):
    """The tokenizer comes back with its ids, and llama.cpp finds the same ids by the fields: of BPE by its own code for this name."""
    tokenizer = make(name, trained)
    size = tokenizer.vocab_size
    fields = fields_of(tokenizer, size + 5, chat_template="{{ messages }}", ends=[7, 8])
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len({*tokens}) == len(kinds) == size + 5 and kinds[size:] == [UNUSED] * 5
    assert (read_chat_template(fields), read_ends(fields)) == ("{{ messages }}", [7, 8])
    other = read_tokenizer(fields)
    assert (other.vocab_size, other.prefix, other.end_of_text) == (size, tokenizer.prefix, tokenizer.end_of_text)
    for text in [*TEXTS, "zebra", "", " a", "\n\n\na"]:
        ids = tokenizer.encode(unicodedata.normalize("NFC", text) if name == "qwen2" else text)
        assert other.encode(unicodedata.normalize("NFC", text) if name == "qwen2" else text).tolist() == ids.tolist()
        assert other.decode(ids).lstrip(" ") == tokenizer.decode(ids).lstrip(" ")
    vocab = tokenizer.parts()["model"]["vocab"]
    if "spaced" not in name:
        assert fields["tokenizer.ggml.pre"] == name
        assert {t: i for i, t in enumerate(tokens[:size])} == {**vocab, END: tokenizer.end_of_text}
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        assert merges == [tuple(pair) for pair in tokenizer.parts()["model"]["merges"]]
        return
    assert kinds[vocab[SPACE * 3]] == NORMAL  # a token of the user's would be printed as it is
    for text in [*TEXTS, "zebra", "e\u0301", " a", "\n\n\na", *TEXT.split()[:20]]:
        if SPACE not in text:
            assert spm(fields, text) == tokenizer.encode(text).tolist(), text


def test_a_tokenizer_begins_and_ends_texts_as_before(trained):
    def specials(tokenizer, *ends):
        fields = fields_of(tokenizer, ends=ends)
        return [fields.get(f"tokenizer.ggml.{n}") for n in ("bos_token_id", *ENDS, "add_bos_token")]

    end, spaced = trained.end_of_text, make("spaced", trained)
    assert specials(trained) == [end, end, None, None, False]
    assert specials(trained, 5, 6) == [end, 5, 6, None, False]
    assert specials(trained, 5, 6, 7) == [end, 5, 7, 6, False]
    assert specials(make("llama-bpe", trained)) == [end, end, None, None, True]
    assert specials(spaced) == [1, 2, None, None, True]
    assert specials(change(spaced, post_processor=None)) == [1, 2, None, None, False]  # a chat template may write it
    endless = BPETokenizer(trained.to_json().replace(END, "<|nothing|>"))
    assert specials(endless, 9) == [9, 9, None, None, False]
    with pytest.raises(UserError, match="has no token that ends a text"):  # llama.cpp would take token 11
        specials(endless)
    assert specials(CharTokenizer("ab\n")) == [0, None, None, None, False]
    assert specials(CharTokenizer("ab\n\x03"), 0) == [1, 0, None, None, False]
    for tokenizer, ends in ((trained, ()), (CharTokenizer("ab\n"), ()), (CharTokenizer("ab\n\x03"), (0,))):
        ids, fields = special_ids(tokenizer, *ends), fields_of(tokenizer, ends=ends)
        assert fields["tokenizer.ggml.padding_token_id"] == ids["pad"]
        assert fields.get("tokenizer.ggml.unknown_token_id") == (None if tokenizer is trained else ids["unk"])
    with pytest.raises(UserError, match="4 tokens end a text"):
        specials(trained, 1, 2, 3, 4)


REFUSED = {
    "a normalizer Lowercase": {"normalizer": {"type": "Lowercase"}},
    'the pre-tokenizer {"type": "Sequence".*p{N}{1,4}': {"pre_tokenizer": split_by(WORDS[0].replace("1,3", "1,4"))},
    "dropout 0.5": {"model": {"dropout": 0.5}},
    "the normalizer null and the pre-tokenizer .*ByteLevel": {"model": {"byte_fallback": True}},
    "a model WordLevel, not BPE": {
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        "added_tokens": [],
    },
}


def test_what_llama_cpp_does_not_have(trained):
    for message, parts in REFUSED.items():
        with pytest.raises(UserError, match=message) as caught:
            fields_of(change(trained, **parts))
        assert "\n" not in str(caught.value)
    spaced = sentencepiece(spaced=True)
    merges = [pair for pair in spaced.parts()["model"]["merges"] if pair != ["t", "he"]]
    with pytest.raises(UserError, match="no merge of 't' and 'he'"):
        fields_of(change(spaced, model={"merges": merges}))
    with pytest.raises(UserError, match="do not fit into 3 rows"):
        fields_of(trained, 3)
