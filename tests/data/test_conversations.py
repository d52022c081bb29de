"""Conversations: read with care, packed without a cut, each once an epoch, and the loss of each by itself."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.conversations import Conversations, encode_all, pack_best_fit, read_messages
from jaxgpt.data.dataset import DataConfig, open_data
from jaxgpt.data.pipeline import training_batches, validation_batches
from jaxgpt.data.template import ETX, PLAIN
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import UserError
from jaxgpt.loss import make_loss
from tests.helpers import TINY, chat_file, make_model

T = 112  # tokens, of which the longest conversation takes nearly all


def conversation(*contents):
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": c} for n, c in enumerate(contents)]}


GOOD = json.dumps(conversation("a", "b"))


def message(**fields):
    return json.dumps({"messages": [*conversation("a", "b")["messages"], {"role": "user", "content": "c"} | fields]})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"text"', "got 'text', needs {"),
        ('{"messages": ["hello"]}', "message 1 is 'hello': give a role, system, user, assistant, tool, and a content"),
        (message(tool_calls=[1]), "message 3 has 'tool_calls', which is not understood"),
        (message(role="assistant", tool_calls=[1]), "message 3 has the call 1: give {"),
        (message(role="assistant", weight=0.5), r"message 3 has the weight 0\.5: give 0, .* or 1"),
        (json.dumps(conversation("a", "b")).replace('"b"', '"b", "weight": 0'), "none of its 2 messages"),
        (message(content="\ud800"), r"message 3: the content has U\+D800, which is not a character"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_lines_are_named(line, said, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(UserError, match=rf"chat\.jsonl:3: .*{said}"):
        list(read_messages(path))


def test_good_lines_are_read(tmp_path):
    path = tmp_path / "chat.jsonl"
    other = {"id": 7, "messages": [m | {"name": "me"} for m in conversation("ñ", "")["messages"]]}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    more = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": "c", "annotations": [], "weight": 1},
    ]
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\n{json.dumps(other)}\n{json.dumps({'messages': more})}".encode())
    assert [m for _, m, _ in read_messages(path)] == [
        conversation("a", "b")["messages"],
        conversation("ñ", "")["messages"],
        [{"role": "system", "content": "ab"}, {"role": "assistant", "content": "c"}],
    ]


def test_nothing_is_learnt_from_an_answer_without_weight(tmp_path):
    path, given = tmp_path / "chat.jsonl", conversation("a", "one", "b", "two")
    given["messages"][1]["weight"] = 0
    path.write_text(json.dumps(given))
    ((ids, answers),) = encode_all(path, ByteTokenizer(), PLAIN)
    assert bytes(ids[answers].tolist()).decode() == f"two{ETX}"
    assert "one" in bytes(ids.tolist()).decode()


def collect(encoded, block_size):
    ids, answers = zip(*encoded, strict=True)
    return Conversations(np.concatenate(ids), np.concatenate(answers), np.cumsum([len(x) for x in ids]), block_size)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """(path, Conversations) of 40 whose lengths and numbers of turns differ."""
    path = chat_file(tmp_path_factory.mktemp("chat"))
    return path, collect(encode_all(path, ByteTokenizer(), PLAIN), T)


def test_a_conversation_ends_after_its_last_answer_that_fits():
    """Ids count up; answers end after 4 and 8 of 10 tokens, and after 3 of 5."""
    answers = np.array([0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0], bool)

    def lengths(block_size):
        made = Conversations(np.arange(15), answers, np.array([10, 15]), block_size)
        assert len(made) == sum(made.lengths)
        return made.lengths.tolist(), made.shortened, made.left_out

    assert lengths(9) == ([10, 5], 0, 0)
    assert lengths(8) == ([8, 5], 1, 0)
    assert lengths(7) == ([8, 5], 1, 0)
    assert lengths(6) == lengths(4) == ([4, 5], 1, 0)
    assert lengths(3) == ([4, 3], 2, 0)
    assert lengths(2) == ([3], 1, 1)
    assert lengths(1) == ([], 0, 2)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_best_fit(sizes):
    """Nothing overflows, and what it opens a row for fits in no row that was open: the fullest is taken."""
    row_N = pack_best_fit(np.array(sizes), 20)
    filled = np.zeros(max(row_N) + 1, int)
    for n in np.argsort(-np.array(sizes), kind="stable"):
        fits = [20 - used for used in filled if used and used + sizes[n] <= 20]
        assert 20 - filled[row_N[n]] == (min(fits) if fits else 20)
        filled[row_N[n]] += sizes[n]
    assert filled.max() <= 20 and len(filled) <= 11 / 9 * -(-sum(sizes) // 10) + 4


def take(conversations, n, **how):
    options = dict(block_size=T, batch_size=3, seed=0) | how
    batches = training_batches(conversations, **options)
    found = list(itertools.islice(batches, n))
    batches.close()
    return found


def documents(batch):
    """The conversations of a batch, as bytes of their ids and of the answers' targets."""
    for inputs, targets, mask, segments in zip(*batch[:4], strict=True):
        for number in range(1, segments.max() + 1):
            here = segments == number
            assert np.diff(np.flatnonzero(here)).max(initial=1) == 1
            np.testing.assert_array_equal(inputs[here][1:], targets[here][:-1])
            yield bytes([inputs[here][0], *targets[here]]), bytes(targets[here & mask].tolist())
        assert not mask[segments == 0].any() and segments.min() >= 0


