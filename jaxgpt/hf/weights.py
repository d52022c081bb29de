"""Read and write safetensors files, and convert their tensors to our parameters and back, one at a time."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike

from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.files import Json, open_file, open_whole, read_json, write_whole
from jaxgpt.hf.family import EMBEDDING, HEAD, Family, join, split, their_shape
from jaxgpt.lora import A, B, LoraConfig
from jaxgpt.model import GPT, GPTConfig

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
NEXT_TO_IT = re.compile(r"[^/\\]+\.safetensors")
OTHERS = ("consolidated.safetensors", "adapter_model.safetensors")  # Mistral's own names for tensors, and PEFT's
LARGEST_INDEX = 2**26  # bytes, about a million tensors
SHARD = 5 * 10**9  # bytes per file, as on the Hub
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
SPELLED = {dtype: kind for kind, dtype in DTYPES.items()}
# Endings of tensors in older checkpoints that are not weights: causal masks, frequencies of rotations.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


class Tensor(NamedTuple):
    """A tensor in a file, or one to be written: its elements are read or made when they are needed."""

    shape: tuple[int, ...]
    kind: str  # dtype in the format's spelling, such as F32
    read: Callable[[], np.ndarray]
    file: Path = Path()  # the file that has it

    @property
    def bytes(self) -> int:
        """Return the size of the elements."""
        return math.prod(self.shape) * DTYPES[self.kind].itemsize


Tensors = dict[str, Tensor]  # by name


def hold(x: np.ndarray) -> Tensor:
    """Return a tensor that has its elements in memory."""
    return Tensor(x.shape, SPELLED[x.dtype], lambda: x)


def _open(file: Path) -> Any:
    try:
        import safetensors
    except ImportError:
        raise UserError("weights need the safetensors package: python -m pip install 'jaxgpt[hf]'") from None
    open_file(file).close()  # it is regular and readable. On a pipe the library would block
    try:
        return safetensors.safe_open(str(file), framework="numpy")
    except (safetensors.SafetensorError, OSError, ValueError) as e:
        raise UserError(f"{file} is not a valid safetensors file ({e}): download it again") from None


def list_tensors(directory: Path) -> Tensors:
    """List the tensors of a directory by name, from one file, or else from those in an index. Reads headers only."""
    index = directory / INDEX
    if (directory / ONE).exists() or not index.exists():
        return _read_header(_find_file(directory))
    values = read_json(index, LARGEST_INDEX)
    files = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(files, dict):
        raise UserError(f"{index} needs a weight_map from tensors to files: download it again")
    headers = {}
    for file in {*map(str, files.values())}:
        if not NEXT_TO_IT.fullmatch(file):
            raise UserError(f"{index} names {short(file)}: it must name a .safetensors file next to it")
        headers[file] = _read_header(index.with_name(file))
    return {name: headers[file][name] for name, file in files.items() if name in headers[file]}


def _read_header(file: Path) -> Tensors:
    def read(name: str) -> np.ndarray:  # closes the file, because pages of a mapped file count as memory until then
        with _open(file) as f:
            return f.get_tensor(name)

    with _open(file) as f:
        parts = {name: f.get_slice(name) for name in list(f.keys())}
        return {
            name: Tensor(tuple(part.get_shape()), part.get_dtype(), functools.partial(read, name), file)
            for name, part in parts.items()
        }


def _find_file(directory: Path) -> Path:
    """Return the file of a directory without an index."""
    found = {*directory.glob("*.safetensors")} - {directory / name for name in OTHERS}
    if (directory / ONE) in found:
        return directory / ONE
    if len(found) == 1:
        return found.pop()
    remedy = f"give it {ONE}, or {INDEX} and what it names. Pickles are not read, since they could run any code"
    raise UserError(f"{directory} has {len(found)} .safetensors files and no {INDEX}: {remedy}")


@functools.lru_cache(maxsize=4)  # one import asks several times, and tracing 48 layers takes seconds
def shapes_of(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its path: {"h_0/attn/q/kernel": (768, 768)}. Needs `scan_layers` off."""
    assert not config.scan_layers
    return {path: x.shape for path, x in _flatten(GPT(config).shapes()).items()}


