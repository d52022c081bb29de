import concurrent.futures
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data import bpe as bpe_module
from jaxgpt.data.bpe import BPETokenizer, split_words, train_bpe
from jaxgpt.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    find_start_token,
    fingerprint,
    load_tokenizer,
)
from jaxgpt.errors import UserError
from tests.conftest import TEXT

SPANISH = "En un lugar de la Mancha, ¿qué ñandú? — «sí», 🐎\n"


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT], 300)


@given(st.text(alphabet=SPANISH, min_size=0, max_size=50))
def test_characters_there_and_back(text):
    tokenizer = CharTokenizer(SPANISH)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=50))
def test_bytes_there_and_back(text):
    text = text.encode("utf-8", "ignore").decode("utf-8", "ignore")
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int32
    assert ByteTokenizer().decode(ids) == text


def test_bpe_there_and_back_on_text_it_never_saw(bpe):
    assert bpe.vocab_size <= 300
    assert bpe.decode(bpe.encode(SPANISH)) == SPANISH
    assert len(bpe.encode(TEXT)) < 0.6 * len(TEXT)


def test_training_bpe_twice_gives_the_same(bpe):
    assert train_bpe([TEXT], 300).to_json() == bpe.to_json()


def test_special_tokens_written_by_a_user_are_text(bpe):
    assert bpe.end_of_text is not None
    assert bpe.end_of_text not in bpe.encode("a <|endoftext|> b")
    assert bpe.decode(bpe.encode("a <|endoftext|> b")) == "a <|endoftext|> b"


@pytest.fixture
def busy_threads():
    """Eight threads that take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool
    sys.setswitchinterval(before)


def test_special_tokens_of_one_thread_are_text_in_another(bpe, busy_threads):
    text = "a <|endoftext|> b"
    expected = bpe.encode(text).tolist()

    def is_right(conversation):
        if conversation:
            return bpe.end_of_text in bpe.locate(text, specials=True)[0]
        return bpe.encode(text).tolist() == expected

    assert all(busy_threads.map(is_right, [True, False] * 2000))


def test_long_texts_of_several_threads(bpe, busy_threads, monkeypatch):
    """They share the words that are kept."""
    monkeypatch.setattr(bpe_module, "LONG_TEXT", 1)
    monkeypatch.setattr(bpe_module, "MOST_WORDS", 30)
    texts = [" ".join(f"word{n * m % 97}" for m in range(20)) for n in range(300)]
    for text, ids in zip(texts, busy_threads.map(bpe.encode, texts), strict=True):
        assert ids.tolist() == bpe._encode_whole(text).ids


def test_character_ids_are_nanogpts():
    """Sorted by code point: nanoGPT's prepare.py gives newline 0, space 1."""
    tokenizer = CharTokenizer("hello world\n")
    assert tokenizer.characters == "\n dehlorw"
    assert tokenizer.encode("he\n").tolist() == [4, 3, 0]


def test_unknown_characters_are_named():
    with pytest.raises(UserError, match=r"'s' \(U\+0073\), 'ñ' \(U\+00F1\)"):
        CharTokenizer("abc").encode("cañas")
    with pytest.raises(UserError, match="and more"):
        CharTokenizer("a").encode("bcdefghijklmnop")


def test_invalid_utf8_decodes_to_the_replacement_character():
    assert ByteTokenizer().decode([0xC3]) == "�"


def test_numbers():
    tokenizer = IdTokenizer(50)
    assert tokenizer.encode("3 49").tolist() == [3, 49]
    assert tokenizer.decode([3, 49]) == "3 49"
    with pytest.raises(UserError, match="token 50 is outside the vocabulary, 0 to 49"):
        tokenizer.encode("50")
    with pytest.raises(UserError, match="no tokenizer"):
        tokenizer.encode("hello")


