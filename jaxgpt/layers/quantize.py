"""A weight matrix for decoding: row-major by output, in 32, 16 or 8 bits."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class DecodeMatrix(flax.struct.PyTreeNode):
    """A matrix in which the weights of one output are adjacent: `y_UF = x_UD @ (values_FD * scale_F).T`.

    Decoding reads every weight for a handful of tokens, so memory bandwidth limits its speed. A parameter tree may hold
    a DecodeMatrix named "decode_matrix" in place of a `kernel` or an `embedding`: `sample.quantize` makes such trees.
    """

    values_FD: jax.Array  # float32, bfloat16, or int8; an odd number of outputs has a row of zeros at the end
    scale_F: jax.Array  # float32: for int8 each row's largest magnitude / 127, else ones

    @staticmethod
    def quantize(matrix_FD: jax.Array, dtype: DTypeLike) -> DecodeMatrix:
        """Convert a matrix to float32, bfloat16 or int8."""
        values_FD, scale_F = matrix_FD.astype(jnp.float32), jnp.ones(matrix_FD.shape[0])
        if jnp.dtype(dtype) == jnp.int8:
            values_FD, scale_F = to_int8(values_FD)
        return DecodeMatrix(jnp.pad(values_FD.astype(dtype), ((0, len(scale_F) % 2), (0, 0))), scale_F)

    def take(self, index: jax.Array) -> jax.Array:
        """Return rows of the matrix in float32: index.shape + (D,)."""
        return self.values_FD[index].astype(jnp.float32) * self.scale_F[index][..., None]

    def matmul(self, x_UD: jax.Array) -> jax.Array:
        """Compute x_UD @ matrix.T in float32, [U, F].

        Inputs are rounded to the weights' type. For int8 each row of them is scaled by its largest magnitude (Dettmers
        et al. 2022, arXiv:2208.07339, without their outliers), since only an integer product is faster than float32
        on CPU. A row's result has the same bits whatever the other rows are and wherever it is among them.
        """
        if self.values_FD.dtype == jnp.int8:
            x_UD, x_scale_U = to_int8(x_UD)
        else:
            x_UD, x_scale_U = x_UD.astype(self.values_FD.dtype), jnp.ones(x_UD.shape[0])
        y_FU = jax.lax.platform_dependent(self.values_FD, x_UD, cpu=_multiply_on_cpu, default=_multiply)
        # The scale also keeps XLA from turning the float32 product into the slow x @ matrix.T.
        return (y_FU[: len(self.scale_F)].astype(jnp.float32) * (self.scale_F[:, None] * x_scale_U[None])).T


def _multiply(values_FD: jax.Array, x_UD: jax.Array) -> jax.Array:
    """Compute (x_UD @ values_FD.T).T in int32 if the values are integers, else in float32."""
    return _dot(x_UD, values_FD).T


def _multiply_on_cpu(values_FD: jax.Array, x_UD: jax.Array) -> jax.Array:
    """Compute `_multiply` by the form that XLA on CPU runs fastest.

    x @ values.T reorders the whole matrix first, which costs more than a few rows' product does. With the matrix on
    the left XLA reorders x. With two halves of it as a batch it also uses all cores for one row (27 GB/s of weights
    instead of 21), and never falls back to float32 for bfloat16 (42 GB/s instead of 30, in units of 4 bytes). A step of
    GPT-2 124M in float32 takes 33.3 ms in halves and 34.0 without at 4 rows, 42.6 and 41.1 at 8, 57.9 and 54.7 at 16.
    """
    U, (F, D), is_float32 = x_UD.shape[0], values_FD.shape, values_FD.dtype == jnp.float32
    most = 4 if is_float32 else 16  # rows that halves are faster for
    if most < U:
        return _dot(values_FD, x_UD) if is_float32 else _multiply(values_FD, x_UD)
    if U == 1 and not is_float32:  # one row takes XLA's plain loop, ten times slower than the product for two
        x_UD = jnp.concatenate([x_UD, x_UD])
    halves = values_FD.reshape(2, F // 2, D)
    y_2FU = _dot(halves, jnp.broadcast_to(x_UD, (2, *x_UD.shape)), batch=(0,))
    return y_2FU.reshape(F, -1)[:, :U]


def _dot(left: jax.Array, right: jax.Array, batch: tuple[int, ...] = ()) -> jax.Array:
    """Contract the last axes of two arrays, in int32 if they are integers, else in float32."""
    last = left.ndim - 1
    out = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
    return jax.lax.dot_general(left, right, (((last,), (last,)), (batch, batch)), preferred_element_type=out)


def to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (values in -127..127, scale without the last axis): x is values * scale, up to half a step of scale."""
    scale = jnp.maximum(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / 127.0, 1e-12)  # zeros stay zeros
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale
