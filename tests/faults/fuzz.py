"""Mutations of good files (flipped bits, cuts, splices, numbers and words swapped), and what reads those of strangers.

Each gives a value, or `UserError`; nothing else, and soon. tests/test_untrusted.py tries some on each commit.
"""

import contextlib
import dataclasses
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxgpt.config.serialize import from_dict
from jaxgpt.data.conversations import read_messages
from jaxgpt.data.shards import open_shard, scan
from jaxgpt.data.template import find_template
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import read_json
from jaxgpt.gguf.file import FAMILIES as GGUF_FAMILIES
from jaxgpt.gguf.file import read_config, read_gguf, write_fields, write_gguf
from jaxgpt.gguf.tokenizers import read_chat_template, read_ends, read_tokenizer, tokenizer_fields
from jaxgpt.hf.families import FAMILIES, get_family
from jaxgpt.hf.family import canonical_form
from jaxgpt.hf.weights import DTYPES, INDEX, hold, list_tensors, write
from jaxgpt.runs.directory import FORMAT, read_metadata
from jaxgpt.runs.resume import describe_data_changes
from tests.conftest import TEXT
from tests.helpers import tiny_experiment
from tests.hf.peers import BODY, LLAMA3, SHAPES

SWAPS = [
    *b'null true -1 0 0.5 1e999 NaN [] {} "" "\\ud800" "../../x" \\u0000 1152921504606846976'.split(),
    *(b"1" + b"0" * 400, b"9" * 5000, b"[" * 50_000, b'{"a":' * 50_000, b"\xff", b"\x00"),
]


def mutated(rng: random.Random, good: bytes, other: bytes) -> bytes:
    """One to four changes of a good file."""
    raw = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        at, to = (rng.randrange(len(raw) + 1) for _ in range(2))
        at, to = min(at, to), max(at, to)
        match rng.randrange(7):
            case 0 if raw:
                raw[at % len(raw)] ^= 1 << rng.randrange(8)
            case 1:
                del raw[at:]
            case 2:
                del raw[at : min(to, at + 64)]
            case 3:
                raw[at:at] = raw[at : min(to, at + 256)]
            case 4:
                start = rng.randrange(len(other) + 1)
                raw[at : at + 64] = other[start : start + 64]
            case 5:
                raw[at : at + rng.randrange(4)] = rng.choice(SWAPS)
            case _:  # where JSON has a value
                marks = [i for i, byte in enumerate(raw) if byte in b":,["]
                if marks:
                    mark = rng.choice(marks) + 1
                    end = next((i for i in range(mark, len(raw)) if raw[i] in b",]}"), len(raw))
                    raw[mark:end] = rng.choice(SWAPS)
    return bytes(raw)


def _read_shard(path: Path) -> None:
    scan(path, open_shard(path), 1000)


def _read_config(path: Path) -> None:
    config = from_dict(Experiment, read_json(path, 2**24))
    assert from_dict(Experiment, json.loads(json.dumps(dataclasses.asdict(config)))) == config


def _read_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    with contextlib.suppress(UserError):
        ids = tokenizer.encode("a lance, añejo 🐎 15 42\n")
        assert not len(ids) or (ids.min() >= 0 and ids.max() < tokenizer.vocab_size), "ids beyond the vocabulary"
        tokenizer.decode(ids)
    json.loads(tokenizer.to_json())


def _read_record(directory: Path) -> None:
    record = read_metadata(directory)
    assert record.model.vocab_size == record.vocab_size
    describe_data_changes(record.data, {"files": {"a.bin": {"tokens": 1}}, "train_tokens": 3})


def _read_model(path: Path) -> None:
    """What import makes of a config.json; every parameter of it has a row."""
    hf = read_json(path, 2**24)
    family = get_family(hf if isinstance(hf, dict) else {})
    config = family.read(hf)
    assert canonical_form(family.read(family.write(config))) == canonical_form(config)


def _read_tensors(path: Path) -> None:
    for tensor in list_tensors(path.parent).values():
        x = tensor.read()
        assert x.shape == tensor.shape and x.dtype == DTYPES[tensor.kind]


def _read_gguf(path: Path) -> None:
    """Read all that an import reads of a GGUF file."""
    fields, tensors = read_gguf(path)
    for tensor in tensors.values():
        assert tensor.read().shape == tensor.shape
    read_config(fields, tensors)
    read_tokenizer(fields)
    read_ends(fields)
    read_chat_template(fields)


def _read_messages(path: Path) -> None:
    for _, messages, _ in read_messages(path):
        assert messages


