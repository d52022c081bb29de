"""Pieces of text: no character is split, no stop string is shown, and nothing is lost."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.tokenizer import ByteTokenizer
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


def test_a_character_that_begins_in_the_prompt_is_not_lost():
    assert told(BYTES, [0xA9, ord("x")], prompt=list(b"caf\xc3")) == ["é", "x"]
