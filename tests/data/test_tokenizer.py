"""Tokenizers: there and back, the ids of the library, and no special token from a user's text."""

import concurrent.futures
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.tokenizer import (
    WORDS,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    fingerprint,
    load_tokenizer,
    split_words,
    train_bpe,
)
from jaxgpt.errors import UserError
from tests.conftest import TEXT
from tests.helpers import split_by, with_words

SPANISH = "En un lugar de la Mancha, ¿qué ñandú? — «sí», 🐎\n"


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT], 300)


@given(characters=st.text(alphabet=SPANISH, max_size=50), text=st.text(st.characters(exclude_categories=["Cs"])))
def test_there_and_back(bpe, characters, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and tokenizer.decode(ids) == text
    assert CharTokenizer(SPANISH).decode(CharTokenizer(SPANISH).encode(characters)) == characters


def test_bpe_is_trained_as_asked(bpe):
    assert bpe.vocab_size <= 300 and len(bpe.encode(TEXT)) < 0.6 * len(TEXT)
    assert train_bpe([TEXT], 300).to_json() == bpe.to_json()


def test_special_tokens_written_by_a_user_are_text(bpe):
    """In one thread, while another reads conversations, too."""
    text = "a <|endoftext|> b"
    expected = bpe.encode(text).tolist()
    assert bpe.end_of_text is not None and bpe.end_of_text not in expected and bpe.decode(expected) == text

    def is_right(conversation):
        if conversation:
            return bpe.end_of_text in bpe.locate(text, specials=True)[0]
        return bpe.encode(text).tolist() == expected

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_right, [True, False] * 1000))


def test_character_ids_are_nanogpts():
    """Sorted by code point: nanoGPT's prepare.py gives newline 0, space 1."""
    tokenizer = CharTokenizer("hello world\n")
    assert tokenizer.characters == "\n dehlorw"
    assert tokenizer.encode("he\n").tolist() == [4, 3, 0]


def test_unknown_characters_are_named_wherever_they_are():
    with pytest.raises(UserError, match=r"'s' \(U\+0073\), 'ñ' \(U\+00F1\)"):
        CharTokenizer("abc").encode("cañas")
    with pytest.raises(UserError, match="and more"):
        CharTokenizer("a").encode("bcdefghijklmnop")
    for characters in ("a", "\U0010ffff", "ab\U0010ffff", "\x00é"):
        tokenizer = CharTokenizer(characters)
        assert tokenizer.encode(characters * 3).tolist() == [*range(len(characters))] * 3
        with pytest.raises(UserError, match="not in this tokenizer's"):
            tokenizer.encode("b\U0010fffe" + characters)


def test_saved_and_loaded(tmp_path, bpe):
    for tokenizer in (CharTokenizer(SPANISH), ByteTokenizer(), IdTokenizer(7), bpe):
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_json(), encoding="utf-8")
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer) and loaded.vocab_size == tokenizer.vocab_size
        assert fingerprint(loaded) == fingerprint(tokenizer)


def test_any_tokenizer_of_the_library_loads():
    """One with holes in its ids, another end-of-text token, padding and truncation, of which we want none."""
    hf = pytest.importorskip("tokenizers", reason="BPE is an extra")
    tokenizer = hf.Tokenizer(hf.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 7, "[UNK]": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(1)
    loaded = BPETokenizer(tokenizer.to_str())
    assert loaded.encode("a b").tolist() == [2, 7]
    assert (loaded.end_of_text, loaded.prefix, loaded.vocab_size) == (1, (0,), 8)
    assert json.loads(loaded.to_json())["model"]["type"] == "WordLevel"


def test_what_is_no_unicode_is_told(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        for text in ("a\udcff", "a\udcff" * 9000):
            with pytest.raises(UserError, match="is not Unicode"):
                tokenizer.encode(text)


# One of each shape that matters to where words end: spaces and newlines alone and in runs, before and after anything.
LINES = [*"a it's 1 ! ' b_( é. ñ 漢 xxxxxxxxx".split(), " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2028"]


@pytest.fixture(scope="module")
def greedy():
    """BPE that has learnt runs of white space and punctuation, so that a cut within one would show."""
    return train_bpe(["!\n\n!\n \n  a\n\n\n  it's  \t\t 11 \r\n\r\n" * 50], 330)


@given(parts=st.lists(st.sampled_from(LINES), max_size=60), words=st.sampled_from([None, *WORDS]))
@settings(max_examples=150, deadline=None)
def test_a_long_text_has_the_ids_of_one_call_of_the_library(greedy, parts, words):
    tokenizer, text = with_words(greedy, words) if words else greedy, "".join(parts)
    assert "".join(split_words(text)) == text
    found = tokenizer.encode(text)
    assert found.dtype == np.int32
    assert found.tolist() == tokenizer._encode_whole(text).ids


def test_a_tokenizer_of_other_words_reads_the_whole(bpe):
    """One that puts a space before a text would put one before each piece."""
    saved = json.loads(bpe.to_json())
    for change in (
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": split_by(WORDS[0].replace("{1,3}", "{1,4}"))},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
    ):
        other = BPETokenizer(json.dumps(saved | change))
        assert not other.is_splittable


GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [GROW] * 12}},
        {"normalizer": {"type": "Sequence", "normalizers": [GROW | {"pattern": {"Regex": "x?"}, "content": "x"}] * 40}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}},
    ],
)
def test_a_small_tokenizer_cannot_fill_the_memory(bpe, tmp_path, parts):
    """A dozen rules of growth took 5.7 GB, and one more ended the process."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(bpe.to_json()) | parts))
    with pytest.raises(UserError, match=r"tokenizer.json cannot be used: its \w+ may make a text .* times as long"):
        load_tokenizer(path)
