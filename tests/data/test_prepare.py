"""`jaxgpt prepare`: the same bytes from any format, with any number of workers, after kills. Bad input gets one line."""

import gzip
import itertools
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jaxgpt
from jaxgpt.data.dataset import DataConfig, open_data
from jaxgpt.data.tokenizer import BPETokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.tools import prepare as chapter
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from jaxgpt.tools.executor import LocalProcesses, Workers
from jaxgpt.tools.prepare import prepare
from tests.helpers import flip, ids, run_command, sentencepiece, tiny_experiment

RNG = np.random.default_rng(0)
WORDS = ["".join(RNG.choice([*"aeiouñ日😀lmnrst"], n)) for n in RNG.integers(1, 9, 400)]
DOCUMENTS = [" ".join(RNG.choice(WORDS, n)) + "\n" * (n % 3) for n in RNG.integers(1, 300, 400)]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A tokenizer.json, and a .jsonl file of DOCUMENTS."""
    directory = tmp_path_factory.mktemp("known")
    (directory / "tokenizer.json").write_text(train_bpe(DOCUMENTS, 500).to_json())
    (directory / "a.jsonl").write_text("".join(json.dumps({"id": 1, "text": text}) + "\n\n" for text in DOCUMENTS))
    return directory


def call(source, out, known=None, tokenizer=None, **options):
    options = {"workers": Workers(on="local:1"), "shard_tokens": 5000, "val_fraction": 0.2} | options
    return prepare((str(source),), out=str(out), tokenizer=tokenizer or str(known / "tokenizer.json"), **options)


def shards(out):  # {name: bytes}
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.bin"))}


@pytest.fixture(scope="module")
def made(known, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "out"
    call(known / "a.jsonl", out, known)
    return out


def split_at_ends(out, split, tokenizer):
    ids = np.concatenate([np.fromfile(path, np.uint16)[512:] for path in sorted(out.glob(f"{split}_*.bin"))])
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    assert ends[-1] == len(ids) - 1
    return [part[part != tokenizer.end_of_text] for part in np.split(ids, ends[:-1] + 1)]


def test_shards_hold_every_document_once_and_the_index_counts_them(made, known):
    tokenizer = BPETokenizer((known / "tokenizer.json").read_text())
    train, val = (
        [tokenizer.decode(part) for part in split_at_ends(made, split, tokenizer)] for split in ("train", "val")
    )
    assert sorted(train + val) == sorted(DOCUMENTS) and 50 < len(val) < 110
    assert train == [text for text in DOCUMENTS if text in set(train)]  # in order
    index = json.loads((made / "index.json").read_text())
    assert sum(shard["documents"] for shard in index["shards"]) == len(DOCUMENTS)
    assert {s["tokens"] for s in index["shards"] if s["file"] < "train_000003"} == {5000}
    assert (made / "tokenizer.json").read_text() == tokenizer.to_json()


def write(kind, folder):
    """DOCUMENTS in another format; return the source."""
    folder.mkdir()
    others = ("", ', "id": 1, "id": 2', ', "score": [NaN, {"x": 0, "x": 1}]', f', "n": {"9" * 5000}')  # are not read
    texts = enumerate(map(json.dumps, DOCUMENTS))
    lines = "".join(f'{{"text": {text}{others[n % len(others)]}}}\n' for n, text in texts).encode("utf-8-sig")
    half = len(lines) // 2
    if kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    elif kind == "jsonl.zst":
        packed = (pa.compress(part, codec="zstd", asbytes=True) for part in (lines[:half], lines[half:]))
        (folder / "a.jsonl.zst").write_bytes(b"".join(packed))
    elif kind == "txt":
        for number, text in enumerate(DOCUMENTS):
            (folder / f"{number:03d}.txt").write_bytes(text.encode("utf-8-sig"))
    elif kind in ("parquet", "hf"):
        table = pa.table({"n": range(400), "text": DOCUMENTS})
        pq.write_table(table.slice(0, 150), folder / "a.parquet", row_group_size=70)
        pq.write_table(table.slice(150), folder / "b.parquet")
        return f"hf:{folder}" if kind == "hf" else f"{folder}/*.parquet"
    return folder


def interrupted(after):
    """Return `LocalProcesses.submit`, interrupted at one batch."""
    real, left = LocalProcesses.submit, itertools.count()

    def submit(*args):
        if next(left) == after:
            raise KeyboardInterrupt
        return real(*args)

    return submit


@pytest.mark.parametrize("kind", ["txt", "jsonl.gz", "jsonl.zst", "parquet", "hf"])
@pytest.mark.filterwarnings("ignore")  # of datasets
def test_every_format_gives_the_same_tokens_even_when_it_is_interrupted(kind, made, known, tmp_path, monkeypatch):
    source = write(kind, tmp_path / "in")
    monkeypatch.setattr(chapter, "PIECE", 10_000)
    monkeypatch.setattr(LocalProcesses, "submit", interrupted(4))
    with pytest.raises(KeyboardInterrupt, match="interrupted: the same command goes on"):
        call(source, out := tmp_path / "out", known)
    assert json.loads((out / "index.json").read_text())["at"] != [0, 0, 0]
    call(source, out, known)
    assert shards(out) == shards(made)


KILLED = """
import os, signal, sys
from jaxgpt.tools import prepare as chapter
from jaxgpt.tools.executor import Workers
chapter.PIECE = 10_000
left, real = int(sys.argv[1]), os.replace
def replace(*paths):
    global left
    left -= 1
    if left == 0:
        real(*paths)
    if left <= 0:
        children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
        print(children, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    real(*paths)
if __name__ == "__main__":
    os.replace = replace if left else real
    chapter.prepare((sys.argv[2],), out=sys.argv[3], tokenizer=sys.argv[4], workers=Workers(on="local:" + sys.argv[5]),
                    shard_tokens=5000, val_fraction=0.2)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_kills_the_bytes_are_the_same_and_no_process_is_left(known, tmp_path):
    script, out = tmp_path / "killed.py", tmp_path / "out"
    script.write_text(KILLED)
    arguments = [str(known / "a.jsonl"), str(out), "bpe:500"]
    for count, workers in ((1, 1), (2, 1), (5, 2), (1, 1), (4, 1)):
        done = run_command(str(script), str(count), *arguments, str(workers), cwd=tmp_path)
        assert done.returncode == -9, done.stderr
        deadline = time.monotonic() + 20
        while alive := [pid for pid in done.stdout.split() if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.1)
        with pytest.raises(UserError):
            open_data(DataConfig(path=str(out)), block_size=8)
    assert run_command(str(script), "0", *arguments, "2", cwd=tmp_path).returncode == 0
    call(known / "a.jsonl", whole := tmp_path / "whole", tokenizer="bpe:500")
    names = {path.name for path in out.iterdir()} - {".lock"}
    assert names == {path.name for path in whole.iterdir()} - {".lock"}
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in names)