def _flatten(params: dict) -> dict[str, Any]:
    return traverse_util.flatten_dict(params, sep="/")  # type: ignore[return-value]


def _as_in_files(family: Family, tensors: Tensors) -> Family:
    """Return the family without its prefix if these tensors have none, as in checkpoints of the base model (GPT-2)."""
    if any(name.startswith(family.prefix) for name in tensors):
        return family
    rules = (rule._replace(theirs=rule.theirs.removeprefix(family.prefix)) for rule in family.weight_rules)
    return dataclasses.replace(family, weight_rules=tuple(rules))


def check(tensors: Tensors, family: Family, config: GPTConfig) -> None:
    """Raise `UserError` if tensors are missing, unknown or misshapen. The message lists all of them."""
    family, shapes = _as_in_files(family, tensors), shapes_of(config)
    wanted = {
        rule.theirs: their_shape([shapes[path] for path in rule.ours], rule.layout)
        for rule in family.expand_rules(config, shapes)
    }
    extra = {name for name in tensors.keys() - wanted.keys() if not name.endswith(BUFFERS)}
    if config.tie_embeddings:  # many files store the output matrix anyway, a copy of the embedding
        extra -= {rule.theirs for rule in family.weight_rules if rule.ours == HEAD}
    missing = wanted.keys() - tensors.keys()
    problems = [f"{word} {summarize_names(n)}" for word, n in (("missing", missing), ("unknown", extra)) if n]
    for name in sorted(wanted.keys() & tensors.keys()):
        tensor, shape = tensors[name], wanted[name]
        if tensor.shape != shape:
            problems.append(f"{name} is {list(tensor.shape)}, the configuration implies {list(shape)}")
        if tensor.kind not in DTYPES:
            problems.append(f"{name} holds {tensor.kind}, jaxgpt reads {', '.join(DTYPES)}")
    if problems:
        raise UserError(f"the tensors do not fit the configuration ({family.model_type}): {'; '.join(problems)}")


def read_params(
    tensors: Tensors,
    family: Family,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    places: dict[str, jax.sharding.Sharding] | None = None,
) -> dict:
    """Read the parameters from tensors that `check` accepts. Needs `scan_layers` off.

    dtype: the dtype of the parameters. None means as stored. places: sharding of each parameter, by path. None means the
    first device. Raises `UserError` if the output matrix differs from the embedding that config.json ties it to.
    """
    family = _as_in_files(family, tensors)
    _check_tied(tensors, family, config)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params, broken, shapes = dict[str, Any](), [], shapes_of(config)
    for rule in family.expand_rules(config, shapes):
        tensor, outputs = tensors[rule.theirs].read(), [shapes[path][-1] for path in rule.ours]
        if not np.isfinite(tensor).all():
            broken.append(rule.theirs)
        for path, part in zip(rule.ours, split(tensor, outputs, rule.layout, config.shape.head_dim), strict=True):
            params[path] = jax.make_array_from_callback(
                part.shape,
                places[path] if places else here,
                # A contiguous copy: a view would keep their tensor in memory.
                lambda index, part=part: np.array(part[index], dtype=dtype, order="C"),
            )
    if broken:
        warnings.warn(f"{summarize_names(broken)} have NaN or infinite values", UserWarning, stacklevel=2)
    return traverse_util.unflatten_dict(params, sep="/")


def _check_tied(tensors: Tensors, family: Family, config: GPTConfig) -> None:
    """Raise `UserError` if tied matrices differ: transformers 5 uses both, other programs one of them."""
    names = {rule.ours: rule.theirs for rule in family.weight_rules}
    embedding, head = names[EMBEDDING], names[HEAD]
    if not config.tie_embeddings or head not in tensors:
        return
    # As numbers: NumPy compares no NaN of bfloat16.
    x, y = (tensors[name].read().astype(np.float32) for name in (embedding, head))
    if not np.array_equal(x, y, equal_nan=True):
        remedy = "set tie_word_embeddings to false to use both"
        raise UserError(f"{head} differs from {embedding}, to which config.json ties it: {remedy}")


