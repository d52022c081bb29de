import contextlib
import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from pydoc_data import topics

import jax
import numpy as np
import pytest

from jaxgpt.data import conversations, corpus, dataset
from jaxgpt.data.dataset import DataConfig, encode_whole, open_data
from jaxgpt.data.shards import read_index
from jaxgpt.data.tokenizer import ByteTokenizer, train_bpe
from jaxgpt.errors import UserError
from tests.conftest import TEXT
from tests.helpers import chat_file, ids, sentencepiece

CONVERSATION = '{"messages": [{"role": "user", "content": "La"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_the_splits_are_the_text_in_order_and_made_once(text_file, tmp_path, monkeypatch, tokenizer):
    """Wherever the text lies, and however much of it is read at a time."""
    config = DataConfig(path=str(text_file), tokenizer=tokenizer, bpe_vocab_size=300)
    d = open_data(config, block_size=8)
    cut = int(len(TEXT) * 0.9)
    assert d.tokenizer.decode(ids(d.train)) == TEXT[:cut]
    assert d.tokenizer.decode(ids(d.val)) == TEXT[cut:]
    assert d.val_characters == len(TEXT) - cut and d.val_bytes == len(TEXT[cut:].encode())
    assert d.fingerprint["train_tokens"] == len(d.train)
    copy = Path(shutil.copy(text_file, tmp_path / "elsewhere.txt"))
    with monkeypatch.context() as m:
        m.setattr(dataset, "write_entry", None)  # would be called
        again = open_data(dataclasses.replace(config, path=str(copy)), block_size=8)
    assert again.fingerprint == d.fingerprint and ids(again.train) == ids(d.train)
    monkeypatch.setattr(corpus, "CHUNK", 97)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    assert tokenizer == "bpe" or open_data(config, block_size=8).fingerprint == d.fingerprint
    copy.write_text(TEXT.replace("lance", "sword"))
    other = open_data(dataclasses.replace(config, path=str(copy)), block_size=8).fingerprint
    assert other["train_sha256"] != d.fingerprint["train_sha256"]


def test_the_split_of_shakespeare_is_nanogpts(real_text):
    d = open_data(DataConfig(path=str(real_text / "shakespeare.txt")), block_size=64)
    assert (len(d.train), len(d.val), d.tokenizer.vocab_size) == (1_003_854, 111_540, 65)


def test_the_last_part_of_each_file_is_held_out(tmp_path):
    """Not that of the folder, which is all from its last file."""
    a, b = (f"document {name} " * 30 for name in "ab")
    (tmp_path / "a.txt").write_text(a)
    (tmp_path / "b.txt").write_text(b)
    config = DataConfig(path=str(tmp_path), val_fraction=0.4)
    d = open_data(config, block_size=8)
    assert d.tokenizer.decode(ids(d.train)) == f"{a[:198]}\n{b[:198]}"
    assert d.tokenizer.decode(ids(d.val)) == f"{a[198:]}\n{b[198:]}" and d.val_characters == 265
    by_bpe = open_data(dataclasses.replace(config, tokenizer="bpe", bpe_vocab_size=270), block_size=8)
    assert [ids(split).count(by_bpe.tokenizer.end_of_text) for split in (by_bpe.train, by_bpe.val)] == [1, 1]


