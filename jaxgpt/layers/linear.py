"""Dense layers and embeddings, over trained matrices or over a `DecodeMatrix`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

INIT_STD = 0.02  # GPT-2's, for every matrix and embedding
DECODE_MATRIX = "decode_matrix"  # name of a `quantize.DecodeMatrix` in the parameters
INT8_SCALE = "kernel_scale"  # name of the scale [F] of an int8 kernel [D, F], which is not trained
LORA_A, LORA_B = "lora_a", "lora_b"  # names of an adapter's matrices in the parameters: see `jaxgpt.lora`


def _dot_general(x, kernel, dimension_numbers, precision=None, preferred_element_type=None):
    """Contract x's last axis with kernel's first, like `lax.dot_general`, with x's other axes folded into one.

    XLA on CPU runs the gradient of a product over three axes almost twice as slowly as over two: an MLP's
    7.3 ms against 3.9 ms at B=12, T=64, D=128. On GPU and TPU the two are the same program.
    """
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), dimension_numbers
    out = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), precision, preferred_element_type
    )
    return out.reshape(*x.shape[:-1], kernel.shape[-1])


def _matmul(x_BTD: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    return _dot_general(x_BTD, kernel_DF, (((x_BTD.ndim - 1,), (0,)), ((), ())))


@jax.checkpoint  # otherwise each layer would keep its kernel in x's dtype for the backward pass
def _int8_matmul(x_BTD: jax.Array, kernel_DF: jax.Array, scale_F: jax.Array) -> jax.Array:
    y_UF = x_BTD.reshape(-1, x_BTD.shape[-1]) @ kernel_DF.astype(x_BTD.dtype) * scale_F.astype(x_BTD.dtype)[None]
    return y_UF.reshape(*x_BTD.shape[:-1], -1)


class Dense(nn.Dense):
    """linen's Dense, x_BTD -> x_BTF: `kernel` [D, F] and `bias` [F] in float32, arithmetic in `dtype`.

    With an adapter in the parameters, (x_BTD @ lora_a [D, R]) @ lora_b [R, F] is added: its gradient takes two narrow
    products, and none by the kernel's shape.
    """

    dtype: Any = jnp.float32
    dot_general: Any = _dot_general

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Compute x_BTD @ kernel + bias."""
        if self.has_variable("params", DECODE_MATRIX):
            return self._decode(x_BTD)
        if self.has_variable("params", INT8_SCALE):
            kernel_DF, scale_F = (self.get_variable("params", name) for name in ("kernel", INT8_SCALE))
            y_BTF = _int8_matmul(x_BTD.astype(self.dtype), kernel_DF, scale_F)
            if self.use_bias:
                y_BTF = y_BTF + self.get_variable("params", "bias").astype(self.dtype)[None, None]
        else:
            y_BTF = super().__call__(x_BTD)
        if self.has_variable("params", LORA_A):
            a_DR, b_RF = (self.get_variable("params", name).astype(self.dtype) for name in (LORA_A, LORA_B))
            y_BTF = y_BTF + _matmul(_matmul(x_BTD.astype(self.dtype), a_DR), b_RF)
        return y_BTF

    def _decode(self, x_BTD: jax.Array) -> jax.Array:
        y_UF = self.get_variable("params", DECODE_MATRIX).matmul(x_BTD.reshape(-1, x_BTD.shape[-1]))
        if self.use_bias:
            y_UF = y_UF + self.get_variable("params", "bias")[None]
        return y_UF.astype(self.dtype).reshape(*x_BTD.shape[:-1], self.features)


@jax.custom_vjp
def float32_logits(x_UD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    """Compute x_UD @ kernel_DV in x's dtype with float32 sums; bfloat16 logits would shift the loss by 0.1%.

    The gradient is rounded to x's dtype: products with a float32 gradient would run at a fraction of the speed.
    """
    return jnp.dot(x_UD, kernel_DV.astype(x_UD.dtype), preferred_element_type=jnp.float32)


def _float32_logits_backward(residuals, grad_UV):
    x_UD, kernel_DV = residuals
    x_grad_UD, kernel_grad_DV = jax.vjp(jnp.dot, x_UD, kernel_DV.astype(x_UD.dtype))[1](grad_UV.astype(x_UD.dtype))
    return x_grad_UD, kernel_grad_DV.astype(kernel_DV.dtype)


float32_logits.defvjp(
    lambda x_UD, kernel_DV: (float32_logits(x_UD, kernel_DV), (x_UD, kernel_DV)), _float32_logits_backward
)


def take_rows(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the row of each token, x_BTD."""
    return jnp.take(table_VD, tokens_BT, axis=0)


class Embedding(nn.Module):
    """Token embedding by the rows of `embedding` [V, D], in float32, and logits by the same rows."""

    vocab_size: int
    width: int
    embedding_init: nn.initializers.Initializer = nn.initializers.normal(INIT_STD)
    lookup: Callable[[jax.Array, jax.Array], jax.Array] = take_rows  # (table_VD, tokens_BT) -> x_BTD

    def setup(self) -> None:
        """Create `embedding`, unless the parameters have a decode matrix."""
        self.matrix = self.get_variable("params", DECODE_MATRIX)
        if self.matrix is None:
            shape = (self.vocab_size, self.width)
            self.embedding = self.param("embedding", self.embedding_init, shape, jnp.float32)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Return the embeddings of tokens, x_BTD, in float32."""
        if self.matrix is not None:
            return self.matrix.take(tokens_BT)
        return self.lookup(self.embedding, tokens_BT).astype(jnp.float32)  # imported ones may have 16 bits

    def logits(self, x_UD: jax.Array) -> jax.Array:
        """Return logits_UV in float32: in bfloat16 too, sums are float32."""
        if self.matrix is not None:
            return self.matrix.matmul(x_UD)
        return float32_logits(x_UD, self.embedding.T)