def to_tensors(params: dict, family: Family, config: GPTConfig, dtype: DTypeLike | None = None) -> Tensors:
    """Return the tensors of a checkpoint by name, each made when it is written. dtype: by default the parameters' own."""
    flat, head_dim = _flatten(params), config.shape.head_dim
    made: Tensors = {}
    for rule in family.expand_rules(config, flat):
        ours = [flat.pop(path) for path in rule.ours]
        kind = np.dtype(ours[0].dtype if dtype is None else dtype)

        def make(ours=ours, rule=rule, kind=kind) -> np.ndarray:
            return join([np.asarray(x).astype(kind, copy=False) for x in ours], rule.layout, head_dim)

        made[rule.theirs] = Tensor(their_shape([x.shape for x in ours], rule.layout), SPELLED[kind], make)
    assert not flat, flat.keys()
    return made


def to_peft(
    adapters: dict, lora: LoraConfig, family: Family, config: GPTConfig, dtype: DTypeLike | None = None
) -> tuple[Tensors, Json]:
    """Return the tensors of adapters by PEFT's names, and adapter_config.json. Needs `scan_layers` off.

    A tensor that joins several matrices, such as GPT-2's c_attn, has one adapter. Its rank is the sum of theirs: the a
    are side by side, and a b is zero outside the columns of its own matrix.
    """
    flat = {path: np.asarray(x, dtype) for path, x in _flatten(adapters).items()}
    shapes, head_dim, tensors, ranks, is_conv = shapes_of(config), config.shape.head_dim, {}, {}, False
    assert lora.rank is not None
    for rule in family.expand_rules(config, shapes):
        inside = [path.removesuffix("kernel") for path in rule.ours]
        if not (own := [path for path in inside if path + A in flat]):
            continue
        a_DR, b_RF = np.concatenate([flat[path + A] for path in own], axis=1), []
        for path in inside:
            zero_RF = np.zeros((lora.rank, shapes[f"{path}kernel"][1]), a_DR.dtype)
            b_RF.append(np.concatenate([flat[path + B] if path == other else zero_RF for other in own]))
        is_conv = rule.layout in ("same", "columns")  # transformers' Conv1D, which has [in, out]
        joined, module = join(b_RF, rule.layout, head_dim), rule.theirs.removesuffix(".weight")
        tensors[f"base_model.model.{module}.lora_A.weight"] = hold(a_DR.T)
        tensors[f"base_model.model.{module}.lora_B.weight"] = hold(joined.T if is_conv else joined)
        ranks[module.rpartition(".")[2]] = a_DR.shape[1]
    joint = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    return tensors, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "fan_in_fan_out": is_conv,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": joint,
        "alpha_pattern": {name: lora.alpha * rank / lora.rank for name, rank in joint.items()},
        "target_modules": list(ranks),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def write(directory: Path, tensors: Tensors, shard: int = SHARD) -> None:
    """Write one file, or an index and several. shard: most bytes of a file, unless it holds a single larger tensor."""
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError:
        raise UserError("weights need the huggingface_hub package: python -m pip install 'jaxgpt[hf]'") from None
    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard,
    )
    for name, inside in plan.filename_to_tensors.items():
        write_file(directory / name, {name: tensors[name] for name in inside})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_whole(directory / INDEX, json.dumps(index, indent=2) + "\n")


def write_file(file: Path, tensors: Tensors) -> None:
    """Write the format (https://huggingface.co/docs/safetensors): length of the header, JSON header, elements.

    The library is not used, because it needs all tensors in memory at once.
    """
    head: Json = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    at = 0
    for name, tensor in tensors.items():
        head[name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": [at, at + tensor.bytes]}
        at += tensor.bytes
    raw = json.dumps(head).encode()
    raw += b" " * (-len(raw) % 8)
    with open_whole(file) as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in tensors.items():
            array = np.ascontiguousarray(tensor.read())
            assert array.shape == tensor.shape and array.dtype == DTYPES[tensor.kind], name
            array.tofile(f)


def summarize_names(names: Collection[str]) -> str:
    """Return the first names of tensors, and how many there are."""
    return ", ".join([*sorted(names)[:3], f"{len(names)} in all"])
