import dataclasses
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.config import DataConfig
from jaxgpt.data import cache, corpus, dataset, documents
from jaxgpt.data.dataset import encode_whole, prepare
from jaxgpt.data.pipeline import Tokens
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import UserError
from jaxgpt.runs.resume import reopen_dataset
from tests.conftest import TEXT
from tests.helpers import chat_file, recorded_run

BEFORE: dict = {}  # the fingerprint of a run of an earlier version, as far as it decides the split


def ids(tokens):
    return tokens.read(0, len(tokens)).tolist()


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_the_splits_are_the_text_in_order(text_file, tokenizer):
    d = prepare(DataConfig(path=str(text_file), tokenizer=tokenizer, bpe_vocab_size=300), block_size=8)
    cut = int(len(TEXT) * 0.9)
    assert d.tokenizer.decode(ids(d.train)) == TEXT[:cut]
    assert d.tokenizer.decode(ids(d.val)) == TEXT[cut:]
    assert d.val_characters == len(TEXT) - cut
    assert d.fingerprint["train_tokens"] == len(d.train)


def test_the_split_of_shakespeare_is_nanogpts(real_text):
    d = prepare(DataConfig(path=str(real_text / "shakespeare.txt")), block_size=64)
    assert (len(d.train), len(d.val), d.tokenizer.vocab_size) == (1_003_854, 111_540, 65)


def test_prepared_once(text_file, monkeypatch):
    config = DataConfig(path=str(text_file), tokenizer="bpe", bpe_vocab_size=280)
    first = prepare(config, block_size=8)
    monkeypatch.setattr("jaxgpt.data.dataset.write_tokens", None)  # would be called
    again = prepare(config, block_size=8)
    assert again.fingerprint == first.fingerprint
    assert ids(again.train) == ids(first.train)


def test_the_fingerprint_is_of_the_content(text_file, tmp_path):
    copy = tmp_path / "elsewhere.txt"
    copy.write_text(TEXT, encoding="utf-8")
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("lance", "sword"), encoding="utf-8")
    prints = [prepare(DataConfig(path=str(p)), block_size=8).fingerprint for p in (text_file, copy, other)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("tokenizer", "tasks"),
    [("char", ["reading", "encoding"]), ("bpe", ["reading", "learning the tokens of", "encoding"])],
)
def test_a_long_reading_reports_how_far_it_is(tokenizer, tasks, text_file, tmp_path, monkeypatch, caplog):
    config = DataConfig(path=str(text_file), tokenizer=tokenizer, bpe_vocab_size=300)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    prepare(config, block_size=8)
    assert caplog.messages == []  # a short one does not
    monkeypatch.setattr(corpus, "CHUNK", -(-text_file.stat().st_size // 2))
    monkeypatch.setattr(dataset, "REPORT_EVERY", -1)
    monkeypatch.setattr(dataset, "FOR_ALL_CORES", 1000)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "another"))
    prepare(config, block_size=8)
    for shown in ("0 MB", "50%"):
        assert [line for line in caplog.messages if line.endswith(f" {shown}")] == [
            f"{t} {text_file}: {shown}" for t in tasks
        ]


def test_a_text_larger_than_a_read_is_the_same_text(text_file, tmp_path, monkeypatch):
    whole = prepare(DataConfig(path=str(text_file)), block_size=8)
    monkeypatch.setattr(corpus, "CHUNK", 97)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    assert prepare(DataConfig(path=str(text_file)), block_size=8).fingerprint == whole.fingerprint


