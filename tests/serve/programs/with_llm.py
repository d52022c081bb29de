"""llm, whose commands know the server from extra-openai-models.yaml."""

import json
import os
from pathlib import Path

import yaml
from click.testing import CliRunner
from given import ANSWER, MESSAGES, MODEL, PROMPT, ROOM, SETTINGS, TEXT, URL
from llm.cli import cli

MINE = dict(model_id="mine", model_name=MODEL, api_base=URL, supports_schema=True, supports_tools=True)
MODELS = [MINE, dict(model_id="text", model_name=MODEL, api_base=URL, completion=True)]
DIRECTORY = Path(os.environ["LLM_USER_PATH"])
DIRECTORY.mkdir(exist_ok=True)
(DIRECTORY / "extra-openai-models.yaml").write_text(yaml.safe_dump(MODELS))
OPTIONS = [word for name, value in SETTINGS.items() for word in ("-o", name, str(value))]
SYSTEM, USER = (message["content"] for message in MESSAGES)


def ask(*argv: str) -> str:
    """Return what `llm ARGV...` prints, without the end of the line."""
    done = CliRunner().invoke(cli, argv, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.removesuffix("\n")


def check_prompt_and_conversation():
    assert ask("-m", "mine", "-s", SYSTEM, USER, *OPTIONS) == ANSWER
    ask("-c", "Then?", *OPTIONS)
    second, first = json.loads(ask("logs", "list", "-n", "2", "--json"))[::-1]
    assert first["response"] == ANSWER and second["conversation_id"] == first["conversation_id"]
    assert first["output_tokens"] == SETTINGS["max_tokens"] and second["input_tokens"] > first["input_tokens"]


def check_without_a_stream():
    assert ask("-m", "mine", "--no-stream", "-s", SYSTEM, USER, *OPTIONS) == ANSWER


def check_completion():
    assert ask("-m", "text", PROMPT, *OPTIONS) == TEXT


def check_schema():
    made = json.loads(ask("-m", "mine", "--schema", "name, age int", "-o", "max_tokens", str(ROOM), "Who?"))
    assert isinstance(made["name"], str) and isinstance(made["age"], int)


def check_tools():
    """They are offered, and none need be called."""
    ask("-m", "mine", "-T", "llm_version", "Which?", *OPTIONS)
