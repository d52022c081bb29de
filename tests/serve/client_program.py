"""Ask a server through a client of another project: `python client_program.py CLIENT URL GIVEN`.

Each client answers the same questions in its own way, and none of them may raise or answer otherwise than the server does
without a client. GIVEN has, in JSON, the questions and these answers.
"""

import json
import sys
from typing import Annotated, Literal

import pydantic

CLIENT, URL = sys.argv[1:3]  # the address ends in /v1
MODEL, PROMPT, TEXT, MESSAGES, ANSWER, SETTINGS, CONTEXT = json.loads(sys.argv[3])
OVERLONG = "x" * (CONTEXT + 1)
ROOM = 200  # bytes, in which every Person ends
TOKENS = SETTINGS["max_tokens"]
WHERE = {"api_key": "any", "max_retries": 0}


# Short, since nothing but the schema ends what a model without a clue writes.
Word = Annotated[str, pydantic.Field(max_length=9)]
Number = Annotated[int, pydantic.Field(ge=0, le=99)]


class Job(pydantic.BaseModel, extra="forbid"):
    title: Word
    years: Number


class Person(pydantic.BaseModel, extra="forbid"):
    """A person who is found in the text."""  # which clients send as the schema's description

    name: Word = pydantic.Field(description="the whole name")
    kind: Literal["squire", "knight"]
    job: Job


class Place(pydantic.BaseModel, extra="forbid"):
    place: Word
    days: Number


PLACE = Place.model_json_schema()
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": PLACE}}


def check_call(arguments: dict) -> None:
    Place.model_validate(arguments)


def fails(error: type[Exception], call) -> Exception:
    """Return the error that the call raises."""
    try:
        call()
    except error as e:
        return e
    raise AssertionError(f"no {error.__name__}")


def use_openai():
    import openai

    client = openai.OpenAI(base_url=URL, timeout=60, **WHERE)
    chat, asked = client.chat.completions, {"model": MODEL, "messages": MESSAGES}
    message = chat.create(**asked, **SETTINGS).choices[0].message
    assert message.content == ANSWER and message.role == "assistant"
    chat.create(model=MODEL, messages=[*MESSAGES, message, MESSAGES[-1]], **SETTINGS)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(model=MODEL, prompt=PROMPT, **options, **SETTINGS)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert not last.choices and last.usage.completion_tokens == TOKENS
    parsed = chat.parse(**asked, response_format=Person, max_tokens=ROOM).choices[0]
    assert isinstance(parsed.message.parsed, Person) and parsed.finish_reason == "stop"
    with chat.stream(**asked, response_format=Person, max_tokens=ROOM) as stream:
        assert {"chunk", "content.delta", "content.done"} <= {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    several = dict(**asked, n=2, logprobs=True, top_logprobs=2, **SETTINGS)
    chunks = [chunk.choices[0] for chunk in chat.create(**several, stream=True)]
    for whole in chat.create(**several).choices:
        mine = [chunk for chunk in chunks if chunk.index == whole.index]
        assert "".join(chunk.delta.content or "" for chunk in mine) == whole.message.content
        tokens = [token for chunk in mine if chunk.logprobs for token in chunk.logprobs.content]
        assert tokens == whole.logprobs.content and len(tokens) == TOKENS
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        called = chat.create(**asked, tools=[WEATHER], tool_choice=choice, max_tokens=ROOM, seed=1).choices[0].message
        (call,) = called.tool_calls
        check_call(json.loads(call.function.arguments))
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        chat.create(model=MODEL, messages=[*MESSAGES, called, result], tools=[WEATHER], **SETTINGS)
    tools = [openai.pydantic_function_tool(Person)]
    made = chat.parse(**asked, tools=tools, tool_choice="required", max_tokens=ROOM).choices[0].message
    assert isinstance(made.tool_calls[0].function.parsed_arguments, Person)
    unknown = fails(openai.NotFoundError, lambda: chat.create(**asked | {"model": "gpt-4o"}))
    assert (unknown.code, unknown.param) == ("model_not_found", "model")
    overlong = fails(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt=OVERLONG))
    assert overlong.code == "context_length_exceeded"
    wrong = fails(openai.BadRequestError, lambda: chat.create(**asked, temperature=-1))
    assert wrong.param == "temperature" and wrong.request_id


def use_litellm():
    import litellm

    where = {"api_base": URL, "api_key": "any", "num_retries": 0}
    asked = {"model": f"openai/{MODEL}", "messages": MESSAGES, **where}
    for provider in ("openai", "hosted_vllm", "lm_studio"):
        made = litellm.completion(**asked | SETTINGS | {"model": f"{provider}/{MODEL}"})
        assert made.choices[0].message.content == ANSWER and made.usage.completion_tokens == TOKENS
    again = [*MESSAGES, made.choices[0].message.model_dump(), MESSAGES[-1]]
    litellm.completion(**asked | SETTINGS | {"messages": again})
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **asked, **SETTINGS))
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content == ANSWER and whole.usage.completion_tokens == TOKENS
    texts = {"model": f"text-completion-openai/{MODEL}", **where}
    assert litellm.text_completion(prompt=PROMPT, **texts, **SETTINGS).choices[0].text == TEXT
    made = litellm.completion(response_format=Person, max_tokens=ROOM, **asked)
    Person.model_validate_json(made.choices[0].message.content)
    made = litellm.completion(tools=[WEATHER], tool_choice="required", max_tokens=ROOM, **asked)
    check_call(json.loads(made.choices[0].message.tool_calls[0].function.arguments))
    fails(litellm.ContextWindowExceededError, lambda: litellm.text_completion(prompt=OVERLONG, **texts))
    fails(litellm.NotFoundError, lambda: litellm.completion(**asked | {"model": "openai/gpt-4o"}))


def use_langchain():
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAI

    where = {"model": MODEL, "base_url": URL, **WHERE}
    chat, roomy = ChatOpenAI(**where, **SETTINGS), ChatOpenAI(**where, max_tokens=ROOM)
    made = chat.invoke(MESSAGES)
    assert made.content == ANSWER and made.usage_metadata["output_tokens"] == TOKENS
    whole = sum(chat.stream(MESSAGES, stream_usage=True), AIMessageChunk(""))
    assert whole.content == ANSWER and whole.usage_metadata["output_tokens"] == TOKENS
    chat.invoke([*MESSAGES, made, HumanMessage([{"type": "text", "text": "Then?"}]), whole, HumanMessage("And then?")])
    for options in (
        dict(method="json_schema"),
        dict(method="json_schema", strict=True),
        dict(method="function_calling"),
    ):
        assert isinstance(roomy.with_structured_output(Person, **options).invoke(MESSAGES), Person)
    tokens = chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES).response_metadata["logprobs"]["content"]
    assert len(tokens) == TOKENS
    text = OpenAI(**where, **SETTINGS)
    assert text.invoke(PROMPT) == "".join(text.stream(PROMPT)) == text.batch([PROMPT, "of"])[0] == TEXT
    made = roomy.bind_tools([WEATHER], tool_choice="any").invoke(MESSAGES)
    check_call(made.tool_calls[0]["args"])
    result = ToolMessage("rain", tool_call_id=made.tool_calls[0]["id"])
    roomy.bind_tools([WEATHER]).invoke([*MESSAGES, made, result])
    fails(ContextOverflowError, lambda: chat.invoke(OVERLONG))


if __name__ == "__main__":
    globals()[f"use_{CLIENT}"]()