def test_saved_and_loaded(tmp_path, bpe):
    for tokenizer in (CharTokenizer(SPANISH), ByteTokenizer(), IdTokenizer(7), bpe):
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_json(), encoding="utf-8")
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer)
        assert loaded.vocab_size == tokenizer.vocab_size
        assert fingerprint(loaded) == fingerprint(tokenizer)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"jaxgpt": "runes"}',
        '{"jaxgpt": "char"}',
        '{"jaxgpt": "ids", "vocab_size": 0}',
        '{"model": {}}',
    ],
)
def test_damaged_files_are_told(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(UserError):
        load_tokenizer(path)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(UserError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "none.json")


def test_where_an_empty_prompt_starts(bpe):
    assert find_start_token(bpe)[0] == bpe.end_of_text
    assert find_start_token(CharTokenizer("\nab")) == (0, "a newline")
    assert find_start_token(ByteTokenizer()) == (10, "a newline")
    assert find_start_token(CharTokenizer("ab"))[0] == 0


def test_any_tokenizer_of_the_library_loads(tmp_path):
    """One with another end-of-text token, a post-processor, padding and truncation: none of which we want."""
    hf = pytest.importorskip("tokenizers", reason="BPE is an extra")
    tokenizer = hf.Tokenizer(hf.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "[UNK]": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(1)
    loaded = BPETokenizer(tokenizer.to_str())
    assert loaded.encode("a b").tolist() == [2, 3]
    assert loaded.end_of_text == 1
    assert json.loads(loaded.to_json())["model"]["type"] == "WordLevel"


def test_a_special_token_ends_a_text_and_not_one_of_html():
    hf = pytest.importorskip("tokenizers", reason="BPE is an extra")
    tokenizer = hf.Tokenizer(hf.models.BPE({"</s>": 0, "<eos>": 1, "a": 2}, []))
    assert BPETokenizer(tokenizer.to_str()).end_of_text == 0
    tokenizer.add_special_tokens(["<eos>"])
    assert BPETokenizer(tokenizer.to_str()).end_of_text == 1


def test_a_panic_of_the_library_is_told(tmp_path, monkeypatch):
    """What Rust raises is no Exception; a keyboard interrupt is not one either, and passes."""

    class PanicException(BaseException):
        pass

    class Library:
        class Tokenizer:
            @staticmethod
            def from_str(text):
                raise PanicException("index out of bounds") if "panic" in text else KeyboardInterrupt

    monkeypatch.setattr("jaxgpt.data.bpe._tokenizers", lambda: Library)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"panic": 1}')
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be used: not a .*: index out of bounds"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(path)


def test_ids_with_holes_are_below_the_vocabulary():
    hf = pytest.importorskip("tokenizers", reason="BPE is an extra")
    tokenizer = BPETokenizer(hf.Tokenizer(hf.models.WordLevel({"a": 2, "b": 7}, unk_token="a")).to_str())
    assert tokenizer.vocab_size == 8 and tokenizer.encode("b").tolist() == [7]


def test_what_is_no_unicode_is_told(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        with pytest.raises(UserError, match="is not Unicode"):
            tokenizer.encode("a\udcff")


# One of each shape that matters to where words end: spaces and newlines alone and in runs, before and after anything.
LINES = ["a", "it's", "1", "!", "ñ", "漢", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2028", "x" * 9]
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def as_gpt4(bpe):
    """The same merges with Llama 3's words."""
    saved = json.loads(bpe.to_json())
    saved["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": GPT4}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    return BPETokenizer(json.dumps(saved))


@pytest.fixture(scope="module")
def greedy():
    """BPE that has learnt runs of white space and punctuation, so that a cut within one would show."""
    return train_bpe(["!\n\n!\n \n  a\n\n\n  it's  \t\t 11 \r\n\r\n" * 50], 330)


@given(parts=st.lists(st.sampled_from(LINES), max_size=60), gpt4=st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_long_text_has_the_ids_of_one_call_of_the_library(greedy, parts, gpt4):
    tokenizer, text = as_gpt4(greedy) if gpt4 else greedy, "".join(parts)
    assert "".join(split_words(text)) == text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe_module, "LONG_TEXT", 1)
        patch.setattr(bpe_module, "MOST_WORDS", 3)  # forgets now and then
        found = tokenizer.encode(text)
    assert found.dtype == np.int32
    assert found.tolist() == tokenizer._encode_whole(text).ids


@pytest.mark.parametrize("text", ["", "a" * 70_000, "\n" * 70_000, "a b\n" * 20_000, TEXT * 40])
def test_long_texts_of_one_kind(bpe, text):
    assert bpe.encode(text).tolist() == bpe._encode_whole(text).ids


def test_a_tokenizer_of_other_words_reads_the_whole(bpe, monkeypatch):
    """One that puts a space before a text would put one before each piece."""
    saved = json.loads(bpe.to_json())
    for change in (
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": json.loads(as_gpt4(bpe).to_json().replace("{1,3}", "{1,4}"))["pre_tokenizer"]},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
    ):
        other = BPETokenizer(json.dumps(saved | change))
        monkeypatch.setattr(bpe_module, "LONG_TEXT", 1)
        assert not other._is_splittable
        assert other.encode(TEXT[:300]).tolist() == other._encode_whole(TEXT[:300]).ids


def test_characters_are_found_wherever_they_are():
    for characters in ("a", "\U0010ffff", "ab\U0010ffff", "\x00é"):
        tokenizer = CharTokenizer(characters)
        assert tokenizer.encode(characters * 3).tolist() == [*range(len(characters))] * 3
        with pytest.raises(UserError, match="not in this tokenizer's"):
            tokenizer.encode("b\U0010fffe" + characters)