@pytest.mark.parametrize(
    ("name", "tokenizer", "times"),
    [("t.txt", "char", 1), ("t.txt", "bpe", 1), ("t.txt", "bpe", 2), ("t.jsonl", "byte", 1)],
)
def test_what_changes_between_readings_is_refused_and_not_cached(tmp_path, monkeypatch, name, tokenizer, times):
    path, text = tmp_path / name, TEXT if name == "t.txt" else CONVERSATION * 20
    path.write_text(text)
    config = DataConfig(path=str(path), tokenizer=tokenizer, bpe_vocab_size=270)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    readings = itertools.count(1)

    def change(read):
        def changed(*args):
            yield from read(*args)
            if next(readings) == times:
                path.write_text(text.replace("La", "Le"))

        return changed

    with monkeypatch.context() as m:
        m.setattr(dataset, "read_text", change(dataset.read_text))
        m.setattr(conversations, "read_messages", change(conversations.read_messages))
        with pytest.raises(UserError, match=rf"{name} changed while it was read"):
            open_data(config, block_size=32)
    assert not list((tmp_path / "cache").glob("*/*"))
    path.write_text(text)
    d = open_data(config, block_size=32)
    assert name != "t.txt" or d.tokenizer.decode(ids(d.train) + ids(d.val)) == TEXT


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, UserError, None])
def test_tokens_are_written_whole_or_not_at_all(tmp_path, kind, monkeypatch):
    """What ends the writing is raised, and nothing stays; the first of two processes wins, with the same tokens."""
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    whole = {name: np.arange(size, dtype=np.uint16) for name, size in (("train", 5), ("val", 6))}

    def batches():
        yield {"train": whole["train"]}
        if kind is not None:
            raise kind
        dataset.write_entry({}, ByteTokenizer(), [whole], {})
        yield {"val": whole["val"]}

    with pytest.raises(kind) if kind is not None else contextlib.nullcontext():
        dataset.write_entry({}, ByteTokenizer(), batches(), {})
    found = list((tmp_path / "tokens").iterdir())
    assert len(found) == (kind is None)
    if kind is None:
        assert ids(dataset.read_entry(found[0])[0]["val"]) == [*range(6)]
        (found[0] / "val_000000.bin").write_bytes(b"abcd")
        assert dataset.read_entry(found[0]) is None


@pytest.mark.parametrize(("kind", "end"), [("Llama 2", "</s>"), ("Mistral", None), ("T5", "</s>")])
def test_a_text_has_the_ids_of_the_whole_however_it_is_read(kind, end, tmp_path, monkeypatch):
    """Such a tokenizer puts a space before a text, but not before the pieces that a long text is read in."""
    first = f"{TEXT}\n\n  two  spaces\n{TEXT}no newline at the end"
    tokenizer = sentencepiece(kind, TEXT.splitlines(keepends=True), end)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "texts").mkdir()
    for name, text in (("a", first), ("b", TEXT)):
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    monkeypatch.setattr("jaxgpt.data.tokenizer.CONTEXT", 300)
    one = DataConfig(path=str(tmp_path / "texts/a.txt"), tokenizer=str(tmp_path / "tokenizer.json"))
    both = dataclasses.replace(one, path=str(tmp_path / "texts"))
    between = [tokenizer.end_of_text] if end else None
    for size in (97, 2**23):
        monkeypatch.setattr(corpus, "CHUNK", size)
        monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / str(size)))
        d, cut = open_data(one, block_size=8), int(len(first) * 0.9)
        assert [ids(d.train), ids(d.val)] == [tokenizer.encode(part).tolist() for part in (first[:cut], first[cut:])]
        parts = [text[: int(len(text) * 0.9)] for text in (first, TEXT)]
        encoded = [tokenizer.encode(part).tolist() for part in (parts if end else ["\n".join(parts)])]
        d = open_data(both, block_size=8)
        assert ids(d.train) == (encoded[0] + between + encoded[1] if between else encoded[0])


def test_a_text_to_evaluate_has_an_end_of_text_between_two_files(tmp_path):
    """Or a newline, where the tokenizer has none, as for training."""
    documents = [f"document {name}\n" * 9 for name in "abc"]
    for name, document in zip("abc", documents, strict=True):
        (tmp_path / f"{name}.txt").write_text(document)
    files, bpe = corpus.find_user_files(str(tmp_path)), train_bpe(documents, 270)
    found, text = encode_whole(files, bpe)
    encoded = [*itertools.chain(*([*bpe.encode(x).tolist(), bpe.end_of_text] for x in documents))]
    assert found.tolist() == encoded[:-1] and text == "\n".join(documents)
    assert encode_whole(files, ByteTokenizer())[0].tolist() == list(text.encode())


