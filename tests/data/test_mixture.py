"""Mixtures: row n is a function of n, in exact proportions, and each source is read as without the others."""

import dataclasses
import itertools
import json

import fsspec
import numpy as np
import pytest

from jaxgpt.cli.options import join_mixture
from jaxgpt.data.dataset import DataConfig, open_data
from jaxgpt.data.mixture import Mixture, assign_rows, read_mixture
from jaxgpt.data.pipeline import Tokens, training_batches, validation_batches
from jaxgpt.data.tokenizer import CharTokenizer
from jaxgpt.errors import UserError
from jaxgpt.tools.evaluate.evaluate import evaluate_run, format_evaluation
from jaxgpt.tools.replay import audit
from jaxgpt.training import fit
from tests.helpers import ids, logged, tiny_experiment

WEIGHTS = {"a": 0.55, "b": 0.3, "c": 0.15}


@pytest.fixture(scope="module")
def mixed():
    """Tokens of which source each is, and that count up: 1000, 2000 and 3000 numbers."""
    tokens = {"a": np.arange(100), "b": np.arange(1000, 1400), "c": np.arange(2000, 2050)}
    return Mixture({name: (weight, Tokens([tokens[name]])) for name, weight in WEIGHTS.items()})


def take(data, n, **kwargs):
    batches = training_batches(data, **dict(block_size=8, batch_size=4, seed=3) | kwargs)
    found = [batch.inputs_BT for batch in itertools.islice(batches, n)]
    batches.close()
    return found


@pytest.mark.parametrize(
    "weights", [[0.7, 0.3], [1.0], [0.9999, 0.0001], [1 / 3] * 3, [0.5, 0.3, 0.1, 0.07, 0.03], [0.0137] * 72 + [0.0136]]
)
def test_the_proportions_are_exact_to_rounding_over_any_stretch(weights):
    order, counts = assign_rows(weights)
    parts = np.array([part for part, _ in order])
    given = np.cumsum(parts[:, None] == np.arange(len(weights)), axis=0)
    share = np.arange(1, len(parts) + 1)[:, None] * np.array(counts) / len(parts)
    assert np.abs(given - share).max() < 1  # so that of a stretch between two rows it is less than 2
    np.testing.assert_allclose(np.array(counts) / len(parts), weights, atol=1e-4 * len(weights))
    assert all(earlier == given[n, part] - 1 for n, (part, earlier) in enumerate(order))


def test_the_rows_of_a_source_are_those_of_training_on_it_alone(mixed):
    """Thus without replacement in each of its epochs, whatever the others do."""
    rows = np.concatenate(take(mixed, 100))
    for number, (name, (weight, split)) in enumerate(mixed.parts.items()):
        own = rows[rows[:, 0] // 1000 == number]
        assert len(own) == pytest.approx(400 * weight, abs=1), name
        np.testing.assert_array_equal(own, np.concatenate(take(split, 100))[: len(own)])
    first = rows[rows[:, 0] < 1000][:11]  # an epoch of a: 100 tokens are 11 windows
    assert len(np.unique(first)) == 11 * 8


def test_a_batch_is_the_same_from_any_start_and_on_any_number_of_hosts(mixed):
    whole = take(mixed, 60)
    np.testing.assert_array_equal(take(mixed, 3, start_step=57), whole[57:])
    hosts = [take(mixed, 60, rows=rows) for rows in ([0, 1], [2, 3])]
    np.testing.assert_array_equal(np.concatenate(hosts, axis=1), whole)


def test_validation_reads_each_source_once(mixed):
    batches = list(validation_batches(mixed, block_size=8, batch_size=5))
    targets = np.concatenate([batch.targets_BT[batch.mask_BT] for batch in batches])
    np.testing.assert_array_equal(targets, [*range(1, 100), *range(1001, 1400), *range(2001, 2050)])


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("texts")
    (directory / "a.txt").write_text("In a village of La Mancha there lived a gentleman.\n" * 20)
    (directory / "b.txt").write_text("EN UN LUGAR DE LA MANCHA, de cuyo nombre no quiero acordarme.\n" * 30)
    return directory


def of_texts(directory):
    return f"{directory}/a.txt:0.7,{directory}/b.txt:0.3"


def experiment_of(path, **train):
    e = tiny_experiment(path, **train)
    return dataclasses.replace(e, model=dataclasses.replace(e.model, n_layer=1, dropout=0.2))


@pytest.fixture(scope="module")
def run(texts, tmp_path_factory):
    return fit(experiment_of(of_texts(texts)), tmp_path_factory.mktemp("runs") / "mixed", progress=False)


@pytest.mark.slow
def test_losses_of_sources_are_those_of_each_alone_and_their_mean_is_the_loss(run, texts):
    last = [line for line in logged(run.directory) if "val_loss" in line][-1]
    (a, b), found = last["val_losses"].values(), evaluate_run(run)
    assert last["val_loss"] == 0.7 * a + 0.3 * b == pytest.approx(found["loss"], rel=1e-5)
    assert list(found["losses"]) == [f"{texts}/a.txt", f"{texts}/b.txt"] == list(last["val_losses"])
    assert f"\n{texts}/b.txt: loss {b:.4f}" in format_evaluation(found)
    for name, expected in last["val_losses"].items():
        part = open_data(DataConfig(path=name, tokenizer=str(run.directory / "tokenizer.json")), block_size=8)
        held_out = run.tokenizer.decode(ids(part.val))
        (path := run.directory.parent / "held_out.txt").write_text(held_out)
        assert evaluate_run(run, path=str(path))["loss"] == pytest.approx(expected, rel=1e-5), name
    assert audit(run.directory, steps=3).findings == []
    with pytest.raises(UserError, match=r"other data: source 1: weight 0\.7 -> 0\.6, source 2: weight 0\.3 -> 0\.4"):
        fit(experiment_of(of_texts(texts).replace("0.7", "0.6").replace("0.3", "0.4")), run.directory)


def test_one_tokenizer_has_the_characters_of_all_texts_and_others_must_agree(texts, tmp_path):
    mixture = open_data(DataConfig(path=of_texts(texts)), block_size=8)
    assert set(mixture.tokenizer.characters) == {*(texts / "a.txt").read_text(), *(texts / "b.txt").read_text()}
    gone = open_data(DataConfig(path="gone/a.txt:0.7,gone/b.txt:0.3"), block_size=8, known=mixture.fingerprint)
    assert gone.fingerprint == mixture.fingerprint  # from the cache of tokens
    assert open_data(DataConfig(path=f"{texts}/a.txt:1"), block_size=8).fingerprint["train_tokens"] == 918
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "x.bin")
    path = f"{tmp_path}/x.bin:0.5,{texts}/a.txt:0.5"
    with pytest.raises(UserError, match="holds token ids, so tokenizer=char cannot be used"):
        open_data(DataConfig(path=path), block_size=8)
    (tmp_path / "tokenizer.json").write_text(CharTokenizer(map(chr, range(600))).to_json())
    with pytest.raises(UserError, match=r"x\.bin and .*a\.txt have different tokenizers, of 600 and 2\d tokens"):
        open_data(DataConfig(path=path), block_size=8)


