"""Low-rank adapters: a matrix W [D, F] becomes W + alpha / rank a b, of which only a [D, R] and b [R, F] are trained.

Hu et al. 2021, arXiv:2106.09685. In training a dense layer adds (x a) b to x W, so that a step computes no gradient of a
W. After training the adapters are merged into W. With `LoraConfig.frozen` each W is int8, with a scale per output.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util

from jaxgpt.config.serialize import Checked
from jaxgpt.config.validate import PositiveFloat, Size
from jaxgpt.errors import UserError
from jaxgpt.layers.linear import Dense, to_int8

A, B = "lora_a", "lora_b"  # names of an adapter's matrices in the parameters
# name of the scales of a kernel [D, F] of 8 bits, [F], or of 4 bits: step and least value of groups, [2, D / G, F]
SCALE = "kernel_scale"
# Inputs that have a scale together in 4 bits, or the greatest common divisor of this and D. A weight takes 5 bits, and errs by
# 7.6% (root mean square), NF4's by 9.0% with 4.5 bits (arXiv:2305.14314). Blocks of Q4_1 come back as they were.
GROUP = 32
F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(Checked):
    """Low-rank adapters (arXiv:2106.09685). With a rank, only they are trained, on the weights of train.init_from.

    >>> LoraConfig(rank=8).targets
    ('q', 'v')
    """

    rank: Size | None = None  # rank of the adapters. None means no adapters, all parameters are trained
    alpha: PositiveFloat = 16.0  # the output of an adapter is multiplied by alpha / rank
    # the matrices of a block that have an adapter: q, k, v, c_fc, c_gate, c_proj (in attention and in the MLP)
    targets: tuple[str, ...] = ("q", "v")
    # dtype of the blocks' frozen matrices in training. int8 takes a quarter of float32's memory, int4 a sixth. They are
    # rounded once, and training, `sample` and merged exports use the rounded ones
    frozen: Literal["float32", "bfloat16", "int8", "int4"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise UserError("lora.targets is empty: name matrices to adapt, such as q v")


def with_adapters(function: F) -> F:
    """Return the function, in which dense layers add the adapters in their parameters, and multiply by rounded kernels.

    It calls `model.apply` with parameters of `join_adapters`, for example the loss of `loss.make_loss`. Jit it after this.
    """
    return nn.intercept_methods(_add_adapter)(function)  # in the context, at each call


def _add_adapter(call: Callable, args: tuple[Any, ...], kwargs: dict, context: Any) -> Any:
    """Add (x_BTD @ lora_a [D, R]) @ lora_b [R, F] to a dense layer: an interceptor of linen's methods.

    The adapter's gradient takes two narrow products, and none by the kernel's shape.
    """
    module = context.module
    if not isinstance(module, Dense):
        return call(*args, **kwargs)
    params, x_BTD = module.variables["params"], args[0].astype(module.dtype)
    if SCALE in params:
        y_BTF = _rounded_matmul(x_BTD, params["kernel"], params[SCALE])
        if module.use_bias:
            y_BTF = y_BTF + params["bias"].astype(module.dtype)[None, None]
    else:
        y_BTF = call(*args, **kwargs)
    if A in params:
        a_DR, b_RF = (params[name].astype(module.dtype) for name in (A, B))
        y_BTF = y_BTF + _matmul(_matmul(x_BTD, a_DR), b_RF)
    return y_BTF


def _matmul(x_BTD: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    return (x_BTD.reshape(-1, x_BTD.shape[-1]) @ kernel_DF).reshape(*x_BTD.shape[:-1], -1)


@jax.checkpoint  # otherwise each layer would keep its kernel in x's dtype for the backward pass
def _rounded_matmul(x_BTD: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
    if kernel.dtype == jnp.uint8:
        return _matmul(x_BTD, from_int4(kernel, scale).astype(x_BTD.dtype))
    return _matmul(x_BTD, kernel.astype(x_BTD.dtype)) * scale.astype(x_BTD.dtype)[None, None]


def to_int4(kernel_DF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (codes, scale): two weights in a byte, [D / 2, F], and [2, D / G, F] in float16: see `GROUP`.

    A group has 16 equally spaced values, from its least to its largest. Stacked layers, [L, D, F], are rounded alike.
    """
    *layers, D, F = kernel_DF.shape
    if D % 2:
        raise UserError(f"lora.frozen=int4: needs an even number of inputs, and a matrix has {D}")
    groups = kernel_DF.astype(jnp.float32).reshape(*layers, -1, math.gcd(D, GROUP), F)
    low, high = groups.min(axis=-2), groups.max(axis=-2)
    scale = jnp.stack([(high - low) / 15.0, low], axis=-3).astype(jnp.float16)
    step, low = (scale.astype(jnp.float32)[..., i, :, None, :] for i in (0, 1))
    codes = jnp.round((groups - low) / jnp.maximum(step, 1e-12)).clip(0, 15)  # zeros stay zeros
    codes_DF = codes.astype(jnp.uint8).reshape(kernel_DF.shape)
    return codes_DF[..., ::2, :] | codes_DF[..., 1::2, :] << 4, scale