def _read_template(path: Path) -> None:
    template = find_template(train_bpe([TEXT], 270), path.parent)
    template.write([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def _write_gguf(path: Path) -> None:
    """A Llama 3 of an embedding alone."""
    hf = BODY | {"vocab_size": 260, "hidden_size": 16, "rope_parameters": LLAMA3}
    bpe = train_bpe([TEXT], 260)
    tokenizer = tokenizer_fields(bpe, 260, chat_template="{{ messages }}", ends=[bpe.end_of_text])
    fields = {
        f"llama.{key}": value for key, value in write_fields(GGUF_FAMILIES["llama"], FAMILIES["llama"].read(hf)).items()
    }
    tensors = {"rope_freqs.weight": fields.pop("llama.rope_freqs.weight")}
    tensors["token_embd.weight"] = hold(np.eye(260, 16, dtype=np.float32))
    write_gguf(path, {"general.architecture": "llama"} | tokenizer | fields, tensors)


Target = tuple[Callable[[Path], None], Path, list[bytes]]


def targets(directory: Path) -> dict[str, Target]:
    """By name: what reads, the path it reads, and good files to begin with."""
    run, tensors, index, template = (directory / name for name in ("run", "tensors", "index", "template"))
    for folder in (run, tensors, index, template):
        folder.mkdir(exist_ok=True)

    def target(read: Callable[[Path], None], path: Path, *good: bytes) -> Target:
        return read, path, [*good] or [path.read_bytes()]

    def encoded(*values: object) -> list[bytes]:
        return [json.dumps(value).encode() for value in values]

    # What we write.
    begun = _record()
    begun["experiment"]["train"]["init_from"] = "runs/a"
    begun["experiment"]["lora"]["rank"] = 2
    begun["origin"] = {"directory": "runs/a", "step": 3, "sha256": "0", "model": begun["experiment"]["model"]}
    whole = {**_record(), "data": {"files": {"a.bin": {"tokens": 9, "sha256": "0" * 64}}}}
    own = [t.to_json().encode() for t in (CharTokenizer("ab\nñ🐎"), ByteTokenizer())]
    header, tokens = np.zeros(256, np.int32), np.arange(300, dtype=np.uint16).tobytes()
    header[:3] = 20240520, 1, 300
    # What comes with a model in Hugging Face's format, and what is asked of one.
    made = {f"h.{i}.w": hold(np.full((3, 4), i, np.float32)) for i in range(4)}
    write(tensors, made)
    write(index, made, shard=100)
    _write_gguf(directory / "m.gguf")
    chat = [{"role": "user", "content": "a 🐎"}, {"role": "assistant", "content": "b"}] * 2
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    configs = [{"model_type": kind} | options for kind, options in SHAPES.values()]
    return {
        "experiment.json": target(lambda _: _read_record(run), run / "experiment.json", *encoded(whole, begun)),
        "configuration": target(_read_config, directory / "config.json", *encoded(_record()["experiment"])),
        "tokenizer.json, ours": target(_read_tokenizer, directory / "own.json", *own),
        "tokenizer.json, BPE": target(
            _read_tokenizer, directory / "bpe.json", train_bpe([TEXT], 280).to_json().encode()
        ),
        ".bin": target(_read_shard, directory / "x.bin", header.tobytes() + tokens, tokens),
        "a model's config.json": target(_read_model, directory / "model.json", *encoded(*configs)),
        "safetensors": target(_read_tensors, tensors / "model.safetensors"),
        "safetensors index": target(_read_tensors, index / INDEX),
        "conversations": target(_read_messages, directory / "c.jsonl", *encoded({"messages": chat})),
        "GGUF": target(_read_gguf, directory / "m.gguf"),
        "tokenizer_config.json": target(
            _read_template, template / "tokenizer_config.json", *encoded({"chat_template": turns, "bos_token": "<s>"})
        ),
    }


def _record() -> dict:
    return {
        "format": FORMAT,
        "experiment": dataclasses.asdict(tiny_experiment(Path("t.txt"))),
        "vocab_size": 30,
        "data": {},
    }


def attempt(name: str, target: tuple, raw: bytes) -> bool:
    """Whether the file was accepted; raises what is neither a value nor a `UserError`."""
    read, path, _ = target
    path.write_bytes(raw)
    try:
        read(path)
    except UserError as e:
        assert str(e), f"{name}: an error without words"
        return False
    except BaseException:
        kept = Path(tempfile.mkdtemp(prefix="fuzz-")) / path.name
        kept.write_bytes(raw)
        print(f"{name}: {kept} is the culprit", flush=True)
        raise
    return True


def one(rng: random.Random, good: list[bytes]) -> bytes:
    return mutated(rng, rng.choice(good), rng.choice(good))
