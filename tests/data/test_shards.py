"""Token files of other programs: a message names a bad file, and what is wrong with it, before the first step."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.data import shards
from jaxgpt.data.dataset import DataConfig, open_data
from jaxgpt.errors import UserError
from jaxgpt.runs.directory import read_metadata, write_metadata
from jaxgpt.runs.resume import describe_data_changes
from tests.helpers import check_command, ids, script, tiny_experiment


def llmc(tokens, promised=None, magic=20240520, dtype=np.uint16):
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(tokens) if promised is None else promised
    return header.tobytes() + np.asarray(tokens, dtype).tobytes()


def write_llmc(path, tokens, **kwargs):
    path.write_bytes(llmc(tokens, **kwargs))


def bins(path, **kwargs):
    return open_data(DataConfig(path=str(path), tokenizer="ids", **kwargs), block_size=8, vocab_size=1000)


@pytest.fixture
def series(tmp_path):
    directory = tmp_path / "series"
    directory.mkdir()
    for number in range(3):
        write_llmc(directory / f"x_train_{number:06d}.bin", np.arange(100) + number)
    write_llmc(directory / "x_val_000000.bin", np.arange(100))
    return directory


@pytest.mark.parametrize(
    ("chunk", "place", "value"), [(2**22, 0, 1000), (64, 63, 1000), (64, 64, 65535), (64, 299, 1001)]
)
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


def test_nanogpts_files(tmp_path):
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(500, 600, dtype=np.uint16).tofile(tmp_path / "val.bin")
    d = bins(tmp_path)
    assert ids(d.train) == list(range(500)) and ids(d.val) == list(range(500, 600))
    assert d.val_characters is None


def test_llmcs_shards(tmp_path):
    write_llmc(tmp_path / "fineweb_train_000001.bin", range(100))
    write_llmc(tmp_path / "fineweb_train_000002.bin", range(100, 150))
    write_llmc(tmp_path / "fineweb_val_000000.bin", range(150, 200))
    d = bins(tmp_path)
    assert ids(d.train) == list(range(150)) and ids(d.val) == list(range(150, 200))
    write_llmc(tmp_path / "all.bin", [7] * 500, magic=20240801, dtype=np.uint32)  # Llama 3's are 32 bits wide
    assert ids(bins(tmp_path / "all.bin").train) == [7] * 450


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_without_held_out_files_the_last_tokens_are(tmp_path, share):
    """Wherever the cut falls among the files."""
    for number in range(3):
        np.arange(100 * number, 100 * number + 100, dtype=np.uint16).tofile(tmp_path / f"x{number}.bin")
    d, cut = bins(tmp_path, val_fraction=share), int(300 * (1 - share))
    assert ids(d.train) == list(range(cut)) and ids(d.val) == list(range(cut, 300))
    alone = bins(tmp_path / "x0.bin", val_fraction=share)
    assert ids(alone.train) == list(range(int(100 * (1 - share))))


@pytest.mark.parametrize("held_out", ["x-validation", "x.val.1", "val0", "VAL"])
def test_files_are_held_out_by_the_word_in_their_names_and_named(tmp_path, held_out):
    for name in ("medieval_000001", "carnival", "evaluation", "interval-2", "value", "train", "valencia"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    np.arange(100, 150, dtype=np.uint16).tofile(tmp_path / f"{held_out}.bin")
    d = bins(tmp_path)
    assert (len(d.train), ids(d.val)) == (700, list(range(100, 150)))


def test_token_files_need_their_tokenizer(tmp_path):
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "stray.bin")
    config = DataConfig(path=str(tmp_path))
    with pytest.raises(UserError, match="so tokenizer=char cannot be used"):
        open_data(config, block_size=8)
    with pytest.raises(UserError, match=r"needs --model\.vocab-size"):
        open_data(dataclasses.replace(config, tokenizer="ids"), block_size=8)
    known = open_data(config, block_size=8, vocab_size=1000)
    assert known.fingerprint == bins(tmp_path).fingerprint and "no tokenizer.json: samples are ids" in known.notes[0]


TOKENS = np.arange(600, dtype=np.uint16)


@pytest.mark.parametrize(
    ("raw", "said"),
    [(TOKENS.tobytes()[:-1], "1199 bytes are not whole 16-bit tokens"), (llmc(TOKENS)[:-2], "promises 600 tokens")],
)
def test_one_bad_shard_among_good_ones_is_named(series, raw, said):
    (series / "x_train_000001.bin").write_bytes(raw)
    with pytest.raises(UserError, match=f"x_train_000001.bin.*{said}"):
        bins(series)


@pytest.fixture
def run(series, tmp_path):
    """A directory that says it was trained on the series, and what asks whether it still can be."""
    directory = tmp_path / "run"
    directory.mkdir()
    experiment = tiny_experiment(series)
    experiment = dataclasses.replace(experiment, data=DataConfig(path=str(series), tokenizer="ids"))
    write_metadata(directory, experiment, bins(series).tokenizer, data=bins(series).fingerprint, vocab_size=1000)
    return directory


def test_the_record_has_each_file_wherever_it_lies(run, series):
    files = read_metadata(run).data["files"]
    assert list(files) == sorted(p.name for p in series.iterdir())
    assert all(f["tokens"] == 100 and len(f["sha256"]) == 64 for f in files.values())
    moved = bins(series.rename(series.with_name("elsewhere")))
    assert describe_data_changes(read_metadata(run).data, moved.fingerprint) == []


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda d: write_llmc(d / "x_train_000001.bin", np.arange(100) + 7), "x_train_000001.bin has changed"),
        (lambda d: (d / "x_train_000000.bin").rename(d / "y.bin"), "x_train_000000.bin is missing, y.bin is new"),
    ],
)
def test_what_became_of_the_files_is_told_by_name(run, series, harm, said):
    harm(series)
    assert ", ".join(describe_data_changes(read_metadata(run).data, bins(series).fingerprint)) == said


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_large_corpus_is_not_held_in_memory(tmp_path):
    path = tmp_path / "all.bin"
    with path.open("wb") as f:
        f.truncate(2**30)  # zeros without a disk to hold them
    done = check_command("-c", script("benchmarks/data").LOAD, str(path), cwd=tmp_path)
    megabytes, _, tokens = map(float, done.stdout.split())
    assert tokens == 2**29 and megabytes < 100
