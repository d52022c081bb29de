"""Token files of others: what is wrong with one is told by its name, before the first step."""

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.config import DataConfig
from jaxgpt.data import shards
from jaxgpt.data.dataset import prepare
from jaxgpt.errors import UserError
from jaxgpt.runs.metadata import read_metadata, write_metadata
from jaxgpt.runs.resume import check_same_data, describe_data_changes
from tests.helpers import run_command, script, tiny_experiment


def write_llmc(path, tokens, promised=None, magic=20240520, dtype=np.uint16):
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(tokens) if promised is None else promised
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())


def bins(path, **kwargs):
    return prepare(DataConfig(path=str(path), tokenizer="ids", **kwargs), block_size=8, vocab_size=1000)


@pytest.fixture
def series(tmp_path):
    directory = tmp_path / "series"
    directory.mkdir()
    for number in range(3):
        write_llmc(directory / f"x_train_{number:06d}.bin", np.arange(100) + number)
    write_llmc(directory / "x_val_000000.bin", np.arange(100))
    return directory


@pytest.mark.parametrize("chunk", [2**22, 64])
@pytest.mark.parametrize(("place", "value"), [(0, 1000), (63, 1000), (64, 65535), (299, 1001)])
def test_a_token_beyond_the_vocabulary_is_told_with_its_place(tmp_path, monkeypatch, chunk, place, value):
    monkeypatch.setattr(shards, "SCAN", chunk)
    tokens = np.arange(300)
    tokens[place] = value
    tokens[299] = 65535 if place != 299 else value  # only the first is told
    for path, offset in ((tmp_path / "bare.bin", 0), (tmp_path / "llmc.bin", 1024)):
        if offset:
            write_llmc(path, tokens)
        else:
            tokens.astype(np.uint16).tofile(path)
        said = rf"{path.name}: token {value} at byte {offset + 2 * place} \(token number {place}\) is outside the vocabulary, 0 to 999"
        with pytest.raises(UserError, match=said):
            bins(path)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_gap_in_the_numbers_is_told(series, missing):
    write_llmc(series / "x_train_000003.bin", np.arange(100))
    (series / f"x_train_{missing:06d}.bin").unlink()
    with pytest.raises(UserError, match=f"x_train_{missing:06d}.bin is missing between"):
        bins(series)


def test_names_that_are_no_series_may_have_gaps(tmp_path):
    for name in ("text_2019", "text_2021", "val"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    assert len(bins(tmp_path).train) == 200


def save_as_numpy(path, tokens):
    with path.open("wb") as f:
        np.save(f, tokens)


def save_as_npz(path, tokens):
    with path.open("wb") as f:
        np.savez(f, tokens=tokens)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (save_as_numpy, "a NumPy array"),
        (save_as_npz, "a zip archive"),
        (lambda p, t: p.write_bytes(gzip.compress(t.tobytes())), "gzip"),
        (lambda p, t: p.write_bytes(b"PAR1" + t.tobytes()), "Parquet"),
        (lambda p, t: p.write_bytes((90).to_bytes(8, "little") + b'{"a":1}' + t.tobytes()), "safetensors"),
        (lambda p, t: p.write_text("En un lugar de la Mancha, " * 400), "text: name it .txt"),
        (lambda p, t: p.write_text("ñandú «漢字» 🐎 " * 400), "text: name it .txt"),
        (lambda p, t: p.write_bytes(t.tobytes()[:-1]), "1199 bytes are not whole 16-bit tokens"),
        (lambda p, t: p.write_bytes(np.linspace(0, 1, 300, dtype=np.float32).tobytes()), "outside the vocabulary"),
        (lambda p, t: write_llmc(p, t[:0]), "holds no tokens"),
        (lambda p, t: write_llmc(p, t, promised=2**31 - 1), "promises 2147483647 tokens"),
        (lambda p, t: write_llmc(p, t, promised=-600), "promises -600 tokens"),
        (lambda p, t: (write_llmc(p, t), p.write_bytes(p.read_bytes()[:-2])), "promises 600 tokens"),
        (lambda p, t: (write_llmc(p, t), p.write_bytes(p.read_bytes()[:100])), "promises 600 tokens .* holds 0 bytes"),
    ],
)
def test_files_of_other_kinds_and_cut_ones_are_told(series, make, said):
    """One bad shard among good ones, named."""
    make(series / "x_train_000001.bin", np.arange(600, dtype=np.uint16))
    with pytest.raises(UserError, match=f"x_train_000001.bin.*{said}"):
        bins(series)


def test_real_tokens_are_no_other_kind(tmp_path):
    """Random tokens, of every first pair that begins another kind's magic but is not one."""
    rng = np.random.default_rng(0)
    for start in (b"PK", b"\x1f\x8b", b"\x93N", b"BZ", b"PA"):
        tokens = np.frombuffer(start + rng.integers(0, 1000, 400).astype(np.uint16).tobytes(), np.uint16)
        tokens.tofile(tmp_path / "x.bin")
        assert len(shards.open_shard(tmp_path / "x.bin")) == 401


