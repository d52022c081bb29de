"""Convert tensors of Hugging Face checkpoints to our parameters and back, by the rules of a family."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.hf.family import Family, join, split, their_shape
from jaxgpt.hf.safetensors_files import DTYPES, LazyTensor, Tensor, is_finite, summarize_names
from jaxgpt.model import GPT


@functools.lru_cache(maxsize=4)  # one import asks several times, and tracing 48 layers takes seconds
def shapes_of(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its path: {"h_0/attn/q/kernel": (768, 768)}. Needs `scan_layers` off."""
    assert not config.scan_layers
    return {path: x.shape for path, x in _flat(GPT(config).shapes()).items()}


def _flat(params: dict) -> dict[str, Any]:
    return traverse_util.flatten_dict(params, sep="/")  # type: ignore[return-value]


def _as_in_files(family: Family, tensors: dict[str, Tensor]) -> Family:
    """Return the family without its prefix if these tensors have none, as in checkpoints of the base model (GPT-2)."""
    if any(name.startswith(family.prefix) for name in tensors):
        return family
    rules = (rule._replace(theirs=rule.theirs.removeprefix(family.prefix)) for rule in family.weight_rules)
    return dataclasses.replace(family, weight_rules=tuple(rules))


def check(tensors: dict[str, Tensor], family: Family, config: GPTConfig) -> None:
    """Raise `UserError` if tensors are missing, unknown or misshapen; the message lists all of them."""
    family, shapes = _as_in_files(family, tensors), shapes_of(config)
    wanted = {
        rule.theirs: their_shape([shapes[path] for path in rule.ours], rule.layout)
        for rule in family.expand_rules(config, shapes)
    }
    extra = {name for name in tensors.keys() - wanted.keys() if not name.endswith(family.buffers)}
    if config.tie_embeddings:  # many files store the output matrix anyway, a copy of the embedding
        extra -= {rule.theirs for rule in family.weight_rules if rule.ours == ("lm_head/kernel",)}
    there = [(name, tensors[name], shape) for name, shape in wanted.items() if name in tensors]
    misshapen = [f"{n} is {list(x.shape)}, the configuration implies {list(s)}" for n, x, s in there if x.shape != s]
    misshapen += [f"{n} holds {x.kind}, needs one of {', '.join(DTYPES)}" for n, x, _ in there if x.kind not in DTYPES]
    missing = wanted.keys() - tensors.keys()
    problems = [f"{word} {summarize_names(n)}" for word, n in (("missing", missing), ("unknown", extra)) if n]
    if problems := problems + misshapen:
        raise UserError(
            f"the tensors do not fit the configuration ({family.model_type}): {'; '.join(problems)}. Is it of another model?"
        )


def read_params(
    tensors: dict[str, Tensor],
    family: Family,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    places: dict[str, jax.sharding.Sharding] | None = None,
) -> dict:
    """Read the parameters one tensor at a time, so that memory holds the model and one more tensor.

    Args:
        tensors: by name, accepted by `check`.
        family: the family of the model.
        config: the architecture, with `scan_layers` off.
        dtype: of the parameters. None means as stored.
        places: sharding of each parameter, by path. None means the first device.

    Raises:
        UserError: the output matrix differs from the embedding that config.json ties it to.
    """
    family = _as_in_files(family, tensors)
    _check_tied(tensors, family, config)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params: dict[str, Any] = {}
    head_dim, broken = config.explicit().head_dim, []
    assert head_dim is not None
    for rule in family.expand_rules(config, shapes_of(config)):
        tensor = tensors[rule.theirs].read()
        if not is_finite(tensor):
            broken.append(rule.theirs)
        for path, part in zip(rule.ours, split(tensor, rule.layout, head_dim), strict=True):
            params[path] = _place(part, dtype, here if places is None else places[path])
    if broken:
        warnings.warn(
            f"{summarize_names(broken)} have NaN or infinite values, and so may the logits: download the model again",
            UserWarning,
            stacklevel=2,
        )
    return traverse_util.unflatten_dict(params, sep="/")


def _check_tied(tensors: dict[str, Tensor], family: Family, config: GPTConfig) -> None:
    """Raise `UserError` if tied matrices differ: transformers 5 uses both, other programs one of them."""
    names = {rule.ours: rule.theirs for rule in family.weight_rules}
    embedding, head = names["wte/embedding",], names["lm_head/kernel",]
    if not config.tie_embeddings or head not in tensors:
        return
    if tensors[head].shape == tensors[embedding].shape and tensors[head].kind in DTYPES:
        x, y = tensors[embedding].read(), tensors[head].read()
        if ((x == y) | (np.isnan(x) & np.isnan(y))).all():
            return
    raise UserError(
        f"{head} differs from {embedding}, but config.json ties them (tie_word_embeddings is true or absent): "
        f"set it to false to use both, or remove {head} from {tensors[head].file}"
    )


def _place(x: np.ndarray, dtype: DTypeLike | None, place: jax.sharding.Sharding) -> jax.Array:
    # A contiguous copy: a view would keep their tensor in memory.
    return jax.make_array_from_callback(x.shape, place, lambda index: np.array(x[index], dtype=dtype, order="C"))


def to_tensors(
    params: dict, family: Family, config: GPTConfig, dtype: DTypeLike | None = None
) -> dict[str, LazyTensor]:
    """Return the tensors of a checkpoint by name, each made when it is written.

    dtype: of the tensors. None means that of the parameters.
    """
    flat, head_dim = _flat(params), config.explicit().head_dim
    assert head_dim is not None
    made = {}
    for rule in family.expand_rules(config, flat):
        ours = [flat.pop(path) for path in rule.ours]
        kind = np.dtype(ours[0].dtype if dtype is None else dtype)

        def make(ours=ours, rule=rule, kind=kind) -> np.ndarray:
            return join([np.asarray(x).astype(kind, copy=False) for x in ours], rule.layout, head_dim)

        made[rule.theirs] = LazyTensor(shape=their_shape([x.shape for x in ours], rule.layout), dtype=kind, make=make)
    assert not flat, f"{family.model_type} has no tensors for {sorted(flat)}"
    return made
