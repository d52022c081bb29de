"""openai: structured output, the ways to read it, and the errors that programs catch."""

import asyncio
import json

import openai
from given import (
    ANSWER,
    CONTEXT,
    MESSAGES,
    MODEL,
    OVERLONG,
    PROMPT,
    ROOM,
    SETTINGS,
    TEXT,
    THEN,
    URL,
    WEATHER,
    Person,
    fails,
    fits_weather,
)

client = openai.OpenAI(base_url=URL, max_retries=0, timeout=60)
chat = client.chat.completions


def check_answer_and_second_turn():
    message = chat.create(model=MODEL, messages=MESSAGES, **SETTINGS).choices[0].message
    assert message.content == ANSWER and message.role == "assistant"
    chat.create(model=MODEL, messages=[*MESSAGES, message, THEN], **SETTINGS)


def check_text_and_stream():
    asked = dict(model=MODEL, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **SETTINGS)
    *chunks, last = client.completions.create(**asked)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert not last.choices and last.usage.completion_tokens == SETTINGS["max_tokens"]


def check_parse():
    made = chat.parse(model=MODEL, messages=MESSAGES, response_format=Person, max_tokens=ROOM)
    assert isinstance(made.choices[0].message.parsed, Person)
    assert made.choices[0].finish_reason == "stop"


def check_parse_of_a_stream():
    with chat.stream(model=MODEL, messages=MESSAGES, response_format=Person, max_tokens=ROOM) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def check_json_object():
    made = chat.create(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=60)
    assert isinstance(json.loads(made.choices[0].message.content), dict)


def check_several_with_log_probabilities():
    asked = dict(model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, **SETTINGS)
    first, second = chat.create(**asked).choices
    assert first.message.content == ANSWER != second.message.content
    chunks = [chunk.choices[0] for chunk in chat.create(**asked, stream=True)]
    for whole in (first, second):
        mine = [chunk for chunk in chunks if chunk.index == whole.index]
        assert "".join(chunk.delta.content or "" for chunk in mine) == whole.message.content
        tokens = [token for chunk in mine if chunk.logprobs for token in chunk.logprobs.content]
        assert tokens == whole.logprobs.content and len(tokens) == SETTINGS["max_tokens"]


def check_more_tokens_than_the_context_holds():
    usage = chat.create(model=MODEL, messages=MESSAGES, max_tokens=10 * CONTEXT, stop=["e"]).usage
    assert usage.completion_tokens <= CONTEXT + 1 - usage.prompt_tokens
    assert (
        client.completions.create(model=MODEL, prompt="x" * (CONTEXT - 2), max_tokens=CONTEXT).usage.total_tokens
        <= CONTEXT + 1
    )


def check_errors():
    unknown = fails(openai.NotFoundError, lambda: chat.create(model="gpt-4o", messages=MESSAGES))
    assert (unknown.code, unknown.param) == ("model_not_found", "model")
    overlong = fails(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt=OVERLONG))
    assert overlong.code == "context_length_exceeded"
    wrong = fails(openai.BadRequestError, lambda: chat.create(model=MODEL, messages=MESSAGES, temperature=-1))
    assert wrong.param == "temperature" and wrong.status_code == 400 and wrong.request_id
    fails(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"))


def check_async():
    async def ask():
        async with openai.AsyncOpenAI(base_url=URL, max_retries=0) as client:
            create = client.chat.completions.create
            return await asyncio.gather(*(create(model=MODEL, messages=MESSAGES, **SETTINGS) for _ in range(6)))

    assert {made.choices[0].message.content for made in asyncio.run(ask())} == {ANSWER}


def check_tools():
    """One must be called, a named one, and one may be; the results go back."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        asked = dict(model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice=choice, max_tokens=ROOM, seed=1)
        made = chat.create(**asked).choices[0]
        (call,) = made.message.tool_calls
        assert made.message.content is None and call.type == "function" and call.function.name == "get_weather"
        assert fits_weather(json.loads(call.function.arguments))
        assert choice == named or made.finish_reason == "tool_calls"
        with chat.stream(**asked) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        history = [*MESSAGES, made.message, result]
        for choice in ("auto", "none"):
            chat.create(model=MODEL, messages=history, tools=[WEATHER], tool_choice=choice, **SETTINGS)


def check_tools_from_pydantic():
    tools = [openai.pydantic_function_tool(Person)]
    made = chat.parse(model=MODEL, messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=ROOM)
    assert isinstance(made.choices[0].message.tool_calls[0].function.parsed_arguments, Person)
