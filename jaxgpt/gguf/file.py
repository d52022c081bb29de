"""Write models as GGUF files, and read those back (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.files import open_file, open_whole
from jaxgpt.gguf.families import ARCHITECTURES, FAMILIES, FREQUENCIES, OUTPUT, write_fields
from jaxgpt.gguf.tokenizers import is_written_here, read_tokenizer
from jaxgpt.hf.family import Family
from jaxgpt.hf.source import Source, check_vocabulary, load_named_tokenizer
from jaxgpt.hf.weights import LazyTensor, Tensor, check, to_tensors

Fields = dict[str, Any]

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
LARGEST_HEADER = 2**26  # bytes before the elements; Gemma 3's, with 262,144 tokens, has 2**23
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct's codes
BLOCK, BLOCK_BYTES = 32, 34  # elements of a row that share a scale in Q8_0, and their bytes
# For each dtype that can be stored: ggml's number of it, dtype of the elements, and llama.cpp's number of the file type.
KINDS = {
    "F32": (0, np.dtype(np.float32), 0),
    "F16": (1, np.dtype(np.float16), 1),
    "BF16": (30, np.dtype(ml_dtypes.bfloat16), 32),
    "Q8_0": (8, np.dtype(np.uint8), 7),
}
# Names of dtypes for users, and the short ones of llama.cpp.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
SHORT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
EMBEDDING, NORM = "token_embd.weight", "norm.weight"
# The parameters of Gemma's norms in the order of their names: files have the scale, which is 1 more and rounded.
NORM_PARAMETERS = "jaxgpt.norm_parameters"


def parse_dtype(name: str | None, known: Collection[str] = DTYPES) -> str | None:
    """Return the name of a dtype in `known`; f32, f16 and bf16 are accepted too. None means None."""
    found = SHORT.get(name, name) if isinstance(name, str) else name
    if found is not None and found not in known:
        raise UserError(f"dtype={short(name)}: needs one of {', '.join(known)}")
    return found


def to_gguf(params: dict, config: GPTConfig, model_type: str) -> tuple[Fields, dict[str, LazyTensor]]:
    """Return (fields, tensors by name) of a model, without those of the tokenizer. The tensors are made when written.

    Args:
        params: of the model, with layers not stacked.
        config: the architecture.
        model_type: Hugging Face's name of the family.

    Raises:
        UserError: llama.cpp has no such model.
    """
    family = FAMILIES[model_type]
    values = write_fields(family, config)
    tensors = to_tensors(params, family, config)
    if "jaxgpt.tie_embeddings" in values:  # llama.cpp needs the output matrix of a tied model too
        tensors.setdefault(OUTPUT, tensors[EMBEDDING])
    if FREQUENCIES in values:
        tensors[FREQUENCIES] = _constant(values[FREQUENCIES])
    fields: Fields = {"general.architecture": family.model_type}
    for key, value in values.items():
        if key not in tensors:
            fields[key if key.startswith("jaxgpt.") else f"{family.model_type}.{key}"] = value
    if config.norm_offset:
        parameters = {n: np.asarray(tensors[n].make(), np.float32) for n in sorted(tensors) if n.endswith(NORM)}
        fields[NORM_PARAMETERS] = np.concatenate(list(parameters.values())).tolist()
        tensors |= {name: _constant(x + 1) for name, x in parameters.items()}
    return fields, tensors


def _constant(x: np.ndarray) -> LazyTensor:
    return LazyTensor(shape=x.shape, dtype=x.dtype, make=lambda: x)


def write_gguf(path: Path, fields: Mapping[str, Any], tensors: dict[str, LazyTensor], dtype: str | None = None) -> None:
    """Write a file atomically, with one tensor in memory at a time.

    Tensors with one axis and the embedding of positions are float32, as llama.cpp needs them.

    Args:
        path: of the file; its directory must exist.
        fields: by name: bool, int (unsigned, 32 bits), float (32 bits), str, or a list of one of these (signed ints).
        tensors: by name.
        dtype: of the matrices, a key of `DTYPES`; q8_0 falls back to float16 if rows are not divisible by 32. None
            means that of each tensor.
    """
    gguf = _package()
    usual = DTYPES[tensors[EMBEDDING].dtype.name if dtype is None else dtype]
    writer = gguf.GGUFWriter(None, fields["general.architecture"])
    kinds = gguf.GGUFValueType
    types = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    own = {"general.file_type": KINDS[usual][2], "general.quantization_version": gguf.GGML_QUANT_VERSION}
    for key, value in (own | dict(fields)).items():
        if isinstance(value, list):
            writer.add_key_value(key, value, kinds.ARRAY, (types | {int: kinds.INT32})[type(value[0])])
        elif key != "general.architecture":  # which the writer has added
            writer.add_key_value(key, value, types[type(value)])
    stored_as: dict[str, str] = {}
    for name, tensor in tensors.items():
        kind = DTYPES[tensor.dtype.name if dtype is None else dtype]
        if len(tensor.shape) < 2 or name == "position_embd.weight":
            kind = "F32"
        elif kind == "Q8_0" and tensor.shape[-1] % BLOCK:
            kind = "F16"
        stored_as[name] = kind
        number = gguf.GGMLQuantizationType(KINDS[kind][0])
        size = _count_bytes(tensor.shape, kind)
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size, raw_dtype=number)
    with open_whole(path) as f, contextlib.closing(writer):
        writer.write_header_to_file(Path(f.name))  # opens the file again, by its temporary name
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            x, kind = tensor.make(), stored_as[name]
            if kind == "F16" and float(np.abs(x).max(initial=0)) > float(np.finfo(np.float16).max):
                raise UserError(f"{name} has values beyond those of float16: take dtype bfloat16 or float32")
            x = np.ascontiguousarray(x, np.float32 if kind == "Q8_0" else KINDS[kind][1])
            writer.write_tensor_data(gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0) if kind == "Q8_0" else x)


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF needs the gguf package: python -m pip install 'jaxgpt[gguf]'") from None
    return gguf


def _count_bytes(shape: tuple[int, ...], kind: str) -> int:
    count = math.prod(shape)
    return count // BLOCK * BLOCK_BYTES if kind == "Q8_0" else count * KINDS[kind][1].itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor(Tensor):
    """A tensor in a GGUF file. `kind` is the dtype that `read` returns: F32 for Q8_0."""

    stored_as: str  # a key of KINDS
    offset: int  # bytes before its elements in the file
    elements: np.ndarray | None = None  # that are in a field, not in the file

    def read(self) -> np.ndarray:
        """Read the elements; those of Q8_0 become float32."""
        if self.elements is not None:
            return self.elements
        size = _count_bytes(self.shape, self.stored_as)
        with open_file(self.file) as f:
            f.seek(self.offset)
            raw = f.read(size)
        if len(raw) != size:
            raise UserError(f"{self.file} is truncated within {self.name}: download it again")
        stored = np.frombuffer(raw, KINDS[self.stored_as][1])
        if self.stored_as == "Q8_0":
            gguf = _package()
            stored = gguf.quants.dequantize(stored.reshape(-1, BLOCK_BYTES), gguf.GGMLQuantizationType.Q8_0)
        return stored.reshape(self.shape)


def open_gguf(path: Path, tokenizer: str | None = None) -> tuple[Source, Fields]:
    """Open a file that was written here, and check it before any matrix is read. Returns (model, all fields).

    Args:
        path: of the file.
        tokenizer: path of a tokenizer.json, or "ids" for none. None means the one in the file.

    Raises:
        UserError: the file was written by another program, is damaged or unknown.
    """
    fields, tensors = read_gguf(path)
    try:
        family, config = read_config(fields, tensors)
        tensors.pop(FREQUENCIES, None)  # follow from the fields
        if config.n_layer > len(tensors):  # it would take long to trace
            raise UserError(f"block_count={config.n_layer}, but there are {len(tensors)} tensors")
        if config.norm_offset:
            names, rest = sorted(name for name in tensors if name.endswith(NORM)), fields.get(NORM_PARAMETERS)
            size = sum(math.prod(tensors[name].shape) for name in names)
            if not isinstance(rest, list) or len(rest) != size or not all(type(x) is float for x in rest):
                raise UserError(f"{NORM_PARAMETERS} is missing or damaged: needs a list of {size:,} numbers")
            for name in names:
                shape, count = tensors[name].shape, math.prod(tensors[name].shape)
                x, rest = np.array(rest[:count], np.float32), rest[count:]
                tensors[name] = dataclasses.replace(tensors[name], elements=x.reshape(shape))
        check(dict(tensors), family, config)
        if tokenizer is None:
            found = read_tokenizer(fields)
            check_vocabulary(found, "the file", config)
        else:
            found = load_named_tokenizer(tokenizer, config)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    return Source(directory=path, family=family, config=config, tokenizer=found, tensors=dict(tensors)), fields


def read_config(fields: Fields, tensors: dict[str, StoredTensor]) -> tuple[Family, GPTConfig]:
    """Return (family, architecture) of a file. Raises `UserError` if they are unknown, or our layers do not support them."""
    name, embedding = fields.get("general.architecture"), tensors.get(EMBEDDING)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(f"general.architecture={short(name)} is unknown: needs one of {', '.join(ARCHITECTURES)}")
    if not is_written_here(fields):
        raise UserError(
            "it was not written by jaxgpt export, and the files of other programs are not read: import the model's "
            "original in Hugging Face's format"
        )
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"it has no {EMBEDDING} with two axes")
    values = {key.removeprefix(f"{name}."): value for key, value in fields.items()}
    return ARCHITECTURES[name], ARCHITECTURES[name].read(
        values | dict.fromkeys(tensors, True) | {"vocab_size": embedding.shape[0]}
    )


def read_gguf(path: Path) -> tuple[Fields, dict[str, StoredTensor]]:
    """Return (fields, tensors by name) of an untrusted file. Elements are read when they are needed.

    A float32 field becomes the shortest decimal number that rounds to it: 1e-05, not 9.999999747378752e-06.
    Raises `UserError` for a file that is damaged, or has tensors in other dtypes than those of `KINDS`.
    """
    # gguf.GGUFReader takes 34 s and 1.2 GB for the fields of Gemma 3, this 0.5 s, and never returns from a damaged array.
    with open_file(path) as f:
        size = os.fstat(f.fileno()).st_size
        raw, at = f.read(min(size, LARGEST_HEADER)), 4

    def take(code: str, count: int = 1) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from(f"<{count}{code}", raw, at)  # raises an error at the end of `raw`
        at += struct.calcsize(f"<{count}{code}")
        return values

    def take_value(kind: int) -> Any:
        if kind == STRING:
            return take("s", *take("Q"))[0].decode()
        if kind == ARRAY:
            (inner,), (count,) = take("I"), take("Q")
            return [take_value(STRING) for _ in range(count)] if inner == STRING else [*take(SCALARS[inner], count)]
        (value,) = take(SCALARS[kind])
        return float(str(np.float32(value))) if SCALARS[kind] == "f" else value

    fields: Fields = {}
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    if raw[:4] != MAGIC:
        raise UserError(f"{path} is not a GGUF file")
    try:
        (version,), (tensor_count, field_count) = take("I"), take("Q", 2)
        if version != VERSION:
            raise UserError(f"{path} has version {version} of GGUF: needs {VERSION}, little-endian")
        for _ in range(field_count):
            key = take_value(STRING)
            fields[key] = take_value(*take("I"))
        for _ in range(tensor_count):
            name, shape = take_value(STRING), take("Q", *take("I"))[::-1]
            found.append((name, shape, *take("I"), *take("Q")))
    except (struct.error, UnicodeDecodeError, KeyError) as e:
        raise UserError(f"{path} is damaged within its header ({e}): download it again") from None
    start = -(-at // ALIGNMENT) * ALIGNMENT
    kinds, tensors = {number: kind for kind, (number, *_) in KINDS.items()}, {}
    for name, shape, number, offset in found:
        if number not in kinds:
            raise UserError(f"{path}: {name} has dtype {number} of ggml, needs one of {', '.join(KINDS)}")
        kind, offset = kinds[number], start + offset
        if (
            len(shape) > 4
            or offset + _count_bytes(shape, kind) > size
            or (kind == "Q8_0" and (not shape or shape[-1] % BLOCK))
        ):
            raise UserError(f"{path} is damaged: it ends before the end of {name}. Download it again.")
        tensors[name] = StoredTensor(
            name=name, file=path, shape=shape, kind="F32" if kind == "Q8_0" else kind, stored_as=kind, offset=offset
        )
    return fields, tensors