def from_int4(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the matrix that `to_int4` rounded, in float32."""
    *layers, half, F = codes.shape
    step, low = (scale.astype(jnp.float32)[..., i, :, None, :] for i in (0, 1))
    groups = jnp.stack([codes & 15, codes >> 4], axis=-2).reshape(*layers, step.shape[-3], -1, F)
    return (groups * step + low).reshape(*layers, 2 * half, F)


def freeze(config: LoraConfig, params: dict) -> dict:
    """Return the parameters as they are frozen: the blocks' kernels in `config.frozen`, with scales where it has some."""
    if config.frozen == "float32":
        return params
    flat = _flat(params)
    for path in _kernels(flat):
        scale = (*path[:-1], SCALE)
        if config.frozen == "bfloat16":
            flat[path] = flat[path].astype(jnp.bfloat16)
        elif config.frozen == "int4":
            flat[path], flat[scale] = to_int4(flat[path])
        else:
            values_FD, flat[scale] = to_int8(jnp.swapaxes(flat[path], -1, -2))
            flat[path] = jnp.swapaxes(values_FD, -1, -2)
    return traverse_util.unflatten_dict(flat)


def thaw(params: dict) -> dict:
    """Return frozen parameters in float32."""
    flat = _flat(params)
    for path in _kernels(flat):
        kernel, scale = flat[path], flat.pop((*path[:-1], SCALE), None)
        if kernel.dtype == jnp.uint8:
            flat[path] = from_int4(kernel, scale)
        else:
            kernel = kernel.astype(jnp.float32)
            flat[path] = kernel if scale is None else kernel * scale[..., None, :]
    return traverse_util.unflatten_dict(flat)


def thawed_shapes(params: dict) -> dict:
    """Return the shapes of `thaw(params)`, with the shardings of `params`, which holds shapes."""
    frozen = _flat(params)
    shapes = {path: x.update(sharding=frozen[path].sharding) for path, x in _flat(jax.eval_shape(thaw, params)).items()}
    return traverse_util.unflatten_dict(shapes)


def init_adapters(config: LoraConfig, key: jax.Array, params: dict) -> dict:
    """Make an adapter for each kernel in config.targets: {"h_0": {"attn": {"q": {"lora_a": ..., "lora_b": ...}}}}.

    a is normal with variance 1 / D and b is zero, so that the model is unchanged at first. Kernels that `scan_layers`
    stacks, [L, D, F], have stacked adapters. Raises `UserError` for targets that are not kernels, and for a rank that
    is not below the rank of the kernel.
    """
    assert config.rank is not None
    flat = _flat(params)
    kernels = {path[:-1]: flat[path] for path in _kernels(flat)}
    names = {path[-1] for path in kernels}
    if unknown := sorted({*config.targets} - names):
        raise UserError(f"lora.targets has {', '.join(unknown)}: this model has {', '.join(sorted(names))}")
    adapters = {}
    for number, (path, x_DF) in enumerate(sorted(kernels.items())):
        if path[-1] not in config.targets:
            continue
        *layers, D, F = x_DF.shape
        if config.rank >= min(D, F):
            raise UserError(f"lora.rank={config.rank}: needs less than {min(D, F)}, the full rank of {'/'.join(path)}")
        a_DR = jax.random.normal(jax.random.fold_in(key, number), (*layers, D, config.rank)) / D**0.5
        adapters |= {(*path, A): a_DR, (*path, B): jnp.zeros((*layers, config.rank, F))}
    return traverse_util.unflatten_dict(adapters)


def join_adapters(config: LoraConfig, adapters: dict, params: dict | None) -> dict:
    """Return the parameters with each adapter next to its kernel: see `with_adapters`. params: None without adapters."""
    if params is None:
        return adapters
    assert config.rank is not None
    flat = {path: x * (config.alpha / config.rank) if path[-1] == A else x for path, x in _flat(adapters).items()}
    return traverse_util.unflatten_dict(_flat(params) | flat)


def merge_adapters(config: LoraConfig, adapters: dict, params: dict) -> dict:
    """Return the parameters, as they were frozen, with the adapters added, in float32."""
    assert config.rank is not None
    flat, adapters = _flat(thaw(freeze(config, params))), _flat(adapters)
    for path, a_DR in adapters.items():
        if path[-1] == A:
            kernel = (*path[:-1], "kernel")
            # By default GPU and TPU would round the factors to 10 and 7 bits.
            product_DF = jnp.matmul(a_DR, adapters[(*path[:-1], B)], precision="highest")
            flat[kernel] = flat[kernel] + config.alpha / config.rank * product_DF
    return traverse_util.unflatten_dict(flat)


def _kernels(flat: dict[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """Return the paths of the blocks' kernels."""
    return [path for path in flat if path[-1] == "kernel" and path[0] != "lm_head"]


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
    return traverse_util.flatten_dict(tree)  # type: ignore[return-value]
