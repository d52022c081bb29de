"""Our parameters from their tensors, and back, by a family's table."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.hf.family import Family
from jaxgpt.hf.safetensors_files import DTYPES, Made, Tensor, equal, in_words, is_finite, read
from jaxgpt.hf.weight_rules import join, split, their_shape
from jaxgpt.model import GPT


@functools.lru_cache(maxsize=4)  # a model is asked for several times, and 48 layers take seconds to trace
def shapes_of(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Of each parameter, by its path: {"h_0/attn/q/kernel": (768, 768)}. The layers are apart, whatever `scan_layers`."""
    assert not config.scan_layers
    return {path: x.shape for path, x in _flat(GPT(config).shapes()).items()}


def _flat(params: dict) -> dict[str, Any]:
    return traverse_util.flatten_dict(params, sep="/")  # type: ignore[return-value]


def _in_file(name: str, tensors: dict[str, Tensor], family: Family) -> str:
    """A tensor's name where it is stored: a checkpoint of the bare body, GPT-2's for one, has no prefix."""
    return name if any(n.startswith(family.base) for n in tensors) else name.removeprefix(family.base)


def check(tensors: dict[str, Tensor], family: Family, config: GPTConfig) -> None:
    """Raise `UserError` with all that is missing, too much or misshapen."""
    shapes = shapes_of(config)
    wanted = {
        _in_file(row.theirs, tensors, family): their_shape([shapes[path] for path in row.ours], row.layout)
        for row in family.tensors(config, shapes)
    }
    extra = {name for name in tensors.keys() - wanted.keys() if not name.endswith(family.masks)}
    if config.tie_embeddings:  # many files have the output matrix all the same: it is the embedding
        extra -= {row.theirs for row in family.rows if row.ours == ("lm_head",)}
    misshapen = [
        f"{name} is {list(tensors[name].shape)}, config.json makes it {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    misshapen += [
        f"{name} holds {tensors[name].kind}, needs one of {', '.join(DTYPES)}"
        for name in wanted
        if name in tensors and tensors[name].kind not in DTYPES
    ]
    problems = []
    if missing := wanted.keys() - tensors.keys():
        problems.append(f"missing {in_words(missing)}")
    if extra:
        problems.append(f"unknown {in_words(extra)}")
    problems += misshapen
    if problems:
        raise UserError(
            f"the tensors are not those of this {family.model_type}: {'; '.join(problems)}. Is config.json of another model?"
        )


def read_params(
    tensors: dict[str, Tensor],
    family: Family,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    places: dict[str, jax.sharding.Sharding] | None = None,
) -> dict:
    """The parameters, one tensor at a time: what is in memory is the model and that tensor.

    dtype: None: as stored. places: where each parameter lies, by path; of a split one each device gets its part.
    Raises `UserError` as `check` does, and where an output matrix is stored beside the embedding that it is tied to and
    differs from it.
    """
    shapes = shapes_of(config)
    check(tensors, family, config)
    _check_tied(tensors, family, config)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params: dict[str, Any] = {}
    broken = []
    head_dim = config.explicit().head_dim
    assert head_dim
    for row in family.tensors(config, shapes):
        name = _in_file(row.theirs, tensors, family)
        tensor = read(name, tensors[name])
        if not is_finite(tensor):
            broken.append(name)
        for path, part in zip(row.ours, split(tensor, row.layout, head_dim), strict=True):
            params[path] = _placed(part, dtype, here if places is None else places[path])
    if broken:
        warnings.warn(
            f"{in_words(broken)} have NaN or infinite numbers, and so may all that the model says: download it again",
            UserWarning,
            stacklevel=2,
        )
    return traverse_util.unflatten_dict(params, sep="/")


def _check_tied(tensors: dict[str, Tensor], family: Family, config: GPTConfig) -> None:
    """Raise `UserError` for two matrices where there is to be one: transformers 5 uses both, others one of them."""
    names = {row.ours: _in_file(row.theirs, tensors, family) for row in family.rows}
    embedding, head = names["wte/embedding",], names["lm_head",]
    if not config.tie_embeddings or head not in tensors:
        return
    if not equal((embedding, tensors[embedding]), (head, tensors[head])):
        raise UserError(
            f"{head} differs from {embedding}, and config.json makes them one (tie_word_embeddings is true, or is left "
            f"out): set it to false to use both, or take {head} out of {tensors[head].file}"
        )


def _placed(x: np.ndarray, dtype: DTypeLike | None, place: jax.sharding.Sharding) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        # A copy, and contiguous: a view would keep the whole of their tensor alive.
        return np.array(x[index], dtype=x.dtype if dtype is None else dtype, order="C")

    return jax.make_array_from_callback(x.shape, place, part)


def to_tensors(params: dict, family: Family, config: GPTConfig, dtype: DTypeLike | None = None) -> dict[str, Made]:
    """Their tensors, to be made one by one. dtype: None: as the parameters are."""
    flat = _flat(params)
    shapes = {path: tuple(x.shape) for path, x in flat.items()}
    made = {}
    head_dim = config.explicit().head_dim
    assert head_dim
    for row in family.tensors(config, shapes):
        ours = [flat[path] for path in row.ours]
        kind = np.dtype(ours[0].dtype if dtype is None else dtype)

        def make(ours=ours, row=row, kind=kind) -> np.ndarray:
            return join([np.asarray(x).astype(kind, copy=False) for x in ours], row.layout, head_dim)

        made[row.theirs] = Made(shape=their_shape([x.shape for x in ours], row.layout), dtype=kind, make=make)
    left = flat.keys() - {path for row in family.tensors(config, shapes) for path in row.ours}
    assert not left, f"{family.model_type} has no tensors for {sorted(left)}"
    return made
