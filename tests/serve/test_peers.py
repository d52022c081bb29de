"""What vLLM and llama.cpp test of their servers, where it applies to a server of text and is tested nowhere else here.

Every row of the table sends requests to a server with an engine, and says what the answers must hold.
"""

import dataclasses
from collections.abc import Callable

import pytest

from tests.serve.conftest import CHAT, HELLO, join_choices, read_events

TEXTS = "/v1/completions"
IDS = [65] * 5
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "Which is best?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("hel", "lo")]}]
LANGUAGES = ["Python", "Java", "JavaScript", "C++", "C#"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    parts: list[dict]  # the whole, or the events of a stream

    @property
    def choices(self) -> list[dict]:
        """The text, log-probabilities and end of each choice."""
        assert self.status == 200, self.parts
        return join_choices(self.parts)

    @property
    def texts(self) -> list[str]:
        return [choice["text"] for choice in self.choices]

    @property
    def text(self) -> str:
        (text,) = self.texts
        return text

    @property
    def finishes(self) -> list[str | None]:
        return [choice["finish"] for choice in self.choices]

    @property
    def logprobs(self) -> dict | None:
        return self.parts[0]["choices"][0]["logprobs"]

    @property
    def tokens(self) -> list[dict]:
        """The log-probabilities of a chat that is no stream."""
        return self.parts[0]["choices"][0]["logprobs"]["content"]

    @property
    def usages(self) -> list[dict | None]:
        return [part.get("usage") for part in self.parts]

    def refuses(self, *words: str) -> bool:
        """Return whether it is an error of the client, and says these words."""
        return self.status == 400 and all(word in self.parts[0]["error"]["message"] for word in words)


def texts(**body) -> tuple[str, dict]:
    return TEXTS, {"prompt": IDS, "max_tokens": 5, "temperature": 0} | body


def chat(**body) -> tuple[str, dict]:
    return CHAT, {"messages": BOOK, "max_tokens": 5, "temperature": 0} | body


def whole(request: tuple[str, dict]) -> tuple[str, dict]:
    return request


def streamed(request: tuple[str, dict], **options) -> tuple[str, dict]:
    path, body = request
    return path, body | {"stream": True} | ({"stream_options": options} if options else {})


DIGITS = {"guided_regex": "(0123456789){4}", "max_tokens": 40}
DRAWN = {"temperature": 1.0, "max_tokens": 20, "n": 3, "seed": 42}
# name: the requests, and what their answers must hold.
CASES: dict[str, tuple[list[tuple[str, dict]], Callable[..., bool]]] = {
    "logprobs 5 are the five best": (
        [texts(logprobs=5)],
        lambda a: {*map(len, a.logprobs["top_token_ids"])} == {5} and len(a.logprobs["top_logprobs"]) == 5,
    ),
    "tokens joined are the text": (
        [chat(logprobs=True, max_tokens=20, logit_bias={str(i): -100 for i in range(128, 256)})] * 2,
        lambda whole, again: "".join(token["token"] for token in whole.tokens) == whole.text == again.text,
    ),
    "no log-probability is below OpenAI's least, also of what a grammar bans": (
        [chat(structured_outputs={"choice": LANGUAGES}, logprobs=True, top_logprobs=5, max_tokens=20)],
        lambda a: min(top["logprob"] for token in a.tokens for top in token["top_logprobs"]) >= -9999,
    ),
    "n choices are different, and those of the stream": (
        [texts(**DRAWN), streamed(texts(**DRAWN)), chat(**DRAWN), streamed(chat(**DRAWN))],
        lambda a, b, c, d: len({*a.texts}) == len({*c.texts}) == 3 and a.texts == b.texts and c.texts == d.texts,
    ),
    "each choice of a stream ends once, and a whole chat has one turn": (
        [streamed(texts(**DRAWN)), streamed(chat(**DRAWN))],
        lambda *found: (
            all(len(a.finishes) == 3 and None not in a.finishes for a in found)
            and sum("role" in choice["delta"] for event in found[1].parts for choice in event["choices"]) == 3
        ),
    ),
    "equal prompts have equal texts without a temperature, be they texts or ids": (
        [texts(prompt=["AAAAA", IDS]), streamed(texts(prompt=[IDS, IDS]))],
        lambda a, b: len({*a.texts, *b.texts}) == 1 and len(a.texts) == len(b.texts) == 2,
    ),
    "the usage comes if it is asked for": (
        [streamed(texts(), include_usage=False), streamed(chat(), include_usage=True)],
        lambda a, b: not any(a.usages) and not any(b.usages[:-1]) and b.usages[-1]["completion_tokens"] == 5,
    ),
    "a stop string never shows, also where it begins in one burst and ends in the next": (
        [f(ask(**DIGITS, stop=["zz", "78901"])) for f in (whole, streamed) for ask in (texts, chat)],
        lambda *found: all((a.text, a.finishes) == ("0123456", ["stop"]) for a in found),
    ),
    "an answer comes back in the next request": (
        [chat(messages=[*BOOK, {"role": "assistant", "content": "x", "refusal": None, "annotations": [{}]}, *HELLO])],
        lambda a: a.finishes == ["length"] and a.usages[0]["completion_tokens"] == 5,
    ),
    "a content of parts is the content": ([chat(messages=HELLO), chat(messages=PARTS)], lambda a, b: a.text == b.text),
    "a bias bans": (
        [texts(max_tokens=40, logit_bias={str(i): -100 for i in range(32)}), chat(logit_bias={"255": 1.0})],
        lambda a, b: min(a.text) >= " " and len(b.texts) == 1,
    ),
    "ignore_eos goes on to the length": (
        [chat(ignore_eos=True, max_tokens=50, logit_bias={"3": 100}), chat(max_tokens=50, logit_bias={"3": 100})],
        lambda a, b: (a.text, a.finishes) == ("\x03" * 50, ["length"]) and (b.text, b.finishes) == ("", ["stop"]),
    ),
    "json_object takes a schema, as llama.cpp has it": (
        [chat(response_format={"type": "json_object", "schema": {"const": "42"}})],
        lambda a: a.text == '"42"',
    ),
    "ids and texts of any character are each other": (
        [("/tokenize", {"prompt": "媽 🤗"}), texts(prompt=list("媽 🤗".encode()), echo=True, max_tokens=0)],
        lambda a, b: (a.parts[0]["tokens"], b.text) == (list("媽 🤗".encode()), "媽 🤗"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_other_servers_are_tested_for(real, name):
    requests, holds = CASES[name]
    answers = []
    for path, body in requests:
        response = real.ask(path, **body)
        is_stream = response.headers["content-type"].startswith("text/event-stream")
        answers.append(Answer(response.status_code, read_events(response.text) if is_stream else [response.json()]))
    assert holds(*answers), answers
