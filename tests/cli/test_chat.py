"""A conversation in the terminal."""

import contextlib
import dataclasses
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

from jaxgpt.cli import chat
from jaxgpt.errors import UserError
from jaxgpt.sample import Sampling
from jaxgpt.tools import convert
from tests.conftest import REPOSITORY
from tests.helpers import byte_run, write_params

BLOCK = 256
HOW = dict(max_new_tokens=20, sampling=Sampling(temperature=1.0), stop=(), seed=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return byte_run(tmp_path_factory.mktemp("chat"), block_size=BLOCK).for_decoding()


def say(conversation, line):
    assert chat.obey(conversation, line)
    return "".join(conversation.answer(**HOW))


def test_an_answer_is_that_of_sample_and_turns_follow_each_other(run, tmp_path, capsys):
    talk = chat.Conversation(run, None, BLOCK, None)
    hello = "hello " * 12  # more than a chunk
    first = say(talk, hello.strip())
    assert first == run.sample(hello.strip(), chat=True, seed=3, max_new_tokens=20, temperature=1.0)
    second = say(talk, "and then?")
    asked, then = ({"role": "user", "content": text} for text in (hello.strip(), "and then?"))
    answers = [{"role": "assistant", "content": text} for text in (first, second)]
    assert talk.messages == [asked, answers[0], then, answers[1]]
    assert talk._engine.cached_tokens[0] > 0  # what was read for the first turn
    assert say(talk, "/regenerate") != second and talk.messages[:3] == [asked, answers[0], then]
    path = tmp_path / "talk.jsonl"
    assert not chat.obey(talk, f"/save {path}") and not chat.obey(talk, "/reset") and not talk.messages
    assert json.loads(path.read_text())["messages"][:3] == [asked, answers[0], then]
    assert not chat.obey(talk, "/system Be brief.")
    say(talk, "hello")
    assert talk.messages[0] == {"role": "system", "content": "Be brief."} and len(talk.messages) == 3
    assert not chat.obey(talk, "/what") and "/regenerate" in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no answer yet"):
        chat.obey(chat.Conversation(run, None, BLOCK, None), "/regenerate")


def test_the_oldest_turns_are_left_out_and_a_turn_that_is_too_long_is_refused(run, capsys):
    talk = chat.Conversation(run, "Be brief.", 128, None)
    for number in range(4):
        say(talk, f"turn {number}, of some length")
    assert "(the first 2 messages no longer fit into 128 tokens, and are not seen)" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"the turn has \d+ tokens: needs at most 108"):
        say(talk, "x" * 200)
    assert len(talk.messages) == 9 and talk.messages[-1]["role"] == "assistant"


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_was_read(run):
    talk = chat.Conversation(run, None, BLOCK, None)
    assert chat.obey(talk, "hello")
    with contextlib.closing(talk.answer(**HOW)) as pieces:
        begun = next(pieces)
    assert talk.messages[-1] == {"role": "assistant", "content": begun} and talk._engine.num_free == 1
    whole = "".join(dataclasses.replace(run).stream("hello", chat=True, seed=3, max_new_tokens=20, temperature=1.0))
    assert whole.startswith(begun) and say(talk, "/regenerate") != ""


def read_until(terminal, pattern, seconds=15.0):
    """Return what a terminal shows, up to a pattern."""
    shown, deadline = "", time.monotonic() + seconds
    while not re.search(pattern, shown):
        assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], shown[-200:]
        shown += os.read(terminal, 4096).decode(errors="replace")
    return shown


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_the_program(tmp_path):
    run = byte_run(tmp_path, block_size=4096)
    write_params(run.directory, run.params, 0)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "jaxgpt", "chat", str(run.directory), "--max-new-tokens", "4000"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "dumb"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    try:
        read_until(ours, "> ")
        os.write(ours, b"hello\n")
        read_until(ours, "hello\r\n[^\r\n]{4}")  # it answers
        process.send_signal(2)
        read_until(ours, r"\.\.\.\r\n> ")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_a_model_that_is_no_run_is_imported_once(run, tmp_path, monkeypatch):
    """A GGUF file, a folder of Hugging Face's and an id on the Hub; the names of runs stay as they are."""
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    imported = []

    def find_run_of(name):
        return convert.find_run_of(name, lambda text: None)

    def import_model(name, directory):
        imported.append(name)
        shutil.copytree(run.directory, directory)

    monkeypatch.setattr(convert, "import_model", import_model)
    monkeypatch.setattr(convert, "find_directory", lambda name: tmp_path / "folder")
    file, folder = tmp_path / "a.gguf", tmp_path / "folder"
    file.write_bytes(b"GGUF")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert find_run_of("a.gguf") == find_run_of(str(file)) and imported == ["a.gguf"]
    file.write_bytes(b"GGUF, another")
    find_run_of("a.gguf")
    assert imported == ["a.gguf"] * 2
    find_run_of("folder")
    find_run_of("someone/model")
    assert imported[2:] == ["folder", "someone/model"]
    (tmp_path / "runs").mkdir()
    for name in (str(run.directory), "runs/mine", "missing.gguf", "missing"):
        assert find_run_of(name) == name
