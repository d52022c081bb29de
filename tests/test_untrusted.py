"""Untrusted files: nothing is unpickled, nothing crashes, and no memory is allocated for data that is not there."""

import ast
import dataclasses
import json
import os
import random
import re
import shutil
import socket
import tracemalloc

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import open_file, read_bytes, read_json
from jaxgpt.hf.source import find_directory
from jaxgpt.runs import pretrained
from jaxgpt.runs.directory import Origin, read_metadata, write_metadata
from jaxgpt.runs.metrics import read_metrics, rewind_metrics
from jaxgpt.runs.resume import reopen_dataset
from tests.faults import fuzz
from tests.helpers import TINY, edit_record, flip, tiny_experiment
from tests.test_architecture import imports, modules

UNPICKLING = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch", "yaml"}


def test_nothing_unpickles():
    assert [name for name, tree in modules() if {t.split(".")[0] for t in imports(tree)} & UNPICKLING] == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, text_file):
    """A directory with the record of a run."""
    directory = tmp_path_factory.mktemp("recorded")
    data = {"tokenizer_sha256": "0" * 64, "train_tokens": 1200, "val_sha256": "1" * 64}
    write_metadata(directory, tiny_experiment(text_file), ByteTokenizer(), data=data, vocab_size=256)
    return directory


def test_a_flipped_bit_of_a_record_is_told_or_changes_nothing(recorded):
    """A learning rate of 0.0003 that has become 0.0007 is as good JSON as before."""
    path = recorded / "experiment.json"
    whole, record = path.read_bytes(), read_metadata(recorded)
    rng = random.Random(0)
    digits = [8 * at + bit for at, byte in enumerate(whole) if byte in b"0123456789" for bit in range(3)]
    told = 0
    for bit in rng.sample(range(8 * len(whole)), 120) + rng.sample(digits, 60):
        flip(path, bit)
        try:
            assert read_metadata(recorded) == record, bit
        except UserError as e:
            assert str(path) in str(e), e
            told += 1
        path.write_bytes(whole)
    assert told > 130


def test_only_the_experiment_that_the_user_names_is_run():
    """eval, exec and their kin; numpy.load has a pickle in it unless told otherwise."""
    found = set()
    for module, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = f"{module}: {ast.unparse(node.func)}"
            if name.endswith(
                (": eval", ": exec", ": compile", ".exec_module", ".run_path", ".run_module", "__import__")
            ):
                found.add(name)
            if name.endswith((".load", ".fromfile", ".loads")) and not name.endswith(("json.load", "json.loads")):
                safe = any(k.arg == "allow_pickle" and ast.unparse(k.value) == "False" for k in node.keywords)
                found |= set() if safe else {name}
    # Ray's workers repeat the command itself.
    assert found == {"runs.code: exec", "runs.code: compile", "tools.executor: runpy.run_module"}


ADDRESS = "gs://sender/tokens"


@pytest.mark.parametrize("data", [{"path": ADDRESS}, {"path": f"{ADDRESS}:0.5,ftp://sender/x:0.5"}])
def test_the_record_of_a_run_names_nothing_to_connect_to(tmp_path, recorded, monkeypatch, data):
    """It may be somebody else's. What its reader names is fetched, and only that."""
    run, fetched = tmp_path / "run", []
    monkeypatch.setattr(fsspec, "filesystem", fetched.append)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: fetched.append("a connection"))
    shutil.copytree(recorded, run)
    (run / "mixture.json").write_text(json.dumps({ADDRESS: 1.0}))
    forged = {name: text.replace("{run}", str(run)) for name, text in data.items()}
    others = {"coordinator": "127.0.0.1:9", "processes": 2, "process_id": 1}
    edit_record(run, lambda r: (r["experiment"]["data"].update(forged), r["experiment"]["parallel"].update(others)))
    metadata = read_metadata(run)
    for experiment in (metadata.given, metadata.experiment):
        assert "://" not in experiment.data.path and experiment.parallel == Experiment(name="tiny").parallel
        with pytest.raises(UserError, match="which is neither there|no file or folder at"):
            reopen_dataset(metadata, experiment.data, remedy="name that text")
    assert fetched == []
    named = dataclasses.replace(metadata.given.data, path=ADDRESS)
    with pytest.raises(UserError, match=f"cannot read {ADDRESS}"):
        reopen_dataset(metadata, named, remedy="name that text")
    assert fetched == ["gs"]


