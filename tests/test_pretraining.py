"""docs/pretraining.md: its commands exist, and a recipe trains on what its plan has counted."""

import re
import shlex

import pytest

from jaxgpt.cli.main import COMMANDS, bind_command
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "pretraining.md").read_text(encoding="utf-8")


def list_commands(text):
    """Each `jaxgpt COMMAND ...` in a fence, as words: also inside the quoted command of gcloud, and over several lines."""
    command = re.compile(rf"\bjaxgpt (?:{'|'.join(COMMANDS)}) (?:\"[^\"\n]*\"|[^\"&#\n])*")
    for fence in re.findall(r"^```\w+\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield from (shlex.split(found)[1:] for found in command.findall(fence.replace("\\\n", " ")))


RECIPES = {
    number: list(list_commands(body))
    for number, body in re.findall(r"^## (\d)\. .*?\n(.*?)(?=^## )", PAGE, flags=re.MULTILINE | re.DOTALL)
}


def test_every_command_is_one_and_plans_what_it_trains(monkeypatch):
    """The options exist, the experiment file builds, and a recipe trains on as many tokens as its plan has counted."""
    monkeypatch.chdir(REPOSITORY)
    bound = {tuple(words): bind_command(*words).keywords for words in list_commands(PAGE)}
    assert list(RECIPES) == list("123456") and len(bound) >= 10
    shared = RECIPES["3"][1]  # to which 80 GB add what a TPU has no room for
    assert RECIPES["2"][1][: len(shared)] == shared and shared[0] == "train"
    for number in "12345":
        of = {words[0]: bound[tuple(words)] for words in RECIPES[number]}
        trained = of["train"]["experiment"].train.steps * 491_520
        assert trained == pytest.approx(1e9 * float(of["plan"]["tokens"].removesuffix("B")), rel=0.01)
