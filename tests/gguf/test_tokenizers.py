"""Tokenizers survive the way to GGUF and back, and short imitations of llama.cpp's encoders give the same ids.

llama.cpp itself is asked in test_llama_cpp.py.
"""

import itertools
import json
import random
import re
import warnings

import pytest

from jaxgpt.data.tokenizer import WORDS, BPETokenizer, ByteTokenizer, CharTokenizer, IdTokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.gguf.tokenizers import _unescape, read_chat_template, read_ends, read_tokenizer, tokenizer_fields
from tests.conftest import TEXT

SPANISH = "En un lugar de la Mancha, ¿qué ñandú? — «sí», 🐎\n"
ODD = "\x00\t\r\n\\\x7f \u2581ab<0x41>n"
SPACE = "\u2581"
USER_DEFINED, UNUSED = 4, 5


def texts_of(alphabet, seed=0):
    """200 texts: pieces of prose, in which every seventh character is replaced."""
    rng = random.Random(seed)
    starts = [rng.randrange(len(TEXT) - 60) for _ in range(200)]
    pieces = [TEXT[start : start + rng.randrange(1, 60)] for start in starts]
    return ["".join(rng.choice(alphabet) if rng.random() < 1 / 7 else c for c in piece) for piece in pieces]


TEXTS = texts_of(
    [*SPANISH, "  ", "\n\n", "'s", "'LL", "2026", "漢字", "\u00a0", "<|endoftext|>", "e\u0301", SPACE, "\t"]
)


@pytest.fixture(scope="module")
def trained():
    return train_bpe([TEXT + SPANISH], 400)


def change(tokenizer, **parts):
    """The same tokenizer with other parts; a dictionary changes fields of a part."""
    saved = tokenizer.parts()
    return BPETokenizer(json.dumps(saved | {n: saved[n] | p if n == "model" else p for n, p in parts.items()}))


def words(pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}


def begin(token, i):
    """A post-processor that puts a token before each text."""
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {token: {"id": token, "ids": [i], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}


def sentencepiece(*, spaced):
    """BPE as transformers makes it of SentencePiece's files: every two tokens that make a token are a merge."""
    learned = [
        "th",
        "he",
        "in",
        "nd",
        "ar",
        "el",
        "the",
        "and",
        SPACE + "t",
        SPACE + "the",
        SPACE + "and",
    ]
    learned += [
        SPACE + "a",
        SPACE * 2,
        "lan",
        "lance",
        "ce",
        "can",
        "nc",
        "dent",
        "not",
        "ho",
        "se",
        "tho",
        "who",
        "los",
    ]
    letters = sorted({*TEXT, SPACE, "é"} - {" ", "\n"})
    specials = ["<unk>", "<s>", "</s>", "\n\n"]
    vocab = {t: i for i, t in enumerate([*specials, *(f"<0x{b:02X}>" for b in range(256)), *learned, *letters])}
    merges = [(t[:cut], t[cut:]) for t in learned for cut in range(1, len(t)) if t[:cut] in vocab and t[cut:] in vocab]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": t, "special": t != "\n\n", **flags} for i, t in enumerate(specials)]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    fallback = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    back = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    saved = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if spaced else replace,
        "post_processor": begin("<s>", 1),
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **fallback},
    }
    return BPETokenizer(json.dumps(saved))


def make(name, trained):
    match name:
        case "gpt2":
            return trained
        case "llama3":  # no merges make "zebra": only a whole word finds it
            model = trained.parts()["model"]
            vocab = model["vocab"] | {"zebra": len(model["vocab"])}
            start = begin("<|endoftext|>", trained.end_of_text)
            model = {"vocab": vocab, "ignore_merges": True}
            return change(trained, model=model, pre_tokenizer=words(WORDS[0]), post_processor=start)
        case "dbrx":
            return change(trained, pre_tokenizer=words(WORDS[0]))
        case "qwen2":
            return change(trained, pre_tokenizer=words(WORDS[1]), normalizer={"type": "NFC"})
        case "spaced":
            return sentencepiece(spaced=True)
        case "unspaced":
            return sentencepiece(spaced=False)