def test_the_base_of_received_adapters_is_not_downloaded(recorded, monkeypatch, tmp_path):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"it was never downloaded here.*hf download sender/model"):
        find_directory("sender/model", downloads=False)
    origin = Origin(directory="/nowhere", step=None, sha256="0" * 64, model=TINY)
    metadata = dataclasses.replace(read_metadata(recorded), origin=None)
    object.__setattr__(metadata, "origin", origin)
    with pytest.raises(UserError, match="it was never downloaded here"):
        pretrained.load_base(metadata, "sender/model")


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz")
    found = fuzz.targets(directory)
    return directory, found, {*directory.rglob("*"), *(path for _, path, _ in found.values())}


NAMES = (
    "experiment.json|configuration|tokenizer.json, ours|tokenizer.json, BPE|.bin|a model's config.json|safetensors|"
    "safetensors index|conversations|GGUF|tokenizer_config.json"
).split("|")


@pytest.mark.parametrize("name", NAMES)
def test_a_value_or_an_error_in_words(targets, name):
    """Of the good files a value; 100 mutations of each, the same on every run."""
    directory, found, known = targets
    assert found.keys() == set(NAMES)
    assert all(fuzz.attempt(name, found[name], good) for good in found[name][2])

    @given(st.integers(0, 2**64))
    @settings(derandomize=True, max_examples=100, deadline=None, database=None)
    def attempt(seed):
        fuzz.attempt(name, found[name], fuzz.one(random.Random(seed), found[name][2]))

    attempt()
    assert set(directory.rglob("*")) <= known  # and no file but those


@pytest.mark.parametrize("read", [lambda p: read_json(p, 2**20), load_tokenizer])
def test_a_file_larger_than_memory_is_not_read(tmp_path, read):
    """100 GB of nothing, and what never ends."""
    sparse, endless = tmp_path / "sparse.json", tmp_path / "endless.json"
    with sparse.open("wb") as f:
        f.write(b"{")
        f.truncate(10**11)
    endless.symlink_to("/dev/zero")
    tracemalloc.start()
    for path in (sparse, endless):
        with pytest.raises(UserError):
            read(path)
    assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"a": 1, "a": 2}', "'a' appears twice"), ("[" * 10**6, "nested too deeply"), ("1" * 5000, "4300")],
)
def test_strict_json(tmp_path, text, said):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said) as caught:
        read_json(path, 2**24)
    assert "x.json is damaged" in str(caught.value) and len(str(caught.value)) < 500


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opened as usual, this would wait for a writer
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a directory"), ("/dev/zero", "a device")):
        with pytest.raises(UserError, match=f"is {kind}: give a regular file"):
            open_file(path)
    with pytest.raises(UserError, match="null"):
        read_bytes("a\0b", 10)


BROKEN_LINES = [
    "",
    "{",
    "[1]",
    "null",
    '{"loss": 1.0}',
    '{"step": "3"}',
    '{"step": 1e3}',
    '{"step": 3, "loss": "x"}',
    '{"step": 3, "seconds": 1e999}',
    '{"step": true, "loss": 1.0}',
    '{"step": 9223372036854775808, "loss": 1.0}',
    '{"step": 5, "val_loss": 1.0, "val_losses": {"a": "x"}}',
    "[" * 100_000,
    "9" * 5000,
    "\0\0",
]


def test_broken_lines_of_the_metrics_are_left_out_wherever_they_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [{"step": n, "loss": 1.0 / n, "mfu": None} for n in range(1, len(BROKEN_LINES) + 1)]
    mixed = [line for pair in zip(map(json.dumps, good), BROKEN_LINES, strict=True) for line in pair]
    path.write_bytes("\n".join(mixed).encode() + b'\n\xff\xfe\n{"step": 99, "lo')
    said = re.escape(f"{path}: {len(BROKEN_LINES) + 1} of {2 * len(BROKEN_LINES) + 1} lines are damaged")
    with pytest.warns(UserWarning, match=said):  # not of the last one, which may be just being written
        assert read_metrics(path) == good
    with pytest.warns(UserWarning, match=said):
        rewind_metrics(path, 5)
    assert read_metrics(path) == good[:5]
