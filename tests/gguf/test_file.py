"""Files that are damaged or lie are refused in one line, and what is written is whole or not there."""

import dataclasses
import struct
import tracemalloc

import numpy as np
import pytest

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.gguf.families import QWEN2, write_fields
from jaxgpt.gguf.file import read_gguf, write_gguf
from jaxgpt.gguf.model import open_gguf
from jaxgpt.hf.safetensors_files import LazyTensor

pytest.importorskip("gguf", reason="without the gguf package")

CONFIG = GPTConfig(
    vocab_size=32,
    block_size=16,
    n_layer=1,
    n_head=2,
    n_embd=32,
    mlp_dim=32,
    norm="rmsnorm",
    activation="swiglu",
    position="rope",
    bias=False,
)


def lazy(x):
    return LazyTensor(shape=x.shape, dtype=x.dtype, make=lambda: x)


@pytest.fixture(scope="module")
def parts():
    """(fields, tensors) of a Qwen2."""
    fields = {f"qwen2.{key}": value for key, value in write_fields(QWEN2, CONFIG).items()}
    fields |= {"general.architecture": "qwen2", "tokenizer.ggml.model": "none"}
    square = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(32, 32)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {"token_embd.weight": square} | {f"blk.0.{name}.weight": square for name in names}
    tensors |= dict.fromkeys(("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"), square[0])
    return fields, {name: lazy(x) for name, x in tensors.items()}


@pytest.fixture
def write(parts, tmp_path):
    """Write the file with other fields and tensors, without those that are None; return its path."""

    def write(fields=(), tensors=(), dtype=None):
        changed = [
            {k: v for k, v in (a | dict(b)).items() if v is not None}
            for a, b in zip(parts, (fields, tensors), strict=True)
        ]
        write_gguf(tmp_path / "m.gguf", *changed, dtype)
        return tmp_path / "m.gguf"

    return write


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(*parts, version=3, tensors=0, fields=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + b"".join(parts)


U32, STRING, ARRAY = (struct.pack("<I", kind) for kind in (4, 8, 9))
LONG = struct.pack("<Q", 2**62)
TENSOR = text(b"a") + struct.pack("<IQ", 1, 32)
DAMAGED = {
    "nothing": (b"", "is damaged: it ends within its header"),
    "another format": (b"<html>not found</html>", "is not a GGUF file"),
    "version 1": (header(version=1), "has version 1 of GGUF: needs 2 or 3, little-endian"),
    "other byte order": (header(version=3 << 24), "needs 2 or 3, little-endian"),
    "many fields": (header(fields=2**60), "ends within its header"),
    "many tensors": (header(tensors=2**60), "ends within its header"),
    "long text": (header(LONG, fields=1), "ends within its header"),
    "long array": (header(text(b"a"), ARRAY, U32, LONG, fields=1), "ends within its header"),
    "long array of texts": (header(text(b"a"), ARRAY, STRING, LONG, fields=1), "ends within its header"),
    "array of arrays": (header(text(b"a"), ARRAY, ARRAY, LONG, fields=1), "an array of the unknown type 9"),
    "unknown type": (header(text(b"a"), b"\xff\0\0\0", fields=1), "a field of the unknown type 255"),
    "not UTF-8": (header(text(b"\xff"), fields=1), "a text that is not UTF-8"),
    "field twice": (header((text(b"a") + U32 + b"\0\0\0\0") * 2, fields=2), "has 'a' twice"),
    "alignment": (header(text(b"general.alignment"), U32, b"\x03\0\0\0", fields=1), "general.alignment=3"),
    "dimensions": (header(text(b"a"), b"\xff" * 4, tensors=1), "with 4294967295 dimensions"),
    "Q4_K": (header(TENSOR, struct.pack("<IQ", 12, 0), tensors=1), "a is Q4_K, needs one of F32, F16, BF16, Q8_0"),
    "unknown dtype": (header(TENSOR, struct.pack("<IQ", 9999, 0), tensors=1), "a is of the unknown type 9999"),
    "no elements": (header(TENSOR, struct.pack("<IQ", 0, 0), tensors=1), "ends before the end of a"),
    "far away": (header(TENSOR, struct.pack("<IQ", 0, 2**63), tensors=1), "ends before the end of a"),
    "enormous": (header(text(b"a"), struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0), tensors=1), "before the end of a"),
}


