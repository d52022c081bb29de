"""The published shapes of questions, and how their contexts are worded."""

import json
from typing import get_args

import pytest

from jaxgpt.config import Task
from jaxgpt.errors import UserError
from jaxgpt.tools.evaluate.questions import FORMATS, read_questions


def read(tmp_path, task, *lines):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_questions(task, str(path))


def parts(question):
    return question.context, question.endings, question.answer


def test_hellaswag_as_published_and_with_its_least(tmp_path):
    published = {
        "ind": 4,
        "activity_label": "Removing ice",
        "ctx_a": "A man stands [header] by a car.",
        "ctx_b": "the ice",
        "ctx": "not read beside the two",
        "endings": [" is scraped  off [title] Then", "[step] sings."],
        "label": "1",
    }
    least = {"ctx": "A man", "endings": ["rows.", "flies.", "sinks."], "label": 2}
    one, two = read(tmp_path, "hellaswag", published, least)
    endings = ("is scraped off. Then", " sings.")
    assert parts(one) == ("Removing ice: A man stands by a car. The ice", endings, 1)
    assert parts(two) == ("A man", ("rows.", "flies.", "sinks."), 2)
    assert two.where.endswith("q.jsonl:2")


def test_arc_of_both_publishers_is_the_same_question(tmp_path):
    labels, texts = ["A", "B", "C"], ["ice", "fire", "steam"]
    choices = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    institute = {"id": "1", "question": {"stem": "Which is cold?", "choices": choices}, "answerKey": "C"}
    face = {"question": "Which is cold?", "choices": {"text": texts, "label": labels}, "answerKey": "C"}
    one, two = read(tmp_path, "arc", institute, face)
    assert parts(one) == parts(two) == ("Question: Which is cold?\nAnswer:", tuple(texts), 2)
    numbered = face | {"choices": {"text": texts, "label": ["1", "2", "3"]}, "answerKey": "1"}
    assert read(tmp_path, "arc", numbered)[0].answer == 0


def test_lambada_is_its_last_word_after_the_rest(tmp_path):
    (question,) = read(tmp_path, "lambada", {"text": "in a village of La Mancha\n"})
    assert parts(question) == ("in a village of La", ("Mancha",), 0)


def test_the_shapes_that_are_shown_can_be_read(tmp_path):
    assert set(FORMATS) == set(get_args(Task))
    for task, (_, shape) in FORMATS.items():
        assert len(read(tmp_path, task, json.loads(shape.split(", or ")[0]))) == 1


def test_empty_lines_and_a_mark_of_byte_order_are_no_questions(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a b"}\r\n\r\n  \n{"text": "c d"}')
    assert [(q.where, q.context) for q in read_questions("lambada", str(path))] == [
        (f"{path}:1", "a"),
        (f"{path}:4", "c"),
    ]


def test_the_line_is_named(tmp_path):
    good, bad = {"text": "of a lance"}, {"text": "lance"}
    with pytest.raises(UserError, match=r"q.jsonl:3: text='lance': needs a word.*A line of lambada needs to be like"):
        read(tmp_path, "lambada", good, good, bad)
