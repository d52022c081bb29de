"""Linen's Dense, with its product over [B T, D] instead of [B, T, D]."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


def _folded_dot_general(x, kernel, dimension_numbers, precision=None, preferred_element_type=None):
    """`lax.dot_general` of x's last axis with kernel's first, x's other axes folded into one.

    XLA on CPU runs the gradient of a product over three axes almost twice as slowly as over two: an MLP's
    7.3 ms against 3.9 ms at B=12, T=64, D=128. On GPU and TPU the two are the same program.
    """
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), dimension_numbers
    out = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), precision, preferred_element_type
    )
    return out.reshape(*x.shape[:-1], kernel.shape[-1])


def dense(
    features: int, *, use_bias: bool, kernel_init: nn.initializers.Initializer, dtype: DTypeLike, name: str
) -> nn.Dense:
    """x_BTD -> x_BTF. Parameters `kernel` [D, F] and `bias` [F] in float32, arithmetic in `dtype`."""
    return nn.Dense(
        features,
        use_bias=use_bias,
        kernel_init=kernel_init,
        dtype=dtype,
        param_dtype=jnp.float32,
        dot_general=_folded_dot_general,
        name=name,
    )