BPE = ["gpt2", "llama3", "dbrx", "qwen2", "spaced", "unspaced"]


def fields_of(tokenizer, vocab_size=None, *, chat_template=None, ends=()):
    return tokenizer_fields(tokenizer, vocab_size or tokenizer.vocab_size, chat_template=chat_template, ends=ends)


# After llama-vocab.cpp of llama.cpp, version of llama-cpp-python 0.3.36.


def rwkv(fields, text):
    """llm_tokenizer_rwkv_session: the longest token that matches; None where llama.cpp would not return."""
    tokens = {_unescape(token): i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    prefixes = {token[:n] for token in tokens for n in range(len(token) + 1)}
    raw, found, at = text.encode(), [], 0
    while at < len(raw):
        end = at
        while end < len(raw) and raw[at : end + 1] in prefixes:
            end += 1
        if end == at:
            found, at = [*found, -1], at + 1
            continue
        whole = [n for n in range(at + 1, end + 1) if raw[at:n] in tokens]
        if not whole:
            return None
        found, at = [*found, tokens[raw[at : whole[-1]]]], whole[-1]
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


@pytest.mark.parametrize("characters", [TEXT, TEXT + SPANISH, ODD])
def test_characters(characters):
    tokenizer = CharTokenizer(characters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fields = fields_of(tokenizer, tokenizer.vocab_size + 3)
    assert [str(w.message)[:24] for w in caught] == [] if characters.isascii() else ["llama.cpp fills the mem"]
    assert read_tokenizer(fields).to_json() == tokenizer.to_json()
    for text in texts_of([*characters]) if characters != ODD else [ODD, ODD[::-1] * 3]:
        text = "".join(c for c in text if c in characters)
        assert rwkv(fields, text) == tokenizer.encode(text).tolist()
    assert rwkv(fields, "a漢") == [tokenizer.encode("a")[0], -1, -1, -1]
    assert rwkv(fields, "[PAD") == [-1] * 4  # no unused token begins here
    assert (rwkv(fields, "ö") is None) == ("ñ" in characters)  # which is what the warning is about
    assert fields["tokenizer.ggml.suppress_tokens"] == [*range(tokenizer.vocab_size, tokenizer.vocab_size + 3)]


def test_bytes():
    fields = fields_of(ByteTokenizer(), 300)
    assert isinstance(read_tokenizer(fields), ByteTokenizer)
    for text in [*TEXTS, ODD, SPANISH]:
        assert rwkv(fields, text) == ByteTokenizer().encode(text).tolist()


def test_ids():
    fields = fields_of(IdTokenizer(50)) | {"general.architecture": "gpt2", "gpt2.vocab_size": 50}
    assert read_tokenizer(fields).to_json() == IdTokenizer(50).to_json()


@pytest.mark.parametrize("name", BPE)
@pytest.mark.filterwarnings("ignore:llama.cpp does not normalize")
def test_bpe(name, trained):
    """A file with tokenizer.json gives the same bytes; one without gives a tokenizer with the same ids."""
    tokenizer = make(name, trained)
    size = tokenizer.vocab_size
    fields = fields_of(tokenizer, size + 5, chat_template="{{ messages }}", ends=[7, 8])
    assert len({*fields["tokenizer.ggml.tokens"]}) == len(fields["tokenizer.ggml.token_type"]) == size + 5
    assert fields["tokenizer.ggml.token_type"][size:] == [UNUSED] * 5
    assert read_tokenizer(fields).to_json() == tokenizer.to_json()
    assert (read_chat_template(fields), read_ends(fields)) == ("{{ messages }}", [7, 8])
    rebuilt = read_tokenizer({k: v for k, v in fields.items() if k != "tokenizer.huggingface.json"})
    for text in [*TEXTS, "zebra", "e\u0301", " a", "\n\n\na", *TEXT.split()[:20]]:
        ids = tokenizer.encode(text).tolist()
        assert rebuilt.encode(text).tolist() == ids, text
        assert rebuilt.decode(ids).strip(" ") == tokenizer.decode(ids).strip(" ")
        if "scores" in str(fields.keys()):
            assert spm(fields, text) == ids, text
    assert (rebuilt.prefix, rebuilt.end_of_text) == (tokenizer.prefix, tokenizer.end_of_text)
    assert rebuilt.specials == tokenizer.specials
    again = fields_of(rebuilt, size + 5, ends=[7, 8])
    assert {k: again[k] for k in again if "json" not in k} == {k: fields[k] for k in again if "json" not in k}


def test_a_tokenizer_begins_and_ends_texts_as_before(trained):
    def specials(tokenizer, ends=()):
        fields = fields_of(tokenizer, ends=ends)
        return [fields.get(f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos", "eot", "eom")], fields

    end = trained.end_of_text
    assert specials(trained)[0] == [end, end, None, None]
    assert specials(trained, [5, 6])[0] == [end, 5, 6, None]
    assert specials(trained, [5, 6, 7])[0] == [end, 5, 7, 6]
    found, fields = specials(make("llama3", trained))
    assert found[0] == end and fields["tokenizer.ggml.add_bos_token"]
    found, fields = specials(make("spaced", trained))
    assert found[:2] == [1, 2] and fields["tokenizer.ggml.unknown_token_id"] == 0
    found, fields = specials(change(make("spaced", trained), post_processor=None))
    assert found[:2] == [1, 2] and not fields["tokenizer.ggml.add_bos_token"]  # a chat template may write it
    # llama.cpp would take token 11 for the end of a text
    endless = BPETokenizer(trained.to_json().replace("<|endoftext|>", "<|nothing|>"))
    assert endless.end_of_text is None
    byte_0xff = endless.parts()["model"]["vocab"]["ÿ"]
    assert specials(endless)[0] == [byte_0xff, byte_0xff, None, None]
    assert specials(endless, [9])[0] == [9, 9, None, None]
    few = {t: i for t, i in endless.parts()["model"]["vocab"].items() if t not in "ÿÀÁ"}  # as GPT-NeoX's
    kept = [pair for pair in endless.parts()["model"]["merges"] if not {*"".join(pair)} & {*"ÿÀÁ"}]
    without = change(endless, model={"vocab": few, "merges": kept})
    fields = fields_of(without)
    assert fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]].startswith("[PAD")
    with pytest.raises(UserError, match="no token that ends a text"):
        fields_of(change(without, model={"vocab": {t: i for i, t in enumerate(few)}}, added_tokens=[]))
    assert specials(CharTokenizer("ab"))[0] == [None] * 4
    assert specials(CharTokenizer("ab"), [1])[0] == [None, 1, None, None]
    with pytest.raises(UserError, match="4 tokens end a text"):
        specials(trained, [1, 2, 3, 4])


END = "<|endoftext|>"
FLAG = {"id": 0, "content": END, "single_word": False, "lstrip": True, "rstrip": False, "normalized": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def test_tokens_of_spaces_in_files_of_llama_cpps_converter():
    """They are matched before anything else, so that of three spaces the first two are one token."""
    fields = fields_of(sentencepiece(spaced=False))
    i = fields["tokenizer.ggml.tokens"].index(SPACE * 2)
    fields["tokenizer.ggml.tokens"][i], fields["tokenizer.ggml.token_type"][i] = "  ", USER_DEFINED
    fields["tokenizer.ggml.scores"][i] = -1000.0
    del fields["tokenizer.huggingface.json"]
    tokenizer = read_tokenizer(fields)
    for text in ("a   the", "  ", "   the  a", "and the"):
        assert tokenizer.encode(text).tolist() == spm(fields, text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert fields_of(tokenizer)["tokenizer.ggml.token_type"] == fields["tokenizer.ggml.token_type"]


REFUSED = {
    "a normalizer Lowercase": {"normalizer": {"type": "Lowercase"}},
    'the pre-tokenizer {"type": "Sequence".*p{N}{1,4}': {"pre_tokenizer": words(WORDS[0].replace("1,3", "1,4"))},
    "the pre-tokenizer .*add_prefix_space": {"pre_tokenizer": LEVEL | {"add_prefix_space": True}},
    "ignore_merges True": {"model": {"ignore_merges": True}},
    "dropout 0.5": {"model": {"dropout": 0.5}},
    "end_of_word_suffix '</w>'": {"model": {"end_of_word_suffix": "</w>"}},
    "lstrip of the added token": {"added_tokens": [FLAG | {"special": True}]},
    "an unk_token, and no tokens for 255": {"model": {"vocab": {END: 0, "a": 1}, "merges": [], "unk_token": "a"}},
    "the normalizer null and the pre-tokenizer .*ByteLevel": {"model": {"byte_fallback": True}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_llama_cpp_does_not_have(message, trained):
    with pytest.raises(UserError, match=message) as caught:
        fields_of(change(trained, **REFUSED[message]))
    assert "\n" not in str(caught.value)


def test_other_models_and_missing_merges_are_refused(trained):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    with pytest.raises(UserError, match="a model WordLevel, not BPE"):
        fields_of(BPETokenizer(json.dumps(trained.parts() | {"model": model, "added_tokens": []})))
    spaced = sentencepiece(spaced=True)
    merges = [pair for pair in spaced.parts()["model"]["merges"] if pair != ["t", "he"]]
    with pytest.raises(UserError, match="no merge of 't' and 'he'"):
        fields_of(change(spaced, model={"merges": merges}))
    with pytest.raises(UserError, match="do not fit into 3 rows"):
        fields_of(trained, 3)


DAMAGED = {
    "tokens is missing": {"tokens": None},
    "tokens has 3 tokens, 2 of them distinct": {"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]},
    "needs a list of str": {"tokens": ["a", 3]},
    "token_type has 1 entries": {"token_type": [1]},
    "needs a list of int": {"token_type": "1"},
    "model is 'bert'": {"model": "bert"},
    "model is None": {"model": None},
    "pre is 'jais'": {"pre": "jais"},
    "pre is None": {"pre": None},
    "merges has 'ab'": {"merges": ["ab"]},
    "merges has 'a  b'": {"merges": ["a  b"]},
    "not a tokenizer.json": {"merges": ["zz zz"]},
    "bos_token_id is 999": {"add_bos_token": True, "bos_token_id": 999},
    "bos_token_id is 'a'": {"add_bos_token": True, "bos_token_id": "a"},
    "neither the 256 bytes nor characters": {"model": "rwkv"},
    "scores is missing": {"model": "llama"},
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_fields(message, trained):
    fields = fields_of(trained) | {"tokenizer.ggml." + name: value for name, value in DAMAGED[message].items()}
    with pytest.raises(UserError, match=message) as caught:
        read_tokenizer({k: v for k, v in fields.items() if v is not None and k != "tokenizer.huggingface.json"})
    assert "\n" not in str(caught.value)


def test_a_tokenizer_json_that_is_not_the_tokens(trained):
    fields = fields_of(trained)
    other = train_bpe([TEXT[::-1]], 400).to_json()
    for text, message in ((other, "differ: token"), (3, "is int"), ("{", "cannot be used"), ("{}", "cannot be used")):
        with pytest.raises(UserError, match=message):
            read_tokenizer(fields | {"tokenizer.huggingface.json": text})
    with pytest.raises(UserError, match="vocab_size, got None"):
        read_tokenizer({"tokenizer.ggml.model": "none"})