@pytest.fixture
def run(series, tmp_path):
    """A directory that says it was trained on the series, and what asks whether it still can be."""
    directory = tmp_path / "run"
    directory.mkdir()
    experiment = tiny_experiment(series)
    experiment = dataclasses.replace(experiment, data=DataConfig(path=str(series), tokenizer="ids"))
    write_metadata(directory, experiment, bins(series).tokenizer, data=bins(series).fingerprint, vocab_size=1000)
    return directory


def test_the_record_has_each_file(run, series):
    files = read_metadata(run).data["files"]
    assert list(files) == sorted(p.name for p in series.iterdir())
    assert all(f["tokens"] == 100 and len(f["sha256"]) == 64 for f in files.values())
    check_same_data(read_metadata(run), bins(series))


def test_the_same_files_in_another_place_are_the_same_data(run, series):
    moved = series.rename(series.with_name("elsewhere"))
    check_same_data(read_metadata(run), bins(moved))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda d: write_llmc(d / "x_train_000001.bin", np.arange(100) + 7), "x_train_000001.bin has changed"),
        (lambda d: write_llmc(d / "x_val_000000.bin", np.arange(101)), "x_val_000000.bin has changed"),
        (lambda d: (d / "x_train_000002.bin").unlink(), "x_train_000002.bin is missing"),
        (lambda d: write_llmc(d / "x_train_000003.bin", np.arange(100)), "x_train_000003.bin is new"),
        (lambda d: (d / "x_train_000000.bin").rename(d / "y.bin"), "x_train_000000.bin is missing, y.bin is new"),
    ],
)
def test_what_became_of_the_files_is_told_by_name(run, series, harm, said):
    harm(series)
    with pytest.raises(UserError, match=f"was trained on other data: {said}"):
        check_same_data(read_metadata(run), bins(series))


def test_other_texts_and_tokenizers_are_told():
    before = {"train_tokens": 9, "train_sha256": "a" * 64, "tokenizer_sha256": "b" * 64}
    assert describe_data_changes(before, before) == []
    assert describe_data_changes(before, before | {"train_sha256": "c" * 64}) == [
        "train_sha256 aaaaaaaaaaaa -> cccccccccccc"
    ]
    assert describe_data_changes({"files": {"a.bin": 1}}, before) != []
    assert describe_data_changes(before, {"files": {"a.bin": 1}}) != []


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "harm",
    [
        lambda d: flip(d / "train.bin"),
        lambda d: flip(d / "val.bin"),
        lambda d: (d / "train.bin").write_bytes(b""),
        lambda d: (d / "train.bin").unlink(),
        lambda d: (d / "meta.json").unlink(),
        lambda d: (d / "meta.json").write_text("{}"),
        lambda d: (d / "meta.json").write_text("["),
        lambda d: (d / "meta.json").write_text('{"fingerprint": 3, "dtype": "uint16"}'),
        lambda d: (d / "meta.json").write_text((d / "meta.json").read_text().replace('_tokens": 1', '_tokens": 2')),
        lambda d: (d / "tokenizer.json").write_text('{"jaxgpt": "byte"}'),
        lambda d: (d / "tokenizer.json").unlink(),
    ],
)
def test_damaged_cached_tokens_are_made_anew_and_it_is_said(text_file, tmp_path, monkeypatch, harm):
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    config = DataConfig(path=str(text_file))
    good = prepare(config, block_size=8)
    tokens = good.train.read(0, len(good.train))
    (directory,) = (tmp_path / "tokens").iterdir()
    harm(directory)
    with pytest.warns(UserWarning, match="the cached tokens in .* are damaged .*: encoding the text again"):
        again = prepare(config, block_size=8)
    assert again.fingerprint == good.fingerprint
    assert again.train.read(0, len(again.train)).tolist() == tokens.tolist()
    assert [p.name for p in (tmp_path / "tokens").iterdir()] == [directory.name]
    prepare(config, block_size=8)  # without a word


def test_a_cache_that_cannot_be_written_is_told(text_file, monkeypatch):
    monkeypatch.setenv("JAXGPT_CACHE", str(text_file))
    with pytest.raises(UserError, match="cannot write into the cache .* Set JAXGPT_CACHE to another directory"):
        prepare(DataConfig(path=str(text_file)), block_size=8)


def test_a_meta_file_that_is_no_object_is_no_crash(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps([1]))
    with pytest.warns(UserWarning, match="damaged"):
        from jaxgpt.data.dataset import read_tokens

        assert read_tokens(tmp_path) is None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_large_corpus_is_not_held_in_memory(tmp_path):
    path = tmp_path / "all.bin"
    with path.open("wb") as f:
        f.truncate(2**30)  # zeros without a disk to hold them
    done = run_command("-c", script("benchmarks/data").LOAD, str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    megabytes, _, tokens = map(float, done.stdout.split())
    assert tokens == 2**29 and megabytes < 100
