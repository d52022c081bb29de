"""Read and write GGUF files: fields, then tensors (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.files import open_file, open_whole
from jaxgpt.hf.safetensors_files import LazyTensor, Tensor

Fields = dict[str, Any]

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
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


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF needs the gguf package: python -m pip install 'jaxgpt[gguf]'") from None
    return gguf


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor(Tensor):
    """A tensor in a GGUF file. `kind` is the dtype that `read` returns: F32 for Q8_0."""

    stored_as: str  # a key of KINDS
    offset: int  # bytes before its elements in the file

    @property
    def bytes(self) -> int:
        """Return the size of the elements in the file."""
        count = math.prod(self.shape)
        return count // BLOCK * BLOCK_BYTES if self.stored_as == "Q8_0" else count * KINDS[self.stored_as][1].itemsize

    def read(self) -> np.ndarray:
        """Read the elements; those of Q8_0 become float32."""
        with open_file(self.file) as f:
            f.seek(self.offset)
            raw = f.read(self.bytes)
        if len(raw) != self.bytes:
            raise UserError(f"{self.file} is truncated within {self.name}: download it again")
        stored = np.frombuffer(raw, KINDS[self.stored_as][1])
        if self.stored_as == "Q8_0":
            gguf = _package()
            stored = gguf.quants.dequantize(stored.reshape(-1, BLOCK_BYTES), gguf.GGMLQuantizationType.Q8_0)
        return stored.reshape(self.shape)


def read_gguf(path: Path) -> tuple[Fields, dict[str, StoredTensor]]:
    """Return (fields, tensors by name) of an untrusted file. Elements are read when they are needed.

    A float32 field becomes the shortest decimal number that rounds to it: 1e-05, not 9.999999747378752e-06.
    Raises `UserError` for a file that is damaged, or has tensors in other dtypes than those of `KINDS`.
    """
    with open_file(path) as f:
        header = _Header(path, f)
        if header.take(4) != MAGIC:
            raise UserError(f"{path} is not a GGUF file")
        if (version := header.number("I")) not in VERSIONS:
            raise UserError(f"{path} has version {version} of GGUF: needs 2 or 3, little-endian")
        tensor_count, field_count = header.number("Q"), header.number("Q")
        fields: Fields = {}
        for _ in range(field_count):
            key = header.text()
            if key in fields:
                raise header.damaged(f"has {short(key)} twice")
            fields[key] = header.value(header.number("I"))
        tensors = header.tensors(tensor_count, fields.get("general.alignment", ALIGNMENT))
    if fields.get("split.count", 1) != 1:
        raise UserError(f"{path} is a part of a model in several files: join them with llama-gguf-split --merge")
    return fields, tensors


class _Header:
    """Parse the header of a file, and trust none of its sizes."""

    def __init__(self, path: Path, f: io.BufferedReader):
        self._path, self._f, self._at = path, f, 0
        self._size = os.fstat(f.fileno()).st_size

    def damaged(self, why: str) -> UserError:
        return UserError(f"{self._path} is damaged: it {why}. Download it again.")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        self._at += count
        if self._at > self._size:
            raise self.damaged("ends within its header")
        if self._at > LARGEST_HEADER:
            raise self.damaged(f"has a header of more than {LARGEST_HEADER:,} bytes")
        return self._f.read(count)

    def number(self, code: str) -> Any:
        """Return the next scalar. code: struct's."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return float(str(np.float32(value))) if code == "f" else value

    def text(self) -> str:
        """Return the next string."""
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("has a text that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """Return the next value of a field. kind: GGUF's number of its type."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise self.damaged(f"has a field of the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in SCALARS:
            code = SCALARS[inner]
            return np.frombuffer(self.take(count * struct.calcsize(f"<{code}")), f"<{code}").tolist()
        if inner != STRING:
            raise self.damaged(f"has an array of the unknown type {inner}")
        return [self.text() for _ in range(count)]

    def tensors(self, count: int, alignment: Any) -> dict[str, StoredTensor]:
        """Return the tensors by name. alignment: bytes; all tensors begin at multiples of it."""
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"has general.alignment={short(alignment)}, which is not a power of two")
        numbers = {number: kind for kind, (number, *_) in KINDS.items()}
        found: dict[str, tuple] = {}
        for _ in range(count):
            name, dimensions = self.text(), self.number("I")
            if name in found or dimensions > 4:
                raise self.damaged(f"has {short(name)} twice, or with {dimensions} dimensions")
            shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
            number, offset = self.number("I"), self.number("Q")
            if number not in numbers:
                raise UserError(f"{self._path}: {name} is {_name_kind(number)}, needs one of {', '.join(KINDS)}")
            found[name] = shape, numbers[number], offset
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, (shape, kind, offset) in found.items():
            read_as = "F32" if kind == "Q8_0" else kind
            tensor = StoredTensor(
                name=name, file=self._path, shape=shape, kind=read_as, stored_as=kind, offset=start + offset
            )
            if tensor.offset + tensor.bytes > self._size:
                raise self.damaged(f"ends before the end of {name}")
            if kind == "Q8_0" and (not shape or shape[-1] % BLOCK):
                raise self.damaged(f"has {name} in Q8_0 with rows that are not blocks of {BLOCK}")
            tensors[name] = tensor
        return tensors


