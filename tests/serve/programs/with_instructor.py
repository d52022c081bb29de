"""instructor: a pydantic model from each of its modes."""

import instructor
import openai
import pydantic
from given import MESSAGES, MODEL, ROOM, URL, Job, Person
from instructor import Mode

client = openai.OpenAI(base_url=URL, max_retries=0)
ASKED = dict(model=MODEL, messages=MESSAGES, max_tokens=ROOM, max_retries=0)


class Anything(pydantic.BaseModel, extra="allow"):
    """Any object: its mode JSON asks for one, and names the fields in the prompt alone."""


def check_json():
    made = instructor.from_openai(client, mode=Mode.JSON).create(response_model=Anything, **ASKED)
    assert isinstance(made, Anything)


def check_json_schema():
    maker = instructor.from_openai(client, mode=Mode.JSON_SCHEMA)
    made, completion = maker.create_with_completion(response_model=Person, **ASKED)
    assert isinstance(made, Person) and completion.usage.completion_tokens
    assert all(isinstance(job, Job) for job in maker.create(response_model=list[Job], **ASKED))


def check_stream():
    parts = list(instructor.from_openai(client, mode=Mode.JSON_SCHEMA).create_partial(response_model=Person, **ASKED))
    assert len(parts) > 10
    Person.model_validate(parts[-1].model_dump())


def check_provider():
    maker = instructor.from_provider(f"openai/{MODEL}", base_url=URL, mode=Mode.JSON_SCHEMA)
    assert isinstance(maker.create(response_model=Person, messages=MESSAGES, max_tokens=ROOM), Person)


def check_tools():
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
        maker = instructor.from_openai(client, mode=mode)
        assert isinstance(maker.create(response_model=Person, **ASKED), Person)
    assert all(isinstance(job, Job) for job in maker.create(response_model=list[Job], **ASKED))
