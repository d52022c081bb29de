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

    values_FD: jax.Array  # float32, bfloat16, or int8
    scale_F: jax.Array  # float32: for int8 each row's largest magnitude / 127, else ones

    @staticmethod
    def quantize(matrix_FD: jax.Array, dtype: DTypeLike) -> DecodeMatrix:
        """Convert a matrix to float32, bfloat16 or int8."""
        matrix_FD = matrix_FD.astype(jnp.float32)
        if jnp.dtype(dtype) != jnp.int8:
            return DecodeMatrix(matrix_FD.astype(dtype), jnp.ones(matrix_FD.shape[0]))
        return DecodeMatrix(*to_int8(matrix_FD))

    def take(self, index: jax.Array) -> jax.Array:
        """Return rows of the matrix in float32: index.shape + (D,)."""
        return self.values_FD[index].astype(jnp.float32) * self.scale_F[index][..., None]

    def matmul(self, x_UD: jax.Array) -> jax.Array:
        """Compute x_UD @ matrix.T in float32, [U, F].

        Inputs are rounded to the weights' type. For int8 each row of them is scaled by its largest magnitude (Dettmers
        et al. 2022, arXiv:2208.07339, without their outliers), since only an integer product is faster than float32
        on CPU.
        """
        U, (F, _) = x_UD.shape[0], self.values_FD.shape
        last = (((1,), (1,)), ((), ()))
        if self.values_FD.dtype == jnp.int8:
            x8_UD, x_scale_U = to_int8(x_UD)
            if U == 1:  # one row takes XLA's plain loop on CPU, ten times slower than the product for two
                x8_UD = jnp.concatenate([x8_UD, x8_UD])
            y_UF = jax.lax.dot_general(x8_UD, self.values_FD, last, preferred_element_type=jnp.int32)[:U]
            return y_UF.astype(jnp.float32) * (x_scale_U[:, None] * self.scale_F[None])
        if self.values_FD.dtype == jnp.bfloat16:
            if U == 1:  # a fused multiply and sum: XLA's 16-bit dot of one row is ten times slower on CPU
                return jnp.sum(self.values_FD.astype(jnp.float32) * x_UD.astype(jnp.float32), axis=1)[None]
            return jax.lax.dot_general(
                x_UD.astype(jnp.bfloat16), self.values_FD, last, preferred_element_type=jnp.float32
            )
        # The matrix on the left: at 8 rows twice the speed of x @ matrix.T on CPU, and the same elsewhere. The scale
        # keeps XLA from turning the transposed product back into the slow one.
        y_FU = jax.lax.dot_general(self.values_FD, x_UD.astype(jnp.float32), last)
        return (y_FU * jnp.broadcast_to(self.scale_F[:, None], (F, U))).T


def to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (values in -127..127, scale without the last axis): x is values * scale, up to half a step of scale."""
    scale = jnp.maximum(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / 127.0, 1e-12)  # zeros stay zeros
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale
