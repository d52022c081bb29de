"""Convert parameters to the form that decodes fastest: unstacked layers, one matrix for q, k and v, in 32, 16 or 8 bits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jaxgpt.config import Precision
from jaxgpt.errors import UserError
from jaxgpt.layers.attention import QKV
from jaxgpt.layers.linear import DECODE_MATRIX
from jaxgpt.layers.quantize import DecodeMatrix
from jaxgpt.model import GPT


def for_decoding(model: GPT, params: dict, weights: Precision | None = None) -> tuple[GPT, dict]:
    """Return (model, params) in the form that decodes fastest, for `generate` and `score`; not for training.

    The result has a copy of the matrices, so drop the trained `params` where memory matters. `weights` is "float32";
    "bfloat16", half the memory; or "int8", a quarter, with one scale per output and inputs rounded to 8 bits too. None
    means the model's dtype. Norms, biases and learned positions stay in float32.
    """
    if weights not in (None, *get_args(Precision)):
        raise UserError(f"weights={weights!r}: needs one of {', '.join(get_args(Precision))}")
    table = params["wte"].get(DECODE_MATRIX)
    if table is not None:
        held = table.values_FD.dtype.name
        if weights not in (None, held):
            raise UserError(f"weights={weights!r}: these are {held} already; start from the trained ones")
        return model, params
    model, params = unstack_layers(model, params)
    return model, _quantize(params, weights or jnp.dtype(model.dtype).name)


def unstack_layers(model: GPT, params: dict) -> tuple[GPT, dict]:
    """Return the model without `scan_layers`, and its parameters with one tree per layer."""
    if not model.config.scan_layers:
        return model, params
    layers = params["h"]["block"]
    rest = {name: value for name, value in params.items() if name != "h"}
    each = {f"h_{i}": jax.tree.map(lambda stack, i=i: stack[i], layers) for i in range(model.config.n_layer)}
    return model.clone(config=dataclasses.replace(model.config, scan_layers=False)), rest | each


@functools.partial(jax.jit, static_argnums=1)
def _quantize(params: dict, dtype: str) -> dict:
    def quantize(name: str, value: Any) -> tuple[str, Any]:
        if isinstance(value, dict):
            if name == "attn" and "kernel" in value["q"]:
                qkv = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-1), *(value[part] for part in "qkv"))
                value = {QKV: qkv} | {k: v for k, v in value.items() if k not in ("q", "k", "v")}
            if "kernel" in value:
                rest = {k: v for k, v in value.items() if k != "kernel"}
                return name, rest | {DECODE_MATRIX: DecodeMatrix.quantize(value["kernel"].T, dtype)}
            if name == "wte" and "embedding" in value:
                return name, {DECODE_MATRIX: DecodeMatrix.quantize(value["embedding"], dtype)}
            return name, dict(quantize(k, v) for k, v in value.items())
        if name == "lm_head":
            return f"lm_head_{DECODE_MATRIX}", DecodeMatrix.quantize(value.T, dtype)
        return name, value

    return dict(quantize(name, value) for name, value in params.items())
