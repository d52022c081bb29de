"""llama-index's OpenAILike, which is for servers such as this one."""

import asyncio

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
    URL,
    Person,
    fails,
    fits_weather,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

WHERE = dict(model=MODEL, api_base=URL, api_key="any", max_retries=0, context_window=CONTEXT)
ASKED = dict(max_tokens=SETTINGS["max_tokens"], temperature=SETTINGS["temperature"])
ASKED |= dict(additional_kwargs={"seed": SETTINGS["seed"]})
chat = OpenAILike(**WHERE, **ASKED, is_chat_model=True)
text = OpenAILike(**WHERE, **ASKED)
structured = OpenAILike(**WHERE, is_chat_model=True, max_tokens=ROOM, should_use_structured_outputs=True)
able = OpenAILike(**WHERE, is_chat_model=True, max_tokens=ROOM, is_function_calling_model=True)
messages = [ChatMessage(**message) for message in MESSAGES]


def check_complete():
    assert text.complete(PROMPT).text == TEXT
    assert "".join(part.delta for part in text.stream_complete(PROMPT)) == TEXT
    assert OpenAILike(**WHERE).complete("x").text  # its defaults


def check_chat():
    made = chat.chat(messages)
    assert made.message.content == ANSWER == asyncio.run(chat.achat(messages)).message.content
    chat.chat([*messages, made.message, ChatMessage(role="user", content="Then?")])


def check_stream_chat():
    *_, last = parts = list(chat.stream_chat(messages))
    assert "".join(part.delta or "" for part in parts) == last.message.content == ANSWER


def check_structured_output():
    assert isinstance(structured.as_structured_llm(Person).complete("Who?").raw, Person)
    assert isinstance(structured.as_structured_llm(Person).chat(messages).raw, Person)
    assert isinstance(structured.structured_predict(Person, PromptTemplate("Who is {who}?"), who="he"), Person)


def check_overlong():
    error = fails(openai.BadRequestError, lambda: chat.complete(OVERLONG))
    assert error.code == "context_length_exceeded"


def check_tools():
    def get_weather(place: str, days: int) -> str:
        """Return the weather in a place."""
        return f"{days} days of rain in {place}"

    tool = FunctionTool.from_defaults(get_weather)
    made = able.chat_with_tools([tool], user_msg="Is it?", tool_required=True)
    (call,) = able.get_tool_calls_from_response(made)
    assert fits_weather(call.tool_kwargs)
    assert "days of rain" in able.predict_and_call([tool], user_msg="Is it?", tool_required=True).response
    assert isinstance(able.as_structured_llm(Person).complete("Who?").raw, Person)
