"""Malformed requests, which deserve a 4xx: wrong types and values of each parameter, broken bodies, random mutations."""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.faults.fuzz import mutated

COMPLETION = {
    "model": "tiny",
    "prompt": "that keep",
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "n": 1,
    "stop": ["x"],
    "seed": 1,
    "logprobs": 2,
    "echo": False,
    "stream": False,
}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "that keep"}],
    "max_completion_tokens": 2,
    "temperature": 0.5,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": False,
}
GOOD = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/tokenize": {"prompt": "that keep"},
    "/detokenize": {"tokens": [104, 105]},
}

HUGE = 10**400
NO_OBJECT = ([], [1], 1, 0.5, True, "x", -1, HUGE)
NO_NUMBER = ("1", "", [1], {}, True, float("nan"), float("inf"), HUGE, -HUGE)
NO_COUNT = (*NO_NUMBER, 0.5, -1, 2**63, 1e308)
NO_FLAG = ("true", 1, 0, [], {}, 0.5)
NO_TEXT = (1, 0.5, True, [], {})
SURROGATE = "\ud800"  # half of a character: valid JSON, and no UTF-8

WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/completions": {
        "prompt": (True, 0.5, {}, [], [[]], [0.5], [True], [-1], [HUGE], [2**31], [10**6], [1, "a"], [["a"]], [None], [{}]),
        "max_tokens": (*NO_COUNT, 10**9),
        "temperature": (*NO_NUMBER, -1, -0.001),
        "top_p": (*NO_NUMBER, -1, 1.5, 0),
        "top_k": (*NO_COUNT, 0),
        "min_p": (*NO_NUMBER, -1, 1.5),
        "repetition_penalty": (*NO_NUMBER, -1, 0),
        "n": (*NO_COUNT, 0, 10**6),
        "stop": (1, True, {}, [1], [None], [["x"]], ["a"] * 5, "x" * 300, ["", "x" * 300]),
        "seed": ("1", [1], {}, True, 0.5, HUGE),
        "logprobs": (*NO_COUNT, 21),
        "echo": NO_FLAG,
        "stream": NO_FLAG,
        "stream_options": (1, "x", [], {"include_usage": 1}, {"unknown": True}),
        "tempereture": (1,),
        "__class__": ("x",),
        "tools": ([{}],),
        "response_format": ({"type": "json_object"},),
    },
    "/v1/chat/completions": {
        "messages": (
            [], "x", 1, True, {}, [1], ["x"], [None], [{}], [[]], [{"role": "user"}], [{"content": "x"}],
            [{"role": "user", "content": 1}], [{"role": 1, "content": "x"}], [{"role": "wizard", "content": "x"}],
            [{"role": "user", "content": SURROGATE}], [{"role": [], "content": "x"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
        ),
        "max_completion_tokens": (*NO_COUNT, 10**9),
        "max_tokens": NO_COUNT,
        "temperature": (*NO_NUMBER, -1),
        "logprobs": (1, "true", [], {}),
        "top_logprobs": (*NO_COUNT, 21),
        "stream": NO_FLAG,
        "tools": ([{"type": "function", "function": {"name": "f"}}],),
        "unknown": (1,),
    },
    "/tokenize": {"prompt": (*NO_TEXT, SURROGATE), "unknown": (1,)},
    "/detokenize": {"tokens": ("x", 1, True, {}, [0.5], [True], ["a"], [-1], [HUGE], [10**6], [[1]]), "unknown": (1,)},
}  # fmt: skip


class Malformed(NamedTuple):
    """A request, and what is wrong with it."""

    why: str
    path: str
    body: bytes


def wrong_values() -> Iterator[Malformed]:
    """Yield good bodies in which one parameter has a wrong type or value, or a required one is missing."""
    for path, parameters in WRONG.items():
        good = GOOD[path]
        for name, values in parameters.items():
            for value in values:
                yield Malformed(f"{name}={value!r:.60}", path, json.dumps(good | {name: value}).encode())
        for name in ("prompt", "messages", "tokens"):
            if name in good:
                rest = {key: value for key, value in good.items() if key != name}
                yield Malformed(f"no {name}", path, json.dumps(rest).encode())
    for text in (SURROGATE, "x" * 100_000):
        yield Malformed(f"prompt={text!r:.20}", "/v1/completions", json.dumps(COMPLETION | {"prompt": text}).encode())
    yield Malformed("100,000 ids", "/v1/completions", json.dumps(COMPLETION | {"prompt": [1] * 100_000}).encode())


def broken_bodies() -> Iterator[Malformed]:
    """Yield bodies that are not a JSON object in UTF-8, or larger than a server reads."""
    for path, good in GOOD.items():
        raw = json.dumps(good).encode()
        broken = {
            "empty": b"",
            "a space": b" ",
            "no UTF-8": raw.replace(b"that", b"th\xffat") if b"that" in raw else b'"\xff"',
            "UTF-16": raw.decode().encode("utf-16"),
            "cut": raw[: len(raw) // 2],
            "two": raw + raw,
            "deep list": b"[" * 100_000,
            "deep list, closed": b"[" * 100_000 + b"]" * 100_000,
            "deep object": b'{"a":' * 100_000,
            "deep value": b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
            "5,000 digits": b'{"max_tokens":' + b"9" * 5000 + b"}",
            "1e999": raw[:-1] + b',"temperature":1e999}',
            "a form": b"prompt=that+keep",
            "a null byte": b"\x00" + raw,
            "more than 1 MiB": json.dumps({"prompt": "x" * 2**20}).encode(),
        }
        for why, body in broken.items():
            yield Malformed(why, path, body)
        for value in NO_OBJECT:
            yield Malformed(f"the body is {value!r:.20}", path, json.dumps(value).encode())


def mutations(seed: int, count: int) -> Iterator[Malformed]:
    """Yield bodies that are good but for one to four random changes; some of them are valid all the same."""
    rng = random.Random(seed)
    raws = [json.dumps(good).encode() for good in GOOD.values()]
    for number in range(count):
        path, good = rng.choice(list(GOOD.items()))
        body = mutated(rng, json.dumps(good).encode(), rng.choice(raws))
        yield Malformed(f"mutation {number} of seed {seed}", path, body)
