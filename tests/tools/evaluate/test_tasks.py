"""What a run answers, against what its scores and its samples say."""

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxgpt.data.tokenizer import ByteTokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.sample.score import Likelihood, pair_ids
from jaxgpt.tools.evaluate import evaluate_task, read_questions, task_table
from tests.conftest import TEXT


def read(tmp_path, task, *lines):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_questions(task, str(path))


def logprob(run, context, ending):
    """Of an ending, from the scores of the whole; both together fit into one window."""
    (score,) = run.score([context + ending])
    return sum(score.logprobs[len(context.encode()) :])


def test_acc_is_of_the_likeliest_ending_and_acc_norm_of_the_likeliest_per_character(run, tmp_path):
    """A short ending that is wrong and a long one that is right, and one where both ways agree."""
    short = {"ctx": "of", "endings": ["q", "a la"], "label": 1}
    plain = {"ctx": "of", "endings": ["a", "xq"], "label": "0"}
    assert logprob(run, "of", " q") > logprob(run, "of", " a la")
    assert logprob(run, "of", " q") < logprob(run, "of", " a la") / 4
    found = evaluate_task(run, "hellaswag", read(tmp_path, "hellaswag", short, plain))
    assert found == {
        "task": "hellaswag",
        "n": 2,
        "truncated": 0,
        "acc": 0.5,
        "acc_stderr": 0.5,  # of 0 and 1: deviation sqrt(1/2), over sqrt(2)
        "acc_norm": 1.0,
        "acc_norm_stderr": 0.0,
    }
    assert task_table(found) == "hellaswag: 2 questions\nacc 0.5000 ± 0.5000\nacc_norm 1.0000 ± 0.0000"


def test_the_last_word_is_guessed_by_what_greedy_decoding_writes(run, tmp_path):
    written = run.sample("that", max_new_tokens=3, greedy=True)
    assert written[0] == " " and " " not in written[1:]
    lines = [{"text": "that" + written}, {"text": "of qx"}, {"text": "that lañce"}]
    found = evaluate_task(run, "lambada", read(tmp_path, "lambada", *lines))
    nats = [-logprob(run, *context) for context in (("that", written), ("of", " qx"), ("at", " lañce"))]
    perplexity = math.exp(np.mean(nats))
    assert (found["acc"] * 3, found["n"], found["truncated"]) == (pytest.approx(1), 3, 1)
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert found["perplexity_stderr"] == pytest.approx(perplexity * np.std(nats, ddof=1) / math.sqrt(3), rel=1e-4)
    one = evaluate_task(run, "lambada", read(tmp_path, "lambada", lines[0]), batch_size=1)
    assert one["acc"] == 1 and one["acc_stderr"] is one["perplexity_stderr"] is None
    assert task_table(one).startswith("lambada: 1 questions\nacc 1.0000\nperplexity ")


def test_a_tokenizer_without_the_letters_names_the_line(run, tmp_path):
    questions = read(tmp_path, "lambada", {"text": "a b"}, {"text": "\ud800 b"})
    with pytest.raises(UserError, match=r"q.jsonl:2: the text .* is not Unicode"):
        evaluate_task(run, "lambada", questions)


def test_a_pair_is_its_text_cut_before_the_spaces():
    tokenizer = train_bpe([TEXT], 300)
    for context, continuation in (("of La Mancha", " the name"), ("of La Mancha  ", "the name"), ("keep a", "n old")):
        before, new = pair_ids(tokenizer, context, continuation)
        assert before == tokenizer.encode(context.rstrip()).tolist()
        assert new == tokenizer.encode(context + continuation).tolist()[len(before) :]
    assert pair_ids(tokenizer, "", "a") == ([tokenizer.end_of_text], tokenizer.encode("a").tolist())
    assert pair_ids(ByteTokenizer(), "  ", "a") == ([10], [32, 32, 97])
    for context, continuation in (("a", ""), ("keep a lan", "ce")):  # "lance" is one token
        with pytest.raises(UserError, match=f"{continuation!r} adds no token to the context"):
            pair_ids(tokenizer, context, continuation)


@pytest.mark.parametrize("task", ["hellaswag", "lambada"])
def test_answers_by_what_is_no_number_are_said_to_be_so(run, tmp_path, task):
    """The likeliest of endings that are all nan would be the first."""
    lines = {"hellaswag": {"ctx": "of", "endings": ["a", "xq"], "label": 0}, "lambada": {"text": "of qx"}}
    blown = dataclasses.replace(run, params=jax.tree.map(lambda x: x * math.nan, run.params))
    with pytest.warns(UserWarning, match="1 of 1 questions .* not finite"):
        found = evaluate_task(blown, task, read(tmp_path, task, lines[task]))
    assert task_table(found)


def test_acc_norm_is_by_characters_and_not_by_bytes(tmp_path):
    """-4 nats over 3 characters of 6 bytes, against -4.4 over 4 characters of a byte each."""
    question = read(tmp_path, "hellaswag", {"ctx": "of", "endings": ["ñññ", "aaaa"], "label": 1})
    told = SimpleNamespace(
        tokenizer=ByteTokenizer(),
        model=SimpleNamespace(config=SimpleNamespace(block_size=64)),
        likelihoods=lambda pairs, batch_size: [Likelihood(-4.0, False), Likelihood(-4.4, False)],
    )
    found = evaluate_task(told, "hellaswag", question)
    assert (found["acc"], found["acc_norm"]) == (0.0, 1.0)
