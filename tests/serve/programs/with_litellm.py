"""litellm, by the names under which its users reach a server of their own."""

import asyncio
import json

import litellm
from given import (
    ANSWER,
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

WHERE = dict(api_base=URL, api_key="any", num_retries=0)
CHAT = dict(model=f"openai/{MODEL}", **WHERE)
COMPLETE = dict(model=f"text-completion-openai/{MODEL}", **WHERE)
litellm.suppress_debug_info = True


def check_answer():
    for provider in ("openai", "hosted_vllm", "lm_studio"):
        made = litellm.completion(messages=MESSAGES, **CHAT | SETTINGS | {"model": f"{provider}/{MODEL}"})
        assert made.choices[0].message.content == ANSWER
        assert made.usage.completion_tokens == SETTINGS["max_tokens"]


def check_second_turn():
    """The message as it came, and as a dictionary with all of its fields."""
    message = litellm.completion(messages=MESSAGES, **CHAT, **SETTINGS).choices[0].message
    for sent in (message, message.model_dump()):
        litellm.completion(messages=[*MESSAGES, sent, THEN], **CHAT, **SETTINGS)


def check_stream():
    asked = dict(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **CHAT, **SETTINGS)
    whole = litellm.stream_chunk_builder(list(litellm.completion(**asked)), messages=MESSAGES)
    assert whole.choices[0].message.content == ANSWER and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == SETTINGS["max_tokens"]


def check_text_completion():
    assert litellm.text_completion(prompt=PROMPT, **COMPLETE, **SETTINGS).choices[0].text == TEXT
    assert litellm.text_completion(prompt=PROMPT, **CHAT, **SETTINGS).choices[0].text == TEXT
    chunks = litellm.text_completion(prompt=PROMPT, stream=True, **COMPLETE, **SETTINGS)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == TEXT
    both = litellm.text_completion(prompt=[PROMPT, "of"], **COMPLETE, **SETTINGS).choices
    assert both[0].text == TEXT and len(both) == 2


def check_structured_output():
    text = (
        litellm.completion(messages=MESSAGES, response_format=Person, max_tokens=ROOM, **CHAT)
        .choices[0]
        .message.content
    )
    Person.model_validate_json(text)
    made = litellm.completion(messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=60, **CHAT)
    assert isinstance(json.loads(made.choices[0].message.content), dict)


def check_errors():
    long = [{"role": "user", "content": OVERLONG}]
    fails(litellm.ContextWindowExceededError, lambda: litellm.completion(messages=long, **CHAT))
    fails(litellm.ContextWindowExceededError, lambda: litellm.text_completion(prompt=OVERLONG, **COMPLETE))
    fails(litellm.NotFoundError, lambda: litellm.completion(messages=MESSAGES, **CHAT | {"model": "openai/gpt-4o"}))
    fails(litellm.BadRequestError, lambda: litellm.completion(messages=MESSAGES, temperature=-1, **CHAT))


def check_many_at_once():
    made = litellm.batch_completion(messages=[MESSAGES] * 6, **CHAT, **SETTINGS)
    assert {one.choices[0].message.content for one in made} == {ANSWER}
    made = asyncio.run(litellm.acompletion(messages=MESSAGES, **CHAT, **SETTINGS))
    assert made.choices[0].message.content == ANSWER


def check_router():
    router = litellm.Router(model_list=[{"model_name": "mine", "litellm_params": {**CHAT}}])
    assert router.completion(model="mine", messages=MESSAGES, **SETTINGS).choices[0].message.content == ANSWER


def check_tools():
    asked = dict(tools=[WEATHER], max_tokens=ROOM, **CHAT)
    message = litellm.completion(messages=MESSAGES, tool_choice="required", **asked).choices[0].message
    (call,) = message.tool_calls
    assert fits_weather(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    litellm.completion(messages=[*MESSAGES, message, result], tool_choice="auto", **asked)
    chunks = list(litellm.completion(messages=MESSAGES, tool_choice="required", stream=True, **asked))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert fits_weather(json.loads(call.function.arguments))