def test_the_last_part_of_each_file_is_held_out(tmp_path):
    """Not that of the folder, which is all from its last file; a run of an earlier version keeps that split."""
    a, b = (f"document {name} " * 30 for name in "ab")
    (tmp_path / "a.txt").write_text(a)
    (tmp_path / "b.txt").write_text(b)
    config = DataConfig(path=str(tmp_path), val_fraction=0.4)
    d = prepare(config, block_size=8)
    assert d.tokenizer.decode(ids(d.train)) == f"{a[:198]}\n{b[:198]}"
    assert d.tokenizer.decode(ids(d.val)) == f"{a[198:]}\n{b[198:]}" and d.val_characters == 265
    by_bpe = prepare(dataclasses.replace(config, tokenizer="bpe", bpe_vocab_size=270), block_size=8)
    assert [ids(split).count(by_bpe.tokenizer.end_of_text) for split in (by_bpe.train, by_bpe.val)] == [1, 1]

    before = prepare(config, block_size=8, known=BEFORE)
    assert before.tokenizer.decode(ids(before.train)) == f"{a}\n{b}"[:396]
    assert before.tokenizer.decode(ids(before.val)) == f"{a}\n{b}"[396:] and before.val_characters == 265
    for dataset_of_run in (d, before):
        name = "by-file" if dataset_of_run is d else "before"
        run = recorded_run(tmp_path / name, config, dataset_of_run, block_size=8)
        assert reopen_dataset(run.metadata, remedy="").fingerprint == dataset_of_run.fingerprint


@pytest.mark.parametrize("files", [("A" * 40, "B" * 40), ("A" * 40 + "\n" + "B" * 40,)])
def test_the_end_of_a_document_is_not_a_newline_in_the_cache(tmp_path, files):
    """A folder of two files and one file with a newline between the same words are two texts."""
    for number, text in enumerate((files, ("A" * 40, "B" * 40), ("A" * 40 + "\n" + "B" * 40,))):
        (tmp_path / str(number)).mkdir()
        for name, document in zip("ab", text, strict=False):
            (tmp_path / str(number) / f"{name}.txt").write_text(document)
    config = DataConfig(tokenizer="bpe", bpe_vocab_size=258, val_fraction=0.3)
    read = []
    for number in range(3):  # the first of them fills the cache
        d = prepare(dataclasses.replace(config, path=str(tmp_path / str(number))), block_size=8, known=BEFORE)
        found = ids(d.train) + ids(d.val)
        read.append((found.count(d.tokenizer.end_of_text), d.tokenizer.decode(found).count("\n")))
    assert read[1:] == [(1, 0), (0, 1)]


def changes_after(path, other, times):
    """`read_text`, but the file holds another text once it has been read so often."""
    readings = itertools.count(1)

    def read(files):
        yield from corpus.read_text(files)
        if next(readings) == times:
            path.write_text(other)

    return read


@pytest.mark.parametrize(("tokenizer", "times"), [("char", 1), ("byte", 1), ("bpe", 1), ("bpe", 2)])
def test_a_text_that_changes_between_readings_is_refused_and_not_cached(tmp_path, monkeypatch, tokenizer, times):
    path, other = tmp_path / "t.txt", TEXT.replace("lance", "nalce")
    path.write_text(TEXT)
    config = DataConfig(path=str(path), tokenizer=tokenizer, bpe_vocab_size=270)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as m:
        m.setattr("jaxgpt.data.dataset.read_text", changes_after(path, other, times))
        with pytest.raises(UserError, match=r"t\.txt changed while it was read"):
            prepare(config, block_size=8)
    path.write_text(TEXT)
    d = prepare(config, block_size=8)
    assert d.tokenizer.decode(ids(d.train) + ids(d.val)) == TEXT


def test_pairs_that_change_between_readings_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "t.tsv"
    path.write_text("a\tb\n" * 20)
    encode = documents.encode_pairs

    def late(*args, **kwargs):
        path.write_text("a\tc\n" * 20)
        return encode(*args, **kwargs)

    monkeypatch.setattr(documents, "encode_pairs", late)
    with pytest.raises(UserError, match=r"t\.tsv changed while it was read"):
        prepare(DataConfig(path=str(path), tokenizer="byte"), block_size=8)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, UserError])
