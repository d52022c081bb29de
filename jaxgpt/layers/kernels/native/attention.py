"""Causal attention in C++ for CPUs, which this machine's own compiler builds on first use."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxgpt.errors import UserError
from jaxgpt.layers.kernels.native.build import why_not_native
from jaxgpt.layers.kernels.plain import DEFAULT_SCORES, Scores


def native_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    scores: Scores = DEFAULT_SCORES,
    *,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Attend like `plain_attention`, with its result and gradients to 1e-5. -> out_BTNH.

    A core takes a row and a key/value head, and a block of queries at a time. Their scores stay in its cache: no [T, S]
    array is written, and the backward pass computes them again (FlashAttention, Dao et al. 2022, arXiv:2205.14135).
    T and S are equal. The bits do not depend on the number of cores. Other types than float32 are converted.

    Raises `UserError` where `why_not_native` says why.
    """
    if (why := why_not_native()) is not None:
        raise UserError(f"there is no native attention here: {why}")
    ids_BT = jnp.zeros((0, 0), jnp.int32) if segments_BT is None else segments_BT.astype(jnp.int32)
    if scores.scale is None:
        scores = scores._replace(scale=q_BTNH.shape[-1] ** -0.5)
    out_BTNH = _attend(*(x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH)), ids_BT, scores)
    return out_BTNH.astype(v_BSKH.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ids_BT: jax.Array, scores: Scores) -> jax.Array:
    return _forward(q_BTNH, k_BSKH, v_BSKH, ids_BT, scores)[0]


def _forward(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ids_BT: jax.Array, scores: Scores) -> Any:
    B, T, N, _ = q_BTNH.shape
    shapes = (B, T, N, v_BSKH.shape[-1]), (B, N, T)  # the result, and the logarithm of each softmax's sum
    made = _call("forward", shapes, scores, q_BTNH, k_BSKH, v_BSKH, ids_BT)
    out_BTNH, lse_BNT = (checkpoint_name(x, "attention") for x in made)
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, ids_BT, out_BTNH, lse_BNT)


def _backward(scores: Scores, kept: tuple, dout_BTNH: jax.Array) -> tuple:
    return *_call("backward", tuple(x.shape for x in kept[:3]), scores, *kept, dout_BTNH), None


_attend.defvjp(_forward, _backward)


def _call(direction: str, shapes: tuple, scores: Scores, *arrays: jax.Array) -> Any:
    call = jax.ffi.ffi_call(f"jaxgpt_attention_{direction}", [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    window, softcap = scores.window or 0, scores.softcap or 0.0  # 0: all tokens, and no cap
    numbers = {"scale": np.float32(scores.scale), "window": np.int64(window)}
    return call(*arrays, **numbers, softcap=np.float32(softcap))