def write_as_before(directory):
    """Turn an entry of the cache into one of version 0.2.0."""
    index = read_index(directory)
    for shard in index["shards"]:
        file = directory / shard["file"]
        (directory / f"{shard['file'][:-11]}.bin").write_bytes(file.read_bytes()[1024:])
        file.unlink()
    (directory / "index.json").unlink()
    meta = {"fingerprint": index["fingerprint"], "about": index["about"]}
    (directory / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(("kind", "is_earlier"), [("text", True), ("conversations", False)])
def test_what_is_known_is_found_in_the_cache_without_its_text(kind, is_earlier, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    path = shutil.copy(text_file, tmp_path / "text.txt") if kind == "text" else chat_file(tmp_path)
    config = DataConfig(path=str(path))
    before = open_data(config, block_size=64)
    if is_earlier:
        (directory,) = (tmp_path / "cache/tokens").iterdir()
        write_as_before(directory)
    Path(path).unlink()
    after = open_data(config, block_size=64, known=before.fingerprint)
    rows = [d.train.training_rows(block_size=64, seed=0)(3) for d in (before, after)]
    jax.tree.map(np.testing.assert_array_equal, *rows)
    assert after.fingerprint == before.fingerprint and after.val_bytes == before.val_bytes
    assert (after.val_characters, after.tokenizer_config) == (before.val_characters, before.tokenizer_config)
    known = before.fingerprint | {"train_sha256": "0" * 64}
    with pytest.raises(UserError, match="no file"):
        open_data(config, block_size=64, known=known)
    Path(path).write_text("another text\n" * 50)
    if kind == "text":  # what is there is what was meant
        assert open_data(config, block_size=64, known=before.fingerprint).fingerprint != before.fingerprint


@pytest.mark.parametrize(
    ("kind", "name", "harm"),
    [
        ("text", "train_000000.bin", "flip"),
        ("text", "tokenizer.json", "delete"),
        ("text", "index.json", "flip"),
        ("chat", "train_answers_000000.bin", "flip"),
    ],
)
def test_what_is_damaged_in_the_cache_is_made_again_or_told(kind, name, harm, tmp_path, monkeypatch, caplog):
    """Whichever byte it is. Without the text the tokens are not found, and stay where they are."""
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    path = chat_file(tmp_path) if kind == "chat" else tmp_path / "t.txt"
    if kind == "text":
        path.write_text("añejo, lance\n" * 90)
    config = DataConfig(path=str(path), tokenizer="byte")
    before = open_data(config, block_size=64)
    (file,) = (tmp_path / "cache").glob(f"tokens/*/{name}")
    raw = file.read_bytes()
    at = len(raw) // 2 if name.endswith("json") else len(raw) - 3  # of a shard's header only a part is used
    harmed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    file.unlink()
    if harm != "delete":
        file.write_bytes(harmed)
    Path(path).rename(tmp_path / "away")
    with pytest.raises(UserError, match="no file"):
        open_data(config, block_size=64, known=before.fingerprint)
    assert harm == "delete" or file.read_bytes() == harmed
    (tmp_path / "away").rename(path)
    after = open_data(config, block_size=64)
    assert "are damaged: encoding the text again" in caplog.messages[-1] and file.read_bytes() == raw
    assert (after.fingerprint, after.val_bytes) == (before.fingerprint, before.val_bytes)


def test_a_python_that_lacks_paragraphs_says_so_and_its_corpus_is_found_as_it_was(monkeypatch, caplog):
    with monkeypatch.context() as other:
        other.setattr(topics, "topics", {"if": topics.topics["if"]})
        before = open_data(DataConfig(), block_size=8).fingerprint
    assert "lacks 1394 of 1397 paragraphs" in caplog.text
    assert open_data(DataConfig(), block_size=8, known=before).fingerprint == before
    now = open_data(DataConfig(), block_size=8).fingerprint
    assert now != before
    (file,) = corpus.find_corpus_files("python-docs")
    file.write_text("damaged")
    assert open_data(DataConfig(), block_size=8).fingerprint == now