def test_what_ends_the_writing_of_tokens_is_not_swallowed(tmp_path, kind):
    """Not even where another process has written the same tokens meanwhile."""

    def pieces():
        yield "train", np.arange(5)
        (tmp_path / "key").mkdir()
        (tmp_path / "key" / "meta.json").write_text("{}")
        raise kind

    with pytest.raises(kind):
        cache.write_tokens(tmp_path / "key", ByteTokenizer(), pieces())
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_the_first_of_two_processes_wins(tmp_path):
    """The second finds the directory there, which has the same tokens."""

    def pieces(number):
        yield "train", np.arange(5)
        if number == 2:
            cache.write_tokens(tmp_path / "key", ByteTokenizer(), pieces(1))
        yield "val", np.arange(5)

    cache.write_tokens(tmp_path / "key", ByteTokenizer(), pieces(2))
    assert [p.name for p in tmp_path.iterdir()] == ["key"] and cache.read_tokens(tmp_path / "key")


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_text_to_evaluate_has_the_tokens_that_training_gives_it(tmp_path, tokenizer):
    """Between two files, too: the end of a text where the tokenizer has one, else a newline."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"document {name}\n" * 9)
    config = DataConfig(path=str(tmp_path), tokenizer=tokenizer, bpe_vocab_size=270, val_fraction=0.331)
    d = prepare(config, block_size=8, known=BEFORE)
    assert d.val_characters == 99  # the last file: at the border between the splits no word is cut in two
    found, text = encode_whole(corpus.find_user_files(str(tmp_path)), d.tokenizer)
    assert found.tolist() == ids(d.train) + ids(d.val)
    assert text == "\n".join(f"document {name}\n" * 9 for name in "abc")


def test_reading_crosses_shards():
    parts = [np.arange(0, 5), np.arange(5, 6), np.arange(6, 20)]
    tokens = Tokens(parts)
    assert len(tokens) == 20
    for start in range(20):
        for length in range(21 - start):
            if length:
                assert tokens.read(start, length).tolist() == list(range(start, start + length))


def write_llmc(path, tokens, magic=20240520, dtype=np.uint16, promised=None):
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(tokens) if promised is None else promised
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())


def bins(path, **kwargs):
    return prepare(DataConfig(path=str(path), tokenizer="ids", **kwargs), block_size=8, vocab_size=1000)


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


def test_llama3_shards_are_32_bits_wide(tmp_path):
    write_llmc(tmp_path / "train.bin", [7] * 500, magic=20240801, dtype=np.uint32)
    assert ids(bins(tmp_path / "train.bin").train) == [7] * 450


@pytest.mark.parametrize(
    "held_out", ["val", "x_val_000000", "x-validation", "valid", "x.val.1", "val0", "x_valid02", "VAL", None]
)
def test_files_are_held_out_by_the_word_in_their_names_and_named(tmp_path, held_out):
    for name in ("medieval_000001", "carnival", "evaluation", "interval-2", "value", "train", "valencia"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    if held_out is not None:
        np.arange(100, 150, dtype=np.uint16).tofile(tmp_path / f"{held_out}.bin")
    d = bins(tmp_path)
    if held_out is None:
        assert (len(d.train), len(d.val)) == (630, 70)
        assert d.notes == ("no file is named val: of the 7 files the last 10% of the tokens are held out",)
    else:
        assert (len(d.train), ids(d.val)) == (700, list(range(100, 150)))
        assert d.notes == (f"held out for validation: {held_out}.bin",)


def test_many_held_out_files_are_counted(tmp_path):
    for number in range(9):
        for split in ("train", "val"):
            np.arange(20, dtype=np.uint16).tofile(tmp_path / f"{split}_{number:06d}.bin")
    assert bins(tmp_path).notes == (
        "held out for validation: val_000000.bin, val_000001.bin, val_000002.bin and 6 more",
    )


def test_texts_and_token_files_in_one_folder_are_asked_about(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "stray.bin")
    for tokenizer in ("char", "byte"):
        said = r"has both token files \(stray\.bin\) and texts \(text\.txt\): .* put one kind elsewhere"
        with pytest.raises(UserError, match=said):
            prepare(DataConfig(path=str(tmp_path), tokenizer=tokenizer), block_size=8)
    assert len(bins(tmp_path).train) == 450  # asked for by tokenizer ids


def test_one_file_is_split_by_position(tmp_path):
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "all.bin")
    d = bins(tmp_path / "all.bin", val_fraction=0.25)
    assert ids(d.train) == list(range(150)) and ids(d.val) == list(range(150, 200))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p.write_bytes(b"abc"), "3 bytes are not whole 16-bit tokens"),
        (lambda p: p.write_bytes(b""), "0 bytes"),
        (lambda p: write_llmc(p, range(100), promised=200), "promises 200 tokens"),
        (
            lambda p: np.full(500, 1000, np.uint16).tofile(p),
            r"x\.bin: token 1000 at byte 0 \(token number 0\) is outside the vocabulary, 0 to 999",
        ),
        (lambda p: np.zeros(20, np.uint16).tofile(p), "the validation split of .* has 2 tokens, needed 9"),
    ],
)
def test_damaged_token_files_are_told(tmp_path, make, said):
    path = tmp_path / "x.bin"
    make(path)
    with pytest.raises(UserError, match=said):
        bins(path)


@pytest.mark.parametrize(
    ("text", "kwargs", "said"),
    [
        ("", {}, "is empty"),
        ("short", {}, "the training split of .* has 4 tokens, needed 9"),
        (
            "long enough for training, not for validation",
            {"val_fraction": 0.1},
            "the validation split of .* has 5 tokens, needed 9",
        ),
        (TEXT, {"tokenizer": "ids"}, "tokenizer ids is for .bin"),
        (TEXT, {"tokenizer": "nowhere.json"}, "no tokenizer at nowhere.json"),
    ],
)
def test_texts_that_will_not_do_are_told(tmp_path, text, kwargs, said):
    path = tmp_path / "t.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        prepare(DataConfig(path=str(path), **kwargs), block_size=8)


def test_missing_paths_are_told(tmp_path):
    with pytest.raises(UserError, match="no file or folder"):
        prepare(DataConfig(path=str(tmp_path / "none.txt")), block_size=8)
    with pytest.raises(UserError, match=r"has no \.txt files"):
        prepare(DataConfig(path=str(tmp_path)), block_size=8)


def test_token_files_need_their_tokenizer(tmp_path):
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match="so tokenizer=char cannot be used"):
        prepare(DataConfig(path=str(tmp_path)), block_size=8)
    with pytest.raises(UserError, match="needs --model.vocab-size"):
        prepare(DataConfig(path=str(tmp_path), tokenizer="ids"), block_size=8)


@pytest.mark.parametrize("kind", ["text", "conversations", "pairs"])
def test_what_is_known_is_found_in_the_cache_without_its_text(kind, text_file, tmp_path):
    if kind == "text":
        path = shutil.copy(text_file, tmp_path / "text.txt")
    elif kind == "conversations":
        path = chat_file(tmp_path)
    else:
        path = tmp_path / "pairs.tsv"
        path.write_text("".join(f"{n}\t{n} {n}\n" for n in range(40)))
    config = DataConfig(path=str(path))
    before = prepare(config, block_size=64)
    Path(path).unlink()
    after = prepare(config, block_size=64, known=before.fingerprint)
    assert after.fingerprint == before.fingerprint and after.val_bytes == before.val_bytes
    assert (after.val_characters, after.tokenizer_config) == (before.val_characters, before.tokenizer_config)
    known = before.fingerprint | {"train_sha256": "0" * 64}
    with pytest.raises(UserError, match="no file"):
        prepare(config, block_size=64, known=known)
    Path(path).write_text("another text\n" * 50)
    if kind == "text":  # what is there is what was meant
        assert prepare(config, block_size=64, known=before.fingerprint).fingerprint != before.fingerprint


def test_a_corpus_that_is_another_one_by_now_is_found_as_it_was(monkeypatch):
    """Python's own reference changes with its version."""
    monkeypatch.setattr(corpus, "_python_docs", lambda: "An old version. " * 99)
    before = prepare(DataConfig(), block_size=8).fingerprint
    monkeypatch.setattr(corpus, "_python_docs", lambda: "A new version. " * 99)
    assert prepare(DataConfig(), block_size=8, known=before).fingerprint == before
    assert prepare(DataConfig(), block_size=8).fingerprint != before
