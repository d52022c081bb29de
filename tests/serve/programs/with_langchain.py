"""langchain-openai: ChatOpenAI, and the older OpenAI for completions."""

import asyncio

from given import (
    ANSWER,
    MESSAGES,
    MODEL,
    OVERLONG,
    PROMPT,
    ROOM,
    SETTINGS,
    TEXT,
    URL,
    WEATHER,
    Person,
    fails,
    fits_weather,
)
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

WHERE = dict(model=MODEL, base_url=URL, max_retries=0)
chat = ChatOpenAI(**WHERE, **SETTINGS)
roomy = ChatOpenAI(**WHERE, max_tokens=ROOM)


def check_answer():
    made = chat.invoke(MESSAGES)
    assert made.content == ANSWER and made.usage_metadata["output_tokens"] == SETTINGS["max_tokens"]
    assert made.response_metadata["finish_reason"] == "length"
    assert asyncio.run(chat.ainvoke(MESSAGES)).content == ANSWER


def check_stream():
    whole = sum(chat.stream(MESSAGES, stream_usage=True), AIMessageChunk(""))
    assert whole.content == ANSWER and whole.usage_metadata["output_tokens"] == SETTINGS["max_tokens"]


def check_batch():
    assert {made.content for made in chat.batch([MESSAGES] * 7)} == {ANSWER}


def check_history():
    history = [*MESSAGES, chat.invoke(MESSAGES), HumanMessage(content=[{"type": "text", "text": "Then?"}])]
    whole = sum(chat.stream(history), AIMessageChunk(""))  # comes back in another class
    chat.invoke([*history, whole, HumanMessage("And then?")])


def check_structured_output():
    for options in (dict(method="json_schema"), dict(method="json_schema", strict=True)):
        maker = roomy.with_structured_output(Person, **options)
        assert isinstance(maker.invoke(MESSAGES), Person)
        assert isinstance(list(maker.stream(MESSAGES))[-1], Person)
    maker = roomy.with_structured_output(Person.model_json_schema(), method="json_schema")
    Person.model_validate(maker.invoke(MESSAGES))
    raw = roomy.with_structured_output(Person, method="json_schema", include_raw=True).invoke(MESSAGES)
    assert isinstance(raw["parsed"], Person) and raw["parsing_error"] is None
    assert isinstance(roomy.with_structured_output(None, method="json_mode").invoke("JSON, please"), dict)


def check_options():
    tokens = chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES).response_metadata["logprobs"]["content"]
    assert len(tokens) == SETTINGS["max_tokens"]
    both = ChatOpenAI(**WHERE, **SETTINGS, n=2).generate([[HumanMessage("Is it?")]]).generations[0]
    assert len({made.text for made in both}) == 2
    ChatOpenAI(**WHERE, stop=["e"]).invoke(MESSAGES)  # no limit at all


def check_completions():
    text = OpenAI(**WHERE, **SETTINGS)
    assert text.invoke(PROMPT) == "".join(text.stream(PROMPT)) == text.batch([PROMPT, "of"])[0] == TEXT
    assert OpenAI(**WHERE).invoke(PROMPT)  # 256 tokens, its default


def check_overlong():
    fails(ContextOverflowError, lambda: chat.invoke(OVERLONG))


def check_tools():
    for choice in ("any", "get_weather"):
        able = roomy.bind_tools([WEATHER], tool_choice=choice)
        made = able.invoke(MESSAGES)
        (call,) = made.tool_calls
        assert fits_weather(call["args"])
        (call,) = sum(able.stream(MESSAGES), AIMessageChunk("")).tool_calls
        assert fits_weather(call["args"])
    result = ToolMessage("rain", tool_call_id=made.tool_calls[0]["id"])
    roomy.bind_tools([WEATHER]).invoke([*MESSAGES, made, result])
    assert isinstance(roomy.with_structured_output(Person, method="function_calling").invoke(MESSAGES), Person)
