"""Files that are damaged or lie are refused in one line, and what is written is whole or not there."""

import struct
import tracemalloc

import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.gguf.file import ORIGINAL, open_gguf, read_gguf, write_gguf
from jaxgpt.hf.weights import hold
from tests.gguf.test_families import close, model_parts

gguf = pytest.importorskip("gguf", reason="without the gguf package")


@pytest.fixture(scope="module")
def parts():
    """(fields, tensors) of a Qwen2 of width 24 with two layers."""
    fields, tensors = model_parts("qwen2")
    return fields | {"tokenizer.ggml.model": "none"}, tensors


@pytest.fixture
def write(parts, tmp_path):
    """Write the file with other fields and tensors, without those that are None; return its path."""

    def write(*changes, dtype=None):
        changed = [{k: v for k, v in (a | b).items() if v is not None} for a, b in zip(parts, changes, strict=True)]
        write_gguf(tmp_path / "m.gguf", *changed, dtype)
        return tmp_path / "m.gguf"

    return write


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(*parts, version=3, tensors=0, fields=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + b"".join(parts)


STRING, ARRAY = (struct.pack("<I", kind) for kind in (8, 9))
LONG = struct.pack("<Q", 2**62)
TENSOR = text(b"a") + struct.pack("<IQ", 1, 32)
DAMAGED = [
    (b"", "is not a GGUF file"),
    (b"GGUF\x03\0", "is damaged within its header"),
    (header(version=1), "has version 1 of GGUF: jaxgpt reads 3, little-endian"),
    (header(tensors=2**60), "is damaged within its header"),
    (header(text(b"a"), ARRAY, STRING, LONG, fields=1), "is damaged within its header"),
    (header(text(b"\xff"), fields=1), "is damaged within its header"),  # not UTF-8
    (header(text(b"a"), b"\xff" * 4, tensors=1), "is damaged within its header"),  # 4294967295 dimensions
    (
        header(TENSOR, struct.pack("<IQ", 12, 0), tensors=1),
        "a rows of [32] elements, which are no blocks of 256 of Q4_K",
    ),
    (header(TENSOR, struct.pack("<IQ", 99, 0), tensors=1), "a has dtype 99 of ggml, which the gguf package does not"),
    (header(TENSOR, struct.pack("<IQ", 0, 2**63), tensors=1), "ends before the end of a"),
]


def test_damaged_headers_are_refused_in_a_line_and_little_memory(tmp_path):
    path = tmp_path / "m.gguf"
    for raw, said in DAMAGED:
        path.write_bytes(raw)
        tracemalloc.start()
        with pytest.raises(UserError) as e:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert said in str(e.value) and "\n" not in str(e.value)
        assert peak < 2**20


def test_every_cut_is_noticed(write):
    path = write({}, {})
    raw = path.read_bytes()
    assert len(read_gguf(path)[1]) == 26
    for size in [*range(0, 700, 7), len(raw) // 2, len(raw) - 1]:
        path.write_bytes(raw[:size])
        with pytest.raises(UserError):
            read_gguf(path)


SQUARE = np.ones((32, 32), np.float32)


def test_files_that_lie_are_refused(write):
    for fields, tensors, said in (
        ({"general.architecture": "bert"}, {}, "general.architecture='bert' is unknown: jaxgpt reads gpt2, llama"),
        ({"qwen2.rope.scaling.type": "yarn"}, {}, "rope.scaling.type='yarn': only none and linear"),
        ({"qwen2.expert_count": 8}, {}, "expert_count=8: only 0 is supported"),
        ({"qwen2.block_count": 512}, {}, "block_count=512, but there are 26 tensors"),
        ({"qwen2.feed_forward_length": [32]}, {}, "mlp_dim=[32]: needs a whole number"),
        ({}, {"blk.0.ffn_up.weight": None}, "missing blk.0.ffn_up.weight"),
        ({}, {"blk.0.ffn_up.weight": SQUARE[:8]}, "ffn_up.weight is [8, 32], the configuration implies [40, 24]"),
        ({}, {"blk.0.ffn_gate_inp.weight": SQUARE}, "unknown blk.0.ffn_gate_inp.weight"),
        ({f"qwen2.{ORIGINAL}": 8}, {"rope_factors_long.weight": SQUARE[0]}, "rope_long_factors: need 3 numbers each"),
    ):
        path = write(fields, {name: None if x is None else hold(x) for name, x in tensors.items()})
        with pytest.raises(UserError) as e:
            open_gguf(path)
        assert said in str(e.value) and str(path) in str(e.value) and "\n" not in str(e.value)


def test_a_file_is_written_whole_or_not_at_all(parts, write, tmp_path):
    fields, tensors = parts

    def fail():
        raise KeyboardInterrupt

    broken = tensors | {"blk.0.ffn_up.weight": hold(SQUARE)._replace(read=fail)}
    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "m.gguf", fields, broken)
    with pytest.raises(UserError, match=r"ffn_up.weight has values beyond those of float16: take dtype bfloat16"):
        write({}, {"blk.0.ffn_up.weight": hold(SQUARE * 70_000)}, dtype="float16")
    assert list(tmp_path.iterdir()) == []


READ = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 MXFP4".split()


def test_every_quantisation_is_read_as_the_gguf_package_reads_it(tmp_path):
    """Rows of 256 elements of random blocks, each of which is some number."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    blocks = {}
    for kind in map(gguf.GGMLQuantizationType.__getitem__, READ):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks[kind] = np.random.default_rng(0).integers(0, 256, (3, 256 // block * size), np.uint8)
        writer.add_tensor(kind.name, blocks[kind], raw_dtype=kind)
    close(writer)
    tensors = read_gguf(tmp_path / "m.gguf")[1]
    for kind, raw in blocks.items():
        found = tensors[kind.name]
        assert (found.shape, found.kind) == ((3, 256), "F32")
        np.testing.assert_array_equal(found.read(), gguf.quants.dequantize(raw, kind), err_msg=kind.name)


def test_a_file_in_parts_is_read_whole(parts, tmp_path):
    """By the name of any part, as gguf-split of llama.cpp writes them; a part that is missing or cut is named."""
    fields, tensors = parts
    names, paths = list(tensors), [tmp_path / f"m-{n:05}-of-00002.gguf" for n in (1, 2)]
    write_gguf(paths[0], fields | {"split.tensors.count": len(names)}, {n: tensors[n] for n in names[:9]})
    rest = {n: tensors[n] for n in names[9:]}
    write_gguf(paths[1], {"general.architecture": "qwen2"}, rest, dtype="float32")
    for path in paths:
        found, read = read_gguf(path)
        assert read.keys() == tensors.keys() and found["qwen2.block_count"] == 2
    np.testing.assert_array_equal(read[names[-1]].read(), tensors[names[-1]].read())
    write_gguf(paths[1], {"general.architecture": "qwen2"}, dict([*rest.items()][1:]), dtype="float32")
    with pytest.raises(UserError, match=f"have {len(names) - 1} tensors, the first says {len(names)}"):
        read_gguf(paths[0])
    paths[0].unlink()
    with pytest.raises(UserError, match="cannot read .*m-00001-of-00002.gguf"):
        read_gguf(paths[1])
