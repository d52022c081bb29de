"""Pieces of text: no character is split, no stop string is shown, and nothing is lost."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer
from jaxgpt.errors import UserError
from jaxgpt.sample.engine import Detokenizer, iter_text

BYTES = ByteTokenizer()


def told(tokenizer, ids, stop=(), every=1, **context):
    return list(iter_text(tokenizer, (ids[at : at + every] for at in range(0, len(ids), every)), stop, **context))


@settings(max_examples=40)
@given(st.one_of(st.text(max_size=20).map(str.encode), st.binary(max_size=20)), st.integers(1, 5))
def test_characters_come_whole_and_broken_bytes_as_in_the_whole(ids, every):
    shown = told(BYTES, list(ids), every=every)
    assert "".join(shown) == BYTES.decode(list(ids))
    with contextlib.suppress(UnicodeDecodeError):
        assert "".join(shown) == ids.decode()


@settings(max_examples=40)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.integers(1, 7))
def test_the_text_ends_before_the_first_stop_string(text, stop, every):
    ids = BYTES.encode(text).tolist()
    shown = "".join(told(BYTES, ids, stop, every))
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    if not ends:
        assert shown == text
    else:
        # Ids arrive one by one, so the stop that is complete first counts; one that begins earlier may not be yet.
        complete = min(at + len(s) for s in stop if (at := text.find(s)) >= 0)
        at = min(text.find(s) for s in stop if text.find(s) >= 0 and text.find(s) + len(s) == complete)
        assert shown == text[:at]


def test_what_may_become_a_stop_string_is_held_back():
    stream = Detokenizer(BYTES, ["<end>"])
    assert [stream.push([ord(c)]) for c in "a<en"] == ["a", "", "", ""]
    assert stream.push([ord("x")]) == "<enx"
    assert stream.push(b"b<e") == "b" and stream.rest() == "<e" and not stream.stopped
    stream = Detokenizer(BYTES, "<end>")
    assert stream.push(b"one<end>two") == "one" and stream.stopped and stream.push(b"three") == stream.rest() == ""


def test_nothing_is_asked_for_after_a_stop():
    ids = iter([b"one.", b"two"])
    assert list(iter_text(BYTES, ids, ["."])) == ["one"] and next(ids) == b"two"
    with pytest.raises(UserError, match="a stop string is empty"):
        Detokenizer(BYTES, ["x", ""])


SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
DECODERS = {  # the first two drop the space that a text begins with
    "Llama 2": [
        SPACE,
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
    "Metaspace": [{"type": "ByteFallback"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}],
    "Gemma": [SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}],
}


def make_pieces(name):
    """A tokenizer in the manner of SentencePiece's: pieces with their spaces, and bytes."""
    pieces = ["<s>", "▁", "▁hello", "▁world", "▁cat", "cat", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    decoder = {"type": "Sequence", "decoders": DECODERS[name]}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    begin = {"id": 0, "content": "<s>", "special": True}
    begin |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return BPETokenizer(json.dumps({"version": "1.0", "added_tokens": [begin], "decoder": decoder, "model": model}))


PROMPTS = ["", "<s> ▁hello", "▁hello " * 50, "<0xE4> <0xBD> <0xA0> " * 30 + "▁", "▁cat <0xC3> <0xA9>"]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_a_completion_is_what_its_ids_add_to_the_text_of_the_prompt(name, prompt):
    tokenizer = make_pieces(name)
    spelled = "▁cat ▁cat cat ▁ ▁cat <0xE4> <0xBD> <0xA0> ▁hello"
    ids_of = tokenizer.parts()["model"]["vocab"].__getitem__
    before, ids = ([ids_of(piece) for piece in text.split()] for text in (prompt, spelled))
    whole, start = tokenizer.decode(before + ids), tokenizer.decode(before)
    assert whole.startswith(start)
    for every in (1, 3, len(ids)):
        assert "".join(told(tokenizer, ids, every=every, prompt=before)) == whole.removeprefix(start)


def test_a_character_that_begins_in_the_prompt_is_not_lost():
    assert told(BYTES, [0xA9, ord("x")], prompt=list(b"caf\xc3")) == ["é", "x"]
