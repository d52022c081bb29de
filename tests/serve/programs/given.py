"""What a program is given: the server, and a conversation with the answer that it has without any client."""

import json
import sys
from typing import Literal

import pydantic

URL = sys.argv[2]  # ends in /v1
MODEL, PROMPT, TEXT, MESSAGES, ANSWER, SETTINGS, CONTEXT = json.loads(sys.argv[3])
OVERLONG = "x" * (CONTEXT + 1)
THEN = {"role": "user", "content": "Then?"}


class Job(pydantic.BaseModel):
    title: str
    years: int


class Person(pydantic.BaseModel):
    """A person who is found in the text."""  # which clients send as the schema's description

    name: str = pydantic.Field(description="the whole name")
    age: int
    kind: Literal["squire", "knight"]
    score: float | None = None
    jobs: list[Job]


ROOM = 200  # bytes, in which every Person ends
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}


def fails(error: type[Exception], call) -> Exception:
    """Return the error that the call raises."""
    try:
        call()
    except error as e:
        return e
    raise AssertionError(f"no {error.__name__}")


def fits_weather(arguments: dict) -> bool:
    """Return whether the arguments of a call match the schema of WEATHER."""
    is_fit = isinstance(arguments.get("place"), str) and isinstance(arguments.get("days"), int)
    return is_fit and len(arguments) == 2
