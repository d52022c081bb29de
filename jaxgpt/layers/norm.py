"""Normalisation over the last axis, with statistics in float32.

The statistics, a number for each token, are saved under remat="dots", so that no kernel computes them again.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name


def layer_norm(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, eps: float) -> jax.Array:
    """Return `(x - mean) / sqrt(var + eps) * scale + bias` for each token. The variance divides by D.

    Ba, Kiros and Hinton 2016, arXiv:1607.06450. The result has x's dtype.
    """
    x32 = x_BTD.astype(jnp.float32)  # in bfloat16 the mean of 768 values is accurate to two digits
    out = rms_norm(x32 - checkpoint_name(x32.mean(axis=-1, keepdims=True), "statistics"), scale_D, eps)
    if bias_D is not None:
        out = out + jnp.broadcast_to(bias_D, x_BTD.shape)
    return out.astype(x_BTD.dtype)


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Return `x / sqrt(mean(x^2) + eps) * scale`: LayerNorm without the mean (arXiv:1910.07467)."""
    x32 = x_BTD.astype(jnp.float32)
    mean_square = checkpoint_name(jnp.mean(jnp.square(x32), axis=-1, keepdims=True), "statistics")
    out = x32 * jax.lax.rsqrt(mean_square + eps) * jnp.broadcast_to(scale_D, x_BTD.shape)
    return out.astype(x_BTD.dtype)


class LayerNorm(nn.Module):
    """`layer_norm` with a learned scale (gamma, from `first_scale`) and bias (beta, from 0). x_BTD -> x_BTD."""

    eps: float = 1e-5  # number added to the variance
    use_bias: bool = True  # there is a bias
    first_scale: float = 1.0  # initial value of the scale

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalise each token."""
        D = x_BTD.shape[-1]
        scale_D = self.param("scale", nn.initializers.constant(self.first_scale), (D,))
        bias_D = self.param("bias", nn.initializers.zeros, (D,)) if self.use_bias else None
        return layer_norm(x_BTD, scale_D, bias_D, self.eps)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned scale, from `first_scale`. x_BTD -> x_BTD."""

    eps: float = 1e-5  # number added to the mean square
    offset: bool = False  # the parameter is the scale minus 1
    first_scale: float = 1.0  # initial value of the scale

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalise each token."""
        init = nn.initializers.constant(self.first_scale - self.offset)
        scale_D = self.param("scale", init, (x_BTD.shape[-1],))
        if self.offset:
            scale_D = 1.0 + scale_D.astype(jnp.float32)
        return rms_norm(x_BTD, scale_D, self.eps)
