"""The command line in a subprocess: what is printed where, and how mistakes are reported."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
import threading
import types

import pytest

from jaxgpt.cli.commands import sample
from jaxgpt.cli.main import bind_command
from jaxgpt.cli.train import choose_context, label_own_text
from jaxgpt.data.dataset import DataConfig
from jaxgpt.data.tokenizer import CharTokenizer, fingerprint
from jaxgpt.experiment import CONTEXT_OF_WEIGHTS, TrainConfig
from jaxgpt.presets import finetune, quickstart
from jaxgpt.run import SampleOptions
from tests.conftest import REPOSITORY
from tests.helpers import chat_file, edit_record, run_command, script

SMALL = """
    --model.n-layer 1 --model.n-head 2 --model.n-embd 8 --model.block-size 8 --optim.warmup-steps 1 --train.steps 2
    --train.batch-size 2 --train.log-every 1 --train.eval-every 2 --train.sample-tokens 5 --train.sample-prompt lance
    --data.path
"""


def jaxgpt(*argv, cwd, **env):
    """On the CPU: where libtpu is installed and no TPU is, it speaks on stderr whenever it is asked for one."""
    return run_command("-m", "jaxgpt", *map(str, argv), cwd=cwd, **{"JAX_PLATFORMS": "cpu"} | env)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file):
    directory = tmp_path_factory.mktemp("cli")
    done = jaxgpt("train", *SMALL.split(), text_file, cwd=directory)
    assert done.returncode == 0, done.stderr
    # A run with another tokenizer, which is older, so that it is not the one taken by default.
    other = directory / "runs/other"
    shutil.copytree(directory / "runs/mancha", other)
    tokenizer = CharTokenizer("abcdefgh")
    (other / "tokenizer.json").write_text(tokenizer.to_json())
    edit_record(other, lambda record: record["data"].update(tokenizer_sha256=fingerprint(tokenizer)))
    for path in (other, *other.rglob("*")):
        os.utime(path, (0, 0))
    return directory, done


def test_train_shows_progress_a_sample_and_the_next_line(trained):
    directory, done = trained
    assert "first step after" in done.stderr and "val " in done.stderr and "tokens/s" in done.stderr
    assert (directory / "runs/mancha/sample.txt").read_text().startswith("lance")
    following = done.stdout.strip().splitlines()[-1]
    assert following.startswith("next: jaxgpt sample runs/mancha --prompt ")
    again = jaxgpt(*shlex.split(following)[2:], "--max-new-tokens", "5", cwd=directory)
    assert again.returncode == 0 and again.stdout.startswith("lance")


def test_a_preset_on_the_users_text_takes_name_and_prompt_from_it(tmp_path):
    (tmp_path / "mytext.txt").write_text("x" * 910 + " En un lugar de la Mancha," + " " * 64)
    own = dataclasses.replace(quickstart(), data=DataConfig(path=str(tmp_path / "mytext.txt")))
    labelled = label_own_text(own, "runs/mi texto/")
    assert (labelled.name, labelled.train.sample_prompt) == ("mi-texto", "En un lugar de")
    assert label_own_text(own, None).name == label_own_text(own, "..").name == "mytext"
    mixed = dataclasses.replace(own, data=DataConfig(path="texts/el quijote.txt:0.7,b:0.3"))
    assert label_own_text(mixed, None).name == "el-quijote"
    chosen = dataclasses.replace(own, train=TrainConfig(sample_prompt="Once "))
    assert label_own_text(chosen, None).train == chosen.train
    for other in (quickstart(), dataclasses.replace(own, name="another")):
        assert label_own_text(other, "runs/mine") == other
    gone = dataclasses.replace(own, data=DataConfig(path="nowhere.txt"))
    assert label_own_text(gone, None).train.sample_prompt == ""


def test_a_preset_on_the_users_conversations_ends_with_an_answer_to_one_that_it_has_not_learnt(tmp_path):
    path = chat_file(tmp_path)
    for preset in (finetune(), quickstart(chat=True)):
        own = dataclasses.replace(preset, data=DataConfig(path=str(path)))
        assert (
            label_own_text(own, None).train.sample_prompt == "36 and 0?"
        )  # of 40, the 37th is the first of validation
    chosen = dataclasses.replace(own, train=TrainConfig(sample_prompt="Why?"))
    assert label_own_text(chosen, None).train == chosen.train
    path.write_text("no conversation")
    assert label_own_text(own, None).train.sample_prompt == "What is str.count?"


@pytest.mark.parametrize(("typed", "turn"), [("Why?\nñ\n", "Why?\nñ"), (" x", " x")])
def test_a_chat_without_a_prompt_reads_standard_input(monkeypatch, typed, turn):
    def complete(prompts, **options):
        return prompts if options.keys() == SampleOptions.__optional_keys__ else "an option is missing"

    run = types.SimpleNamespace(for_decoding=lambda weights, donate: run, sample=complete)
    monkeypatch.setattr("jaxgpt.cli.commands.load", lambda *_, **__: run)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    assert sample("run", chat=True, num_samples=2).value == [{"prompt": turn, "text": turn}] * 2


def test_the_default_context_holds_the_longest_conversation(tmp_path):
    """That of the documentation in characters has 300, and one that is given, or that weights have, stays."""
    chat = [f"--data.path={tmp_path / 'questions.jsonl'}"]
    (tmp_path / "questions.jsonl").write_text(script("python_questions").make_questions())

    def context(*words):
        return choose_context(bind_command("train", *words).keywords["experiment"]).model.block_size

    assert context(*chat) == 320 and context(*chat, "--data.tokenizer", "byte") == 320
    assert context(*chat, "--model.block-size", "64") == context() == 64
    assert context(*chat, "--train.init-from", "x") == CONTEXT_OF_WEIGHTS
    turn = json.dumps({"messages": [{"role": r, "content": "x" * 600} for r in ("user", "assistant")]})
    lines = [turn.replace("x", "xy"), *[turn.replace("x" * 600, "x")] * 20]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    assert context(f"--data.path={tmp_path / 'chats.jsonl'}") == 1024  # and no more


def test_weights_are_tuned_with_the_rate_of_finetune(tmp_path):
    """The quickstart's Muon, with a rate for random weights, would ruin them."""
    for word in ("--train.init-from", "--train.init_from"):
        assert bind_command("train", word, "x").keywords["experiment"].optim == finetune().optim
    assert bind_command("train").keywords["experiment"].optim == quickstart().optim


@pytest.mark.slow
def test_a_terminal_sees_the_text_as_it_is_written(trained):
    """The same text as into a file, and in more than one piece."""
    directory, _ = trained
    line = ["sample", "--prompt", "lance", "--max-new-tokens", "40"]
    master, slave = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    how = {"cwd": directory, "env": env, "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen([sys.executable, "-m", "jaxgpt", *line], stdout=slave, **how)
    os.close(slave)
    deadline = threading.Timer(240, child.kill)
    deadline.start()
    pieces = []
    with contextlib.suppress(OSError):  # the terminal is gone when the child is
        while piece := os.read(master, 4096):
            pieces.append(piece)
    assert child.wait() == 0
    deadline.cancel()
    os.close(master)
    shown = b"".join(pieces).replace(b"\r\n", b"\n").decode()
    assert shown == jaxgpt(*line, cwd=directory).stdout
    assert len(pieces) >= 3 and pieces[0] == b"lance"


def test_a_mistake_that_the_table_of_bad_inputs_has_no_place_for(trained, tmp_path):
    """It has no network: a proxy that is not there."""
    directory, _ = trained
    files = sorted((str(p), p.stat().st_mtime_ns) for p in directory.rglob("*"))
    offline = {"https_proxy": "http://127.0.0.1:9", "JAXGPT_CACHE": str(tmp_path)}
    done = jaxgpt("train", "--data.corpus", "shakespeare", cwd=tmp_path, **offline)
    assert (done.returncode, done.stdout) == (2, "") and "To give it by hand, save the text as" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr
    assert files == sorted((str(p), p.stat().st_mtime_ns) for p in directory.rglob("*"))