def test_a_documents_place_depends_on_nothing_but_its_text(made, known, tmp_path):
    tokenizer = BPETokenizer((known / "tokenizer.json").read_text())
    for number, part in enumerate((DOCUMENTS[:99:-1], DOCUMENTS[:100])):
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    call(tmp_path / "*.jsonl", tmp_path / "out", known)
    held_out = [sorted(map(tokenizer.decode, split_at_ends(out, "val", tokenizer))) for out in (made, tmp_path / "out")]
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize(("kind", "piece"), [("bytes", 100), ("Llama 2", 1000)])
def test_long_documents_are_cut_where_words_end(kind, known, tmp_path, monkeypatch, piece):
    tokenizer = BPETokenizer((known / "tokenizer.json").read_text())
    if kind != "bytes":
        tokenizer = sentencepiece(kind, [line for text in DOCUMENTS for line in text.splitlines(keepends=True)])
        (known := tmp_path / "known").mkdir()
        (known / "tokenizer.json").write_text(tokenizer.to_json())
        monkeypatch.setattr(chapter, "CONTEXT", 300)
    text = "\n\n".join(DOCUMENTS) + "  x \n\n y"
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(chapter, "PIECE", piece)
    call(tmp_path / "a.txt", tmp_path / "out", known, val_fraction=0.0)
    (ids,) = split_at_ends(tmp_path / "out", "train", tokenizer)
    assert ids.tolist() == tokenizer.encode(text).tolist()


@pytest.mark.slow
def test_a_run_trains_on_the_result_and_finds_its_tokenizer(made, tmp_path):
    run = jaxgpt.fit(tiny_experiment(made), tmp_path / "run")
    found, d = evaluate_run(run), open_data(DataConfig(path=str(made)), block_size=8)
    text = run.tokenizer.decode(ids(d.val)).replace("<|endoftext|>", "\n")
    assert (d.val_bytes, d.val_characters) == (len(text.encode()), len(text))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2) * len(d.val) / len(text.encode()))
    assert (tmp_path / "run/tokenizer.json").read_text() == (made / "tokenizer.json").read_text()
    assert run.val_loss is not None and np.isfinite(run.val_loss)


def test_a_damaged_shard_is_told_before_training(made, tmp_path, known):
    call(known / "a.jsonl", out := tmp_path / "out", known)
    flip(out / "train_000001.bin", 8 * 1030)
    with pytest.raises(UserError, match=r"train_000001.bin is not as it was made"):
        open_data(DataConfig(path=str(out)), block_size=8)
    for path in out.glob("val_*.bin"):
        path.unlink()
    with pytest.raises(UserError, match=r"val_00000\d.bin is missing|train_000001.bin is not"):
        open_data(DataConfig(path=str(out)), block_size=8)


LINE = b'{"text": "abc"}\n'
BAD = {
    "missing": ({}, "nothing to read at"),
    "empty.txt": (b"", "there is no text"),
    "bad.jsonl.zst": (b"no zst", "cannot be read at or after row 1: "),
    "bad.jsonl": (LINE + b'{"text": \n', ":2 is damaged: Expecting value"),
    "column.jsonl": (b'{"body": "x", "id": 3}\n', "row 1: there is no column 'text', it has body, id: give --column"),
    "picture.png": (b"x", "nothing to read at"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sources_are_told_and_leave_nothing(name, known, tmp_path):
    content, said = BAD[name]
    if content != {}:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as e:
        call(tmp_path / name, tmp_path / "out", known)
    assert name in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()
