"""Read and write the safetensors files of a directory, one tensor at a time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, open_file, open_whole, read_json, write_whole

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 2**26  # bytes, about a million tensors
SHARD = 5 * 10**9  # bytes per file, as on the Hub
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
PICKLES = re.compile(r"(pytorch_model|consolidated|model).*\.(bin|pt|pth)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """Name, file, shape and dtype of a stored tensor, from the header of its file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    kind: str  # dtype in the format's spelling, such as F32

    def read(self) -> np.ndarray:
        """Read the elements. Opens and closes the file, because pages of a mapped file count as memory until then."""
        with _open(self.file) as f:
            return f.get_tensor(self.name)


def list_tensors(directory: Path) -> dict[str, Tensor]:
    """List the tensors of a directory by name, from its only file or from the files in its index. Reads headers only.

    If several files hold a tensor, the index chooses and a warning is issued: other programs may read the other copy.
    Raises `UserError` for files that are missing, truncated, damaged or pickled.
    """
    index = directory / INDEX
    found: dict[str, Tensor] = {}
    chosen = _read_index(index) if index.exists() else {}
    for file in dict.fromkeys(chosen.values()) if index.exists() else [_find_file(directory)]:
        inside = _read_header(file)
        wanted = {name: tensor for name, tensor in inside.items() if chosen.get(name, file) == file}
        if more := inside.keys() - wanted.keys():
            warnings.warn(
                f"{file} has {summarize_names(more)} as well, but {INDEX} chose other copies: this one is not read",
                UserWarning,
                stacklevel=2,
            )
        for name in wanted.keys() & found.keys():
            raise UserError(
                f"{name} is in {found[name].file.name} and in {file.name}, and {index} does not choose one: "
                "download it again"
            )
        found |= wanted
    for name in chosen.keys() - found.keys():
        raise UserError(f"{index} lists {name} in {chosen[name].name}, which has no such tensor: download it again")
    return found


def _read_index(index: Path) -> dict[str, Path]:
    """Return the file of each tensor, by name."""
    values = read_json(index, LARGEST_INDEX)
    names = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise UserError(f"{index} needs a weight_map from tensors to files: download it again")
    for file in dict.fromkeys(names.values()):
        if file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise UserError(f"{index} names {short(file)}: needs the name of a .safetensors file next to it")
        if not is_there(index.with_name(file), f"{INDEX} needs it: download it again."):
            raise UserError(f"{index.with_name(file)} is missing, but {INDEX} needs it: download it again")
    return {name: index.with_name(file) for name, file in names.items()}


def _find_file(directory: Path) -> Path:
    """Return the file of a directory without an index."""
    found = sorted(directory.glob("*.safetensors"))
    if (directory / ONE) in found:
        return directory / ONE
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"{directory} has {len(found)} .safetensors files and no {INDEX}: download the index, or leave one file"
        )
    if pickled := sorted(path.name for path in directory.iterdir() if PICKLES.fullmatch(path.name)):
        raise UserError(
            f"{directory} has only pickled weights ({pickled[0]}), which could run any code and are not read. If you "
            f'trust them, convert them: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{directory}').save_pretrained('{directory}')\""
        )
    raise UserError(f"{directory} has no .safetensors files: there are no weights to import")


def _read_header(file: Path) -> dict[str, Tensor]:
    with _open(file) as f:
        parts = {name: f.get_slice(name) for name in list(f.keys())}
        return {
            name: Tensor(name=name, file=file, shape=tuple(part.get_shape()), kind=part.get_dtype())
            for name, part in parts.items()
        }


def is_finite(tensor: np.ndarray) -> bool:
    """Return whether all elements are finite."""
    if tensor.dtype == DTYPES["BF16"]:  # bits without the sign: 2.5 times as fast as isfinite (2 s for 10^9)
        return bool((tensor.view(np.uint16) & 0x7FFF).max(initial=0) < 0x7F80)
    return bool(np.isfinite(tensor).all())


def _open(file: Path) -> Any:
    try:
        import safetensors
    except ImportError:
        raise UserError("weights need the safetensors package: python -m pip install 'jaxgpt[hf]'") from None
    open_file(file).close()  # regular and readable; on a pipe the library would block
    try:
        return safetensors.safe_open(str(file), framework="numpy")
    except (safetensors.SafetensorError, OSError, ValueError) as e:
        raise UserError(f"{file} is not a valid safetensors file ({e}): download it again") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor to write; `make` is called when it is written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        """Return the size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(directory: Path, tensors: dict[str, LazyTensor], shard: int = SHARD) -> None:
    """Write one file, or an index and several files, with one tensor in memory at a time.

    shard: most bytes of a file, unless it holds a single larger tensor.
    """
    files: list[dict[str, LazyTensor]] = [{}]
    for name, tensor in tensors.items():
        if files[-1] and sum(t.bytes for t in files[-1].values()) + tensor.bytes > shard:
            files.append({})
        files[-1][name] = tensor
    if len(files) == 1:
        return _write_one(directory / ONE, files[0])
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    places: dict[str, str] = {}
    for name, inside in zip(names, files, strict=True):
        _write_one(directory / name, inside)
        places |= dict.fromkeys(inside, name)
    index = {"metadata": {"total_size": sum(t.bytes for t in tensors.values())}, "weight_map": places}
    write_whole(directory / INDEX, json.dumps(index, indent=2) + "\n")


def _write_one(file: Path, tensors: dict[str, LazyTensor]) -> None:
    """Write the format (https://huggingface.co/docs/safetensors): length of the header, JSON header, elements.

    Not with the library, because it needs all tensors in memory at once.
    """
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    at = 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.bytes]
        head[name] = {"dtype": spelled[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        at += tensor.bytes
    raw = json.dumps(head).encode()
    raw += b" " * (-len(raw) % 8)
    with open_whole(file) as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in tensors.items():
            array = np.ascontiguousarray(tensor.make())
            assert array.shape == tensor.shape and array.dtype == tensor.dtype, (name, array.shape, array.dtype)
            array.tofile(f)


def summarize_names(names: Iterable[str]) -> str:
    """Join names of tensors; those that differ only in the layer become one, such as "h.0-11.attn.bias"."""
    patterns: dict[str, list[int]] = {}
    for name in sorted(names):
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        pattern = name if number is None else f"{name[: number.start()]}{{}}{name[number.end() :]}"
        patterns.setdefault(pattern, []).extend([] if number is None else [int(number[0])])
    return ", ".join(pattern.format(_ranges(sorted(layers))) for pattern, layers in patterns.items())


def _ranges(numbers: list[int]) -> str:
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