def test_a_mixture_is_spelled_in_words_in_a_string_and_in_a_file(tmp_path):
    argv = ["--data.path", "a:0.7", "gs://b/c:0.3", "--train.seed", "1"]
    assert join_mixture(argv) == ["--data.path", "a:0.7,gs://b/c:0.3", "--train.seed", "1"]
    assert read_mixture("a:0.7,gs://b/c:0.3") == {"a": 0.7, "gs://b/c": 0.3}
    file = tmp_path / "my-mixture.json"
    file.write_text(json.dumps({"a": 0.7, "gs://b/c": 0.3}))
    assert read_mixture(str(file)) == {f"{tmp_path}/a": 0.7, "gs://b/c": 0.3}
    (tmp_path / "a:1,b").write_text("a file may have any name")
    for path in (None, "mancha.txt", "gs://bucket/tokens", "a,b", str(tmp_path / "a:1,b")):
        assert read_mixture(path) == {}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a:7,b:3", r"sum to 10, needed 1: such as a:0\.7,b:0\.3\Z"),
        ("a:0.7,b", "each source needs a weight"),
        ("a.jsonl:0.5,b:0.5", "a.jsonl cannot be in a mixture"),
        ("word-mixture.json", "the weight of a='much': needs a number"),
    ],
)
def test_what_cannot_be_mixed_is_told_in_one_line(texts, monkeypatch, path, said):
    monkeypatch.chdir(texts)
    (texts / "word-mixture.json").write_text('{"a": "much"}')
    with pytest.raises(UserError, match=rf"^[^\n]*{said}[^\n]*\Z"):
        open_data(DataConfig(path=path, tokenizer="byte"), block_size=8)
    with pytest.raises(UserError, match="tokenizer bpe is trained on one text"):
        open_data(DataConfig(path="a.txt:0.5,b.txt:0.5", tokenizer="bpe"), block_size=8)


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    for name, first in (("x_train_000000", 0), ("x_train_000001", 100), ("x_val_000000", 200)):
        fs.pipe(f"/tokens/{name}.bin", np.arange(first, first + 100, dtype=np.uint16).tobytes())
    monkeypatch.setattr(fsspec, "filesystem", lambda protocol: {"s3": fs}[protocol])
    yield fs
    fs.store.clear()


def test_shards_of_a_bucket_are_downloaded_once(bucket, monkeypatch):
    config = DataConfig(path="s3://tokens", tokenizer="ids")
    dataset = open_data(config, block_size=8, vocab_size=1000)
    assert isinstance(dataset.train.shards[0], np.memmap)
    assert ids(dataset.train) == list(range(200))
    mixed = dataclasses.replace(config, path="s3://tokens/x_train_000000.bin:0.5,s3://tokens:0.5")
    known = open_data(mixed, block_size=8, vocab_size=1000).fingerprint
    bucket.store.clear()  # the copies are taken from now on
    assert open_data(config, block_size=8, vocab_size=1000).fingerprint == dataset.fingerprint
    assert open_data(mixed, block_size=8, vocab_size=1000, known=known).fingerprint == known


def test_a_bucket_that_cannot_be_read_is_one_line_and_leaves_nothing(bucket, tmp_path, monkeypatch):
    def refused(said, path="s3://tokens"):
        with pytest.raises(UserError, match=rf"^[^\n]*{said}[^\n]*\Z"):
            open_data(DataConfig(path=path, tokenizer="ids"), block_size=8, vocab_size=1000)
        assert not [p for p in (tmp_path / "cache").rglob("*.*") if p.suffix != ".lock"]

    refused("cannot read s3://nowhere: /nowhere. Check the address", "s3://nowhere")
    for other in ("memory://tokens", "reference::s3://tokens", "s3://tokens::file:///x", "S3://tokens"):
        refused(r"is not in a bucket \(gs:// or s3://\): download it", other)