def texts_of(path):
    return {PLAIN.write(messages).text.removesuffix("\n").encode() for _, messages, _ in read_messages(path)}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_conversation_once_an_epoch(held, number):
    path, conversations = held
    rows = conversations.rows
    (batch,) = take(conversations, 1, batch_size=rows, start_step=number)
    found = dict(documents(batch))
    assert len(list(documents(batch))) == len(found) == 40 and set(found) == texts_of(path)
    for text, answers in found.items():
        turns = (text.decode() + "\n").split(ETX + "\n")
        assert answers.decode() == "".join(t.removeprefix("Assistant:\n") + ETX for t in turns if t.startswith("Ass"))


def test_batch_t_is_the_same_from_wherever_one_starts_and_epochs_differ(held):
    conversations = held[1]
    whole = take(conversations, 3, batch_size=conversations.rows)  # three epochs
    (again,) = take(conversations, 1, batch_size=conversations.rows, start_step=2)
    np.testing.assert_array_equal(again[:4], whole[2][:4])
    assert len({batch.inputs_BT.tobytes() for batch in whole}) == 3
    assert not np.array_equal(whole[0][:4], take(conversations, 1, seed=1, batch_size=conversations.rows)[0][:4])


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_validation_has_every_conversation_once(held, batch_size):
    path, conversations = held
    batches = list(validation_batches(conversations, block_size=T, batch_size=batch_size))
    assert {b.inputs_BT.shape for b in batches} == {(batch_size, T)}
    found = [text for batch in batches for text, _ in documents(batch)]
    assert len(found) == 40 and set(found) == texts_of(path)
    (some,) = validation_batches(conversations, block_size=T, batch_size=100, max_tokens=2 * T)
    assert (some.segments_BT.max(axis=1) > 0).sum() == 2


def test_the_loss_is_the_mean_over_the_answers_of_all_conversations(held):
    """Each alone in a row, against all of them packed."""
    conversations = held[1]
    model, params = make_model(dataclasses.replace(TINY, vocab_size=256, block_size=T, n_layer=1))
    loss = jax.jit(lambda batch: make_loss(model)(params, batch, None)[:2])

    def sums(batches):
        return np.sum([[float(x) for x in loss(batch)] for batch in batches], axis=0)

    packed = sums(validation_batches(conversations, block_size=T, batch_size=4))
    whole = [conversations.read(n) for n in range(40)]
    alone = sums(next(iter(validation_batches(collect([pair], T), block_size=T, batch_size=4))) for pair in whole)
    assert packed[1] == alone[1] == sum(answers[1:].sum() for _, answers in whole)
    np.testing.assert_allclose(packed[0], alone[0], rtol=1e-5)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_prepared_once_and_split_by_position(tokenizer, tmp_path, monkeypatch):
    path = chat_file(tmp_path)
    config = DataConfig(path=str(path), tokenizer=tokenizer, val_fraction=0.25, bpe_vocab_size=300)
    first = open_data(config, block_size=T)
    monkeypatch.setattr("jaxgpt.data.dataset.write_entry", None)  # would be called
    again = open_data(config, block_size=T)
    assert first.fingerprint == again.fingerprint and "template_sha256" in first.fingerprint
    assert first.notes == again.notes
    texts = [PLAIN.write(messages).text.removesuffix("\n") for _, messages, _ in read_messages(path)]
    for split, expected in ((again.train, texts[:30]), (again.val, texts[30:])):
        assert isinstance(split, Conversations)
        found = [again.tokenizer.decode(split.read(n)[0]) for n in range(len(split.lengths))]
        assert [text.replace("<|endoftext|>", ETX) for text in found] == expected