def test_damaged_headers_are_refused_in_a_line_and_little_memory(tmp_path):
    path = tmp_path / "m.gguf"
    for raw, said in DAMAGED.values():
        path.write_bytes(raw)
        tracemalloc.start()
        with pytest.raises(UserError) as e:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert said in str(e.value) and "\n" not in str(e.value)
        assert peak < 2**20


def test_every_cut_is_noticed(write):
    path = write()
    raw = path.read_bytes()
    assert len(read_gguf(path)[1]) == 11
    for size in [*range(0, 700, 7), len(raw) // 2, len(raw) - 1]:
        path.write_bytes(raw[:size])
        with pytest.raises(UserError):
            read_gguf(path)


SQUARE = np.ones((32, 32), np.float32)


@pytest.mark.parametrize(
    ("fields", "tensors", "said"),
    [
        ({"general.architecture": "bert"}, {}, "general.architecture='bert' is unknown: needs one of gpt2, llama"),
        ({"split.count": 2}, {}, "is a part of a model in several files: join them with llama-gguf-split --merge"),
        ({"qwen2.embedding_length": None}, {}, "it has no embedding_length"),
        ({"qwen2.context_length": None}, {}, "it has no context_length"),
        ({"qwen2.block_count": 512}, {}, "block_count=512, but there are 11 tensors"),
        ({"qwen2.block_count": "1"}, {}, "block_count='1': needs a whole number"),
        ({"qwen2.attention.head_count": 0}, {}, "attention.head_count=0: needs at least 1"),
        ({"qwen2.attention.head_count": 33}, {}, "attention.key_length=0: needs at least 1"),
        ({"qwen2.feed_forward_length": [32]}, {}, "mlp_dim=[32]: needs a whole number"),
        ({"qwen2.rope.dimension_count": 8}, {}, "rope.dimension_count=8: needs the head size, 16"),
        ({"qwen2.rope.scaling.type": "yarn"}, {}, "rope.scaling.type='yarn': only linear and none are supported"),
        ({"qwen2.expert_count": 8}, {}, "expert_count=8: only 0 is supported"),
        ({"qwen2.attention.causal": False}, {}, "attention.causal=False: only True is supported"),
        ({"tokenizer.ggml.model": "bert"}, {}, "tokenizer.ggml.tokens is missing"),
        ({}, {"token_embd.weight": SQUARE[0]}, "it has no token_embd.weight with two axes"),
        ({}, {"blk.0.ffn_up.weight": None}, "missing blk.0.ffn_up.weight"),
        ({}, {"blk.0.ffn_up.weight": SQUARE[:8]}, "blk.0.ffn_up.weight is [8, 32], the configuration implies [32, 32]"),
        ({}, {"blk.0.ffn_gate_inp.weight": SQUARE}, "unknown blk.0.ffn_gate_inp.weight"),
        ({}, {"rope_freqs.weight": SQUARE[0]}, "unknown rope_freqs.weight"),
    ],
)
def test_files_that_lie_are_refused(write, fields, tensors, said):
    path = write(fields, {name: None if x is None else lazy(x) for name, x in tensors.items()})
    with pytest.raises(UserError) as e:
        open_gguf(path)
    assert said in str(e.value) and str(path) in str(e.value) and "\n" not in str(e.value)


def test_a_file_is_written_whole_or_not_at_all(parts, write, tmp_path):
    fields, tensors = parts

    def fail():
        raise KeyboardInterrupt

    broken = tensors | {"blk.0.ffn_up.weight": dataclasses.replace(lazy(SQUARE), make=fail)}
    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "m.gguf", fields, broken)
    with pytest.raises(UserError, match=r"ffn_up.weight has values beyond those of float16: take dtype bfloat16"):
        write((), {"blk.0.ffn_up.weight": lazy(SQUARE * 70_000)}, "float16")
    assert list(tmp_path.iterdir()) == []
