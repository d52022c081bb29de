"""Convert a model to the fields and tensors of a GGUF file, and open such a file."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.gguf.families import ARCHITECTURES, FAMILIES, write_fields
from jaxgpt.gguf.field_rules import FREQUENCIES, OUTPUT
from jaxgpt.gguf.file import Fields, StoredTensor, read_gguf
from jaxgpt.gguf.tokenizers import read_tokenizer
from jaxgpt.hf.family import Family
from jaxgpt.hf.params import check, to_tensors
from jaxgpt.hf.safetensors_files import LazyTensor
from jaxgpt.hf.source import Source, check_vocabulary, load_named_tokenizer

EMBEDDING, NORM = "token_embd.weight", "norm.weight"
LARGEST_FACTORS = 2**20  # bytes of rope_freqs.weight
# Gemma's norms, whose parameter is the scale - 1. Files have the scale; the sum with 1 rounds the parameter, so that its
# bits are in this field, for all norms in the order of their names.
NORM_PARAMETERS = "jaxgpt.norm_parameters"


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffsetTensor(StoredTensor):
    """The scale of a norm in a file, which `read` returns as the parameter, 1 less."""

    parameter: np.ndarray | None  # as it was exported

    def read(self) -> np.ndarray:
        """Read the scales; the exported parameters if these are theirs, otherwise their difference from 1."""
        scale = super().read().astype(np.float32)
        return scale - 1 if self.parameter is None else np.where(self.parameter + 1 == scale, self.parameter, scale - 1)


def _subtract_offset(tensors: dict[str, StoredTensor], parameters: Any) -> dict[str, StoredTensor]:
    """Return the tensors with an `OffsetTensor` for each norm. parameters: the field with their bits, unchecked."""
    norms = {name: tensors[name] for name in sorted(tensors) if name.endswith(NORM)}
    sizes = [math.prod(tensor.shape) for tensor in norms.values()]
    fits = isinstance(parameters, list) and len(parameters) == sum(sizes) and all(type(x) is float for x in parameters)
    bits = np.array(parameters, np.float32) if fits else None
    offset = {}
    for (name, tensor), end, size in zip(norms.items(), itertools.accumulate(sizes), sizes, strict=True):
        part = None if bits is None else bits[end - size : end].reshape(tensor.shape)
        offset[name] = OffsetTensor(**vars(tensor), parameter=part)
    return tensors | offset


def open_gguf(path: Path, tokenizer: str | None = None) -> tuple[Source, Fields]:
    """Open a file and check it, before any matrix is read. Returns (model, all fields).

    Args:
        path: of the file.
        tokenizer: path of a tokenizer.json, or "ids" for none. None means the one in the file.

    Raises:
        UserError: something is missing, damaged or unknown.
    """
    fields, tensors = read_gguf(path)
    try:
        family, config = read_config(fields, tensors)
        if config.n_layer > len(tensors):  # it would take long to trace
            raise UserError(f"block_count={config.n_layer}, but there are {len(tensors)} tensors")
        if config.norm_offset:
            tensors = _subtract_offset(tensors, fields.get(NORM_PARAMETERS))
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
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"it has no {EMBEDDING} with two axes")
    values = {key.removeprefix(f"{name}."): value for key, value in fields.items()}
    values |= dict.fromkeys(tensors, True) | {"vocab_size": embedding.shape[0]}
    if FREQUENCIES in tensors:
        if tensors[FREQUENCIES].bytes > LARGEST_FACTORS:
            raise UserError(
                f"{FREQUENCIES} has {tensors[FREQUENCIES].bytes:,} bytes, needs a number per pair of a head"
            )
        values[FREQUENCIES] = tensors[FREQUENCIES].read()
    family = ARCHITECTURES[name]
    return family, family.read(values)
