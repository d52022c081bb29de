"""The directory in which the table of bad inputs runs: bad texts, token files, tokenizers, experiments and runs."""

import json
import os
import shutil
from pathlib import Path

import numpy as np

from tests.bad_models import prepare_models
from tests.conftest import TEXT

DEEP = "[" * 100_000
HUGE = 2**60


def prepare_place(place: Path, run: Path) -> None:
    """run: a trained one, of which the damaged are made."""
    shutil.copytree(run, place / "runs/tiny", symlinks=True)
    (place / "t.txt").write_text(TEXT)
    (place / "m.gguf").write_text(TEXT)
    _texts(place)
    _shards(place)
    _tokenizers(place)
    _chats(place)
    _experiments(place)
    _runs(place)
    prepare_models(place)
    (place / "empty").mkdir()
    (place / "with a file").mkdir()
    (place / "with a file/notes.md").write_text("not a run")
    os.mkfifo(place / "pipe")
    (place / "loop").symlink_to("loop")


def _texts(place: Path) -> None:
    for name, raw in {
        "latin1.txt": "año de la lanza ".encode("latin-1") * 50,
        "utf16.txt": TEXT.encode("utf-16"),
        "short.txt": b"too short",
        "medium.txt": b"long enough to train on, " * 20,
    }.items():
        (place / name).write_bytes(raw)


def _shards(place: Path) -> None:
    tokens = np.arange(500, dtype=np.uint16)
    for name, raw in {
        "odd.bin": tokens.tobytes()[:-1],
        "large.bin": np.full(500, 1000, np.uint16).tobytes(),
    }.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(raw)


def _llmc(tokens: np.ndarray) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    return header.tobytes() + tokens.tobytes()


def _tokenizers(place: Path) -> None:
    for name, text in {
        "deep": DEEP,
        "few": '{"jaxgpt": "char", "characters": "abcdefgh"}',
    }.items():
        (place / f"tokenizer_{name}.json").write_text(text)


def _chats(place: Path) -> None:
    def line(*messages: tuple) -> str:
        return json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]}) + "\n"

    good = line(("user", "a"), ("assistant", "b"))
    for name, text in {
        "good": good * 3,
        "half": good + good[:20],
        "role": good + good + line(("robot", "a"), ("assistant", "b")),
        "end": good + line(("user", "a\x03"), ("assistant", "b")),
    }.items():
        (place / f"{name}.jsonl").write_text(text)
    for name, config in {
        "syntax": {"chat_template": "{% for %}"},
        "escapes": {"chat_template": "{{ messages.__class__.__base__.__subclasses__() }}"},
    }.items():
        directory = place / f"template_{name}"
        directory.mkdir()
        (directory / "tokenizer.json").write_text('{"jaxgpt": "byte"}')
        (directory / "tokenizer_config.json").write_text(json.dumps(config))


GOOD = "from jaxgpt import *\nexperiment = Experiment(name='x')\n"


def _experiments(place: Path) -> None:
    for name, source in {
        "syntax": "experiment = (\n",
        "raises": "x = 1\nraise RuntimeError('no luck')\n",
        "other": "from jaxgpt import *\nmine = Experiment(name='x')\n",
        "variants_data": GOOD
        + "variants = {'a': experiment, 'b': Experiment(name='x', data=DataConfig(tokenizer='byte'))}\n",
    }.items():
        (place / f"{name}.py").write_text(source)


def _runs(place: Path) -> None:
    good = place / "runs/tiny"
    record = json.loads((good / "experiment.json").read_text())
    changed = json.dumps(record | {"vocab_size": record["vocab_size"] + 1})
    del record["sha256"]  # what is not told by it has to be told without
    e = record["experiment"]

    def with_model(**fields) -> str:
        return json.dumps(record | {"experiment": e | {"model": e["model"] | fields}})

    damaged = {
        "half": json.dumps(record)[:200],
        "changed": changed,
        "deep": DEEP,
        "width": with_model(n_embd=HUGE),
        "unknown": with_model(n_layers=3),
    }
    for name, text in damaged.items():
        directory = place / "broken" / name
        directory.mkdir(parents=True)
        (directory / "experiment.json").write_text(text)
        shutil.copy(good / "tokenizer.json", directory)
    (place / "runs/moved").mkdir()
    (place / "runs/moved/experiment.json").write_text(json.dumps(record).replace('"t.txt"', '"gone.txt"'))
    shutil.copy(good / "tokenizer.json", place / "runs/moved")
    shutil.copytree(good / "checkpoints", place / "runs/moved/checkpoints")
    shutil.copytree(good, place / "broken/damaged_checkpoints")
    for manifest in (place / "broken/damaged_checkpoints").rglob("manifest.json"):
        manifest.write_bytes(bytes(manifest.stat().st_size))
    for name in ("no_checkpoint", "no_tokenizer", "pipe", "large", "other_tokenizer"):
        directory = place / "broken" / name
        directory.mkdir()
        shutil.copy(good / "experiment.json", directory)
        if name != "no_tokenizer":
            shutil.copy(good / "tokenizer.json", directory)
    (place / "broken/other_tokenizer/tokenizer.json").write_text('{"jaxgpt": "byte"}')
    (place / "broken/pipe/experiment.json").unlink()
    os.mkfifo(place / "broken/pipe/experiment.json")
    with (place / "broken/large/experiment.json").open("r+b") as f:
        f.truncate(2**25)  # a sparse file