def _name_kind(number: int) -> str:
    try:
        return _package().GGMLQuantizationType(number).name
    except ValueError:
        return f"of the unknown type {number}"


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
    kinds = {name: _choose_kind(name, tensor, dtype) for name, tensor in tensors.items()}
    usual = DTYPES[tensors["token_embd.weight"].dtype.name if dtype is None else dtype]
    writer = gguf.GGUFWriter(None, fields["general.architecture"])
    types = {"general.file_type": KINDS[usual][2], "general.quantization_version": gguf.GGML_QUANT_VERSION}
    for key, value in (types | dict(fields)).items():
        if key != "general.architecture":  # which the writer has added
            writer.add_key_value(key, value, *_field_type(gguf.GGUFValueType, value))
    for name, tensor in tensors.items():
        number, elements, _ = KINDS[kinds[name]]
        count = math.prod(tensor.shape)
        size = count // BLOCK * BLOCK_BYTES if kinds[name] == "Q8_0" else count * elements.itemsize
        writer.add_tensor_info(
            name, tensor.shape, np.dtype(np.float32), size, raw_dtype=gguf.GGMLQuantizationType(number)
        )
    with open_whole(path) as f, contextlib.closing(writer):
        writer.write_header_to_file(Path(f.name))  # opens the file again, by its temporary name
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            writer.write_tensor_data(_encode(name, tensor.make(), kinds[name]))


def _choose_kind(name: str, tensor: LazyTensor, dtype: str | None) -> str:
    if len(tensor.shape) < 2 or name == "position_embd.weight":
        return "F32"
    kind = DTYPES[tensor.dtype.name if dtype is None else dtype]
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % BLOCK else kind


def _encode(name: str, x: np.ndarray, kind: str) -> np.ndarray:
    """Return the elements as they are stored."""
    if kind == "F16" and float(np.abs(x).max(initial=0)) > float(np.finfo(np.float16).max):
        raise UserError(f"{name} has values beyond those of float16: take dtype bfloat16 or float32")
    if kind == "Q8_0":
        gguf = _package()
        return gguf.quants.quantize(np.ascontiguousarray(x, np.float32), gguf.GGMLQuantizationType.Q8_0)
    return np.ascontiguousarray(x, KINDS[kind][1])


def _field_type(types: Any, value: Any) -> tuple[Any, Any]:
    """Return (type of a field, type of its elements)."""
    scalars = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING}
    if isinstance(value, list):
        return types.ARRAY, (scalars | {int: types.INT32})[type(value[0])]
    return scalars[type(value)], None


def parse_dtype(name: str | None, known: Collection[str] = DTYPES) -> str | None:
    """Return the name of a dtype in `known`; f32, f16 and bf16 are accepted too. None means None."""
    found = SHORT.get(name, name) if isinstance(name, str) else name
    if found is not None and found not in known:
        raise UserError(f"dtype={short(name)}: needs one of {', '.join(known)}")
    return found
