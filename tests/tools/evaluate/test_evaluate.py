"""Invariants of the loss on text: its windows, and the units in which it is reported."""

import contextlib
import dataclasses
import math

import jax
import pytest

from jaxgpt.data.conversations import read_messages
from jaxgpt.data.dataset import DataConfig, open_data
from jaxgpt.data.template import PLAIN
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json, render_json
from jaxgpt.tools.evaluate.evaluate import evaluate_run, format_evaluation
from jaxgpt.tools.xray.xray import xray
from tests.helpers import TINY, chat_file, ids, recorded_run

C = TINY.block_size


def test_bits_are_counted_by_bytes_and_by_characters(run, tmp_path):
    dataset = open_data(run.experiment.data, block_size=C)
    text = dataset.tokenizer.decode(ids(dataset.val))
    assert dataset.val_bytes == len(text.encode()) == len(dataset.val) and dataset.val_characters == len(text)
    again = open_data(run.experiment.data, block_size=C)  # from the cache
    assert again.val_bytes == dataset.val_bytes

    path = tmp_path / "val.txt"
    path.write_text(text, encoding="utf-8")
    found = evaluate_run(run, str(path))
    assert found == evaluate_run(run) and found["loss"] == pytest.approx(run.val_loss, rel=1e-6)
    assert found == evaluate_run(run, str(path), stride=C)
    with pytest.raises(UserError, match="stride=9: needs at least 1 and at most block_size=8"):
        evaluate_run(run, stride=9)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert found["bits_per_character"] == pytest.approx(found["bits_per_byte"] * len(text.encode()) / len(text))
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


@pytest.mark.parametrize(
    "scale, perplexity, said",
    [pytest.param(1e4, math.inf, None, marks=pytest.mark.slow), (math.nan, None, "the loss is nan")],
)
def test_what_is_not_finite_is_null_and_is_said(run, scale, perplexity, said):
    """A loss of thousands has a perplexity that no float holds; parameters that are no numbers have neither."""
    blown = dataclasses.replace(run, params=jax.tree.map(lambda x: x * scale, run.params))
    with pytest.warns(UserWarning, match=said) if said else contextlib.nullcontext():
        found = evaluate_run(blown)
    assert perplexity is None or (found["perplexity"] == perplexity and found["loss"] > 1000)
    read = parse_json(render_json(found), "what is printed")
    assert read["perplexity"] is None and (read["loss"] is None) == (said is not None)
    assert "nan" in format_evaluation(found) or "inf" in format_evaluation(found)
    assert math.isnan(blown.score(["lance"])[0].bits) == (said is not None)
    if said is not None:
        with pytest.raises(UserError, match="logits that are not finite"):
            xray(blown, "lance")


@pytest.mark.parametrize("prefix", [(3,), (7, 3)])
def test_a_text_stands_after_the_tokens_that_its_tokenizer_begins_texts_with(run, prefix, tmp_path):
    """Then its first token is foreseen as well, and the prefix itself is not; each text alone tells what is due."""

    class Begun(ByteTokenizer):
        pass

    Begun.prefix = prefix
    begun = dataclasses.replace(run, tokenizer=Begun())
    path = tmp_path / "text.txt"
    for text in ("ñ", "q", "añejo", "In a village of La Mañcha"):
        path.write_text(text, encoding="utf-8")
        ids = list(text.encode())
        whole = [*prefix, *ids]
        befores = [whole[max(0, i - C) : i] for i in range(len(prefix), len(whole))]
        nats = -sum(x.logprob for x in run.loglikelihood([(b, [i]) for b, i in zip(befores, ids, strict=True)]))
        found = evaluate_run(begun, str(path), stride=1)
        assert found["tokens"] == len(ids)
        assert found["loss"] * len(ids) == pytest.approx(nats, rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
        (score,) = begun.score([text])
        assert (score.tokens, score.characters, len(score.logprobs)) == (len(ids), len(text), len(ids))
        if len(whole) <= C + 1:
            assert score.bits * math.log(2) == pytest.approx(nats, rel=1e-5)
    path.write_text("")
    with pytest.raises(UserError, match="has 0 tokens, needed at least 1"):
        evaluate_run(begun, str(path))
    assert begun.score([""])[0].tokens == 0


@pytest.fixture
def unread(tmp_path, monkeypatch):
    """A run of bytes with room for 33 tokens, whose loss on anything is 1."""
    path = chat_file(tmp_path)
    config = DataConfig(path=str(path), tokenizer="byte")
    run = recorded_run(tmp_path / "run", config, open_data(config, block_size=33), block_size=33)
    monkeypatch.setattr("jaxgpt.tools.evaluate.evaluate.mean_loss", lambda *args: (1.0, 7))
    return run


@pytest.mark.parametrize("own", [True, False])
def test_conversations_that_do_not_fit_are_counted(unread, own):
    found = evaluate_run(unread, None if own else unread.experiment.data.path)
    first, last = (36, 40) if own else (0, 40)
    conversations = [messages for _, messages, _ in read_messages(unread.experiment.data.path)][first:last]
    long = [m for m in conversations if len(PLAIN.write(m).text.strip()) > 34]
    assert found["left_out"] == sum(len(PLAIN.write(m[:2]).text.strip()) > 34 for m in long)
    assert found["left_out"] + found["shortened"] == len(long)
    assert found["shortened"] > 0
    left_out, shortened = found["left_out"], found["shortened"]
    said = f"longer than the context: {left_out} conversations are left out, and {shortened} are cut after"
    assert said in format_evaluation(found)
