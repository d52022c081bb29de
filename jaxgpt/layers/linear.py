"""Matrices: linen's Dense and Embed, and the same matrices packed for decoding."""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


class Packed(flax.struct.PyTreeNode):
    """A matrix as decoding reads it: `y_NF = x_ND @ (values_FD * scale_F).T`, each output's weights side by side.

    Decoding reads every weight for a handful of rows, so its speed is that of memory. A parameter tree may hold a
    Packed under the name "packed" in place of a `kernel` or an `embedding`: `sample.weights` makes such trees.
    """

    values_FD: jax.Array  # float32, bfloat16, or int8
    scale_F: jax.Array  # float32; ones, but for int8: each row's largest magnitude / 127

    @staticmethod
    def of(matrix_FD: jax.Array, dtype: DTypeLike) -> Packed:
        matrix_FD = matrix_FD.astype(jnp.float32)
        if jnp.dtype(dtype) != jnp.int8:
            return Packed(matrix_FD.astype(dtype), jnp.ones(matrix_FD.shape[0]))
        return Packed(*to_int8(matrix_FD))

    def rows(self, index: jax.Array) -> jax.Array:
        """The matrix's rows in float32: index.shape + (D,)."""
        return self.values_FD[index].astype(jnp.float32) * self.scale_F[index][..., None]

    def product(self, x_ND: jax.Array) -> jax.Array:
        """x_ND @ matrix.T in float32, [N, F].

        float32 and bfloat16 round the inputs to the weights' type. int8 rounds them to 8 bits as well, each row by
        its largest magnitude (Dettmers et al. 2022, arXiv:2208.07339, without their outliers), since an integer
        product is the only one that XLA runs faster than float32 on CPU.
        """
        N, (F, _) = x_ND.shape[0], self.values_FD.shape
        last = (((1,), (1,)), ((), ()))
        if self.values_FD.dtype == jnp.int8:
            x8_ND, x_scale_N = to_int8(x_ND)
            if N == 1:  # one row takes XLA's plain loop on CPU, ten times slower than the product for two
                x8_ND = jnp.concatenate([x8_ND, x8_ND])
            y_NF = jax.lax.dot_general(x8_ND, self.values_FD, last, preferred_element_type=jnp.int32)[:N]
            return y_NF.astype(jnp.float32) * (x_scale_N[:, None] * self.scale_F[None])
        if self.values_FD.dtype == jnp.bfloat16:
            if N == 1:  # a fused multiply and sum: XLA's 16-bit dot of one row is ten times slower on CPU
                return jnp.sum(self.values_FD.astype(jnp.float32) * x_ND.astype(jnp.float32), axis=1)[None]
            return jax.lax.dot_general(
                x_ND.astype(jnp.bfloat16), self.values_FD, last, preferred_element_type=jnp.float32
            )
        # The matrix on the left: at 8 rows twice the speed of x @ matrix.T on CPU, and the same elsewhere. The scale
        # keeps XLA from turning the transposed product back into the slow one.
        y_FN = jax.lax.dot_general(self.values_FD, x_ND.astype(jnp.float32), last)
        return (y_FN * jnp.broadcast_to(self.scale_F[:, None], (F, N))).T


class Dense(nn.Dense):
    """linen's Dense over [B T, D] instead of [B, T, D]; or its packed form, where the parameters hold that."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if not self.has_variable("params", "packed"):
            return super().__call__(x_BTD)
        y_NF = self.get_variable("params", "packed").product(x_BTD.reshape(-1, x_BTD.shape[-1]))
        if self.use_bias:
            y_NF = y_NF + self.get_variable("params", "bias")[None]
        return y_NF.astype(self.dtype).reshape(*x_BTD.shape[:-1], self.features)


def take_rows(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    return jnp.take(table_VD, tokens_BT, axis=0)


class Embedding(nn.Module):
    """tokens -> vectors by rows of `embedding` [V, D], in float32; and vectors -> logits by the same rows."""

    vocab_size: int
    width: int
    embedding_init: nn.initializers.Initializer
    lookup: Callable[[jax.Array, jax.Array], jax.Array] = take_rows  # (table_VD, tokens_BT) -> x_BTD

    def setup(self) -> None:
        if self.has_variable("params", "packed"):
            self.packed = self.get_variable("params", "packed")
        else:
            self.packed = None
            shape = (self.vocab_size, self.width)
            self.embedding = self.param("embedding", self.embedding_init, shape, jnp.float32)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        if self.packed is not None:
            return self.packed.rows(tokens_BT)
        return self.lookup(self.embedding, tokens_BT).astype(jnp.float32)  # imported ones may be stored in 16 bits

    def logits(self, x_ND: jax.Array) -> jax.Array:
        """In float32 [N, V], whatever x's type: bfloat16 inputs, float32 sums."""
        if self.packed is not None:
            return self.packed.product(x_ND)
        return jnp.dot(x_ND, self.embedding.T.astype(x_ND.dtype), preferred_element_type=jnp.float32)


def dense(
    features: int,
    *,
    use_bias: bool,
    kernel_init: nn.initializers.Initializer,
    dtype: DTypeLike,
    name: str | None = None,
) -> Dense:
    """x_BTD -> x_BTF. Parameters `kernel` [D, F] and `bias` [F] in float32, arithmetic in `dtype`."""
    return Dense(
        features,
        use_bias=use_bias,
        kernel_init=kernel_init,
        dtype=dtype,
        param_dtype=jnp.float32,
        dot_general=_folded_dot_general,
        name=name,
    )


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


def to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(values in -127..127, scale without the last axis): x is about values * scale, up to half a step of scale."""
    scale = jnp.maximum(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / 127.0, 1e-12)  # zeros stay zeros
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale
