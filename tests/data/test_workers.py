"""Texts encoded by several processes: the same ids in the same order, and an end that is told."""

import os
import signal

import numpy as np
import pytest

from jaxgpt.config import DataConfig
from jaxgpt.data import dataset, workers
from jaxgpt.data.bpe import train_bpe
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.data.workers import encode_in_order
from jaxgpt.errors import UserError
from tests.conftest import TEXT
from tests.helpers import run_command


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return train_bpe([TEXT], 300)


def test_ids_and_order_are_those_of_one_process(bpe):
    lines = [line + "\n" for line in TEXT.splitlines()] + ["", TEXT * 20, "añ\U0001f600 "]
    items = [(n, np.array([n]) if n % 5 == 4 else line) for n, line in enumerate(lines)]
    alone, together = (list(encode_in_order(items, bpe, n)) for n in (1, 2))
    assert [label for label, _ in together] == list(range(len(items)))
    for (_, one), (_, other) in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_tokens_on_disk_are_the_same(bpe, tmp_path, monkeypatch):
    text, saved = tmp_path / "text.txt", tmp_path / "tokenizer.json"
    text.write_text(TEXT * 3)
    saved.write_text(bpe.to_json())
    found = []
    for least in (10**9, 1):
        monkeypatch.setattr(dataset, "FOR_ALL_CORES", least)
        monkeypatch.setattr(dataset, "count_cores", lambda: 2)
        monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / str(least)))
        found.append(dataset.prepare(DataConfig(path=str(text), tokenizer=str(saved)), block_size=8).fingerprint)
    assert found[0] == found[1]


def test_what_is_fast_needs_no_processes(monkeypatch):
    monkeypatch.setattr(workers.subprocess, "Popen", None)
    ((label, ids),) = encode_in_order([("a", "bc")], ByteTokenizer(), 8)
    assert label == "a" and ids.tolist() == [98, 99]


def test_a_mistake_in_the_text_is_told_as_by_one_process(bpe):
    said = []
    for n in (1, 2):
        with pytest.raises(UserError) as told:
            list(encode_in_order([(0, "whole"), (1, "half \udc00")], bpe, n))
        said.append(str(told.value))
    assert said[0] == said[1]


def test_a_worker_that_is_killed_is_told_and_none_stays(bpe, monkeypatch):
    started = []
    popen = workers.subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", start)

    def texts():
        yield 0, "first"
        yield 1, "second"
        os.kill(started[-1].pid, signal.SIGKILL)
        for n in range(2, 9):
            yield n, TEXT

    with pytest.raises(UserError, match="ended with status -9 .*Try again"):
        list(encode_in_order(texts(), bpe, 2))
    assert len(started) == 2 and all(process.poll() is not None for process in started)

    started.clear()
    some = encode_in_order(((n, TEXT) for n in range(9)), bpe, 2)
    next(some)
    some.close()  # as when the one that reads them fails
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_a_script_without_a_guard_is_not_run_again(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe.to_json())
    (tmp_path / "script.py").write_text(
        "from jaxgpt.data.tokenizer import load_tokenizer\n"
        "from jaxgpt.data.workers import encode_in_order\n"
        "print('once')\n"
        "print(len(list(encode_in_order([(0, 'lance'), (1, 'rack')], load_tokenizer('tokenizer.json'), 2))))\n"
    )
    done = run_command("script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "once\n2\n"), done.stderr
