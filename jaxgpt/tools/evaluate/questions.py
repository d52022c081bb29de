"""Questions from local files, in the shapes in which HellaSwag, ARC and LAMBADA are published.

Contexts are worded as lm-evaluation-harness words them, so that figures can be compared. Files are JSON lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgpt.config import Task
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json, read_bytes

LARGEST_FILE = 2**28  # bytes; HellaSwag's largest has 48 MB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A context, what may follow it after a space, and which of these does."""

    where: str  # file and line
    context: str
    endings: tuple[str, ...]
    answer: int  # the right ending's place


class Format(NamedTuple):
    """How the lines of a task are read."""

    read: Callable[[dict[str, Any]], tuple[str, list[str], int]]  # a line's context, endings and answer
    shape: str  # of a line


def read_questions(task: Task, path: str) -> list[Question]:
    """All questions of a file. Raises `UserError` with file, line and the shape needed where one is none."""
    read, shape = FORMATS[task]
    questions = []
    for number, line in enumerate(read_bytes(path, LARGEST_FILE).removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            values = parse_json(line, "the line")
            if not isinstance(values, dict):
                raise UserError(f"the line holds {type(values).__name__}, not an object")
            context, endings, answer = read(values)
        except UserError as e:
            raise UserError(f"{where}: {e}. A line of {task} needs to be like {shape}") from None
        questions.append(Question(where=where, context=context, endings=tuple(endings), answer=answer))
    if not questions:
        raise UserError(f"{path} has no questions: a line of {task} needs to be like {shape}")
    return questions


def _hellaswag(line: dict[str, Any]) -> tuple[str, list[str], int]:
    whole = "ctx_a" not in line
    context = _text(line, "ctx") if whole else f"{_text(line, 'ctx_a')} {_text(line, 'ctx_b').capitalize()}"
    if "activity_label" in line:
        context = f"{_text(line, 'activity_label')}: {context}"
    endings = [_without_brackets(ending) for ending in _texts(line, "endings")]
    if not all(endings):
        raise UserError(f"endings={short(line['endings'])}: needs words in each")
    return _without_brackets(context), endings, _place(line, "label", [str(i) for i in range(len(endings))])


def _without_brackets(text: str) -> str:
    """Without the marks that WikiHow's articles left, [title] and [step]; a bracket closes on its own line or not at all.

    Not by a regular expression: it would look for the end of each of a thousand open brackets anew.
    """
    lines = text.strip().replace(" [title]", ". ").split("\n")
    return "\n".join(_line_without_brackets(line) for line in lines).replace("  ", " ")


def _line_without_brackets(line: str) -> str:
    kept, at = [], 0
    while (start := line.find("[", at)) >= 0 and (end := line.find("]", start)) >= 0:
        kept.append(line[at:start])
        at = end + 1
    return "".join(kept) + line[at:]


def _arc(line: dict[str, Any]) -> tuple[str, list[str], int]:
    if isinstance(line.get("question"), dict):  # as the Allen Institute publishes it
        question, inside = _text(line["question"], "stem"), line["question"].get("choices")
        if not isinstance(inside, list) or not all(isinstance(choice, dict) for choice in inside):
            raise UserError(f"choices={short(inside)}: needs a list of objects")
        choices = {name: [choice.get(name) for choice in inside] for name in ("text", "label")}
    else:  # as Hugging Face's datasets have it
        question, choices = _text(line, "question"), line.get("choices")
        if not isinstance(choices, dict):
            raise UserError(f"choices={short(choices)}: needs an object")
    texts, labels = _texts(choices, "text"), _texts(choices, "label")
    if len(texts) != len(labels):
        raise UserError(f"{len(texts)} choices have {len(labels)} labels: needs one for each")
    return f"Question: {question}\nAnswer:", texts, _place(line, "answerKey", labels)


def _lambada(line: dict[str, Any]) -> tuple[str, list[str], int]:
    context, _, word = _text(line, "text").rstrip().rpartition(" ")
    if not context.strip():
        raise UserError(f"text={short(line['text'])}: needs a word, and words before it")
    return context, [word], 0


def _text(line: dict[str, Any], name: str) -> str:
    if not isinstance(line.get(name), str):
        raise UserError(f"{name}={short(line.get(name))}: needs a text")
    return line[name]


def _texts(line: dict[str, Any], name: str) -> list[str]:
    found = line.get(name)
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(text, str) and text for text in found):
        raise UserError(f"{name}={short(found)}: needs a list of two texts or more, none empty")
    return found


def _place(line: dict[str, Any], name: str, names: list[str]) -> int:
    found = line.get(name)
    if isinstance(found, bool) or not isinstance(found, int | str) or str(found) not in names:
        raise UserError(f"{name}={short(found)}: needs one of {', '.join(names)[:80]}")
    return names.index(str(found))


FORMATS: dict[Task, Format] = {
    "hellaswag": Format(
        _hellaswag,
        '{"ctx": "A man", "endings": ["rows.", "flies."], "label": 0}, or with ctx_a and ctx_b instead of ctx',
    ),
    "arc": Format(
        _arc,
        '{"question": "Which is cold?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "A"}, or '
        '{"question": {"stem": "Which is cold?", "choices": [{"text": "ice", "label": "A"}, ...]}, "answerKey": "A"}',
    ),
    "lambada": Format(_lambada, '{"text": "of which the last word is to be guessed"}'),
}
