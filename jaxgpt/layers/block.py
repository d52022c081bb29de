"""One Transformer block: attention, then MLP, each added to the residual stream."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.layers.attention import CausalSelfAttention
from jaxgpt.layers.cache import LayerCache, Place
from jaxgpt.layers.mlp import MLP
from jaxgpt.layers.norm import LayerNorm, RMSNorm

INIT_STD = 0.02  # GPT-2's, for every matrix and embedding


def make_norm(config: GPTConfig, name: str) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.norm_eps, name=name)
    return LayerNorm(config.norm_eps, use_bias=config.bias, name=name)


def residual_init(config: GPTConfig) -> nn.initializers.Initializer:
    """Of the 2 n_layer projections that write into the residual stream.

    "scaled": their sum keeps the variance of one (GPT-2, Radford et al. 2019, section 2.3).
    "zero": every block starts as the identity, so that depth costs nothing at the first steps.
    """
    if config.residual_init == "zero":
        return nn.initializers.zeros
    return nn.initializers.normal(INIT_STD / math.sqrt(2 * config.n_layer))


class Block(nn.Module):
    """x_BTD -> (x_BTD, cache). Pre-norm keeps the stream untouched from end to end; post-norm is 2017's Add & Norm."""

    config: GPTConfig
    attention: str = "plain"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        train: bool = False,
        cache: LayerCache | None = None,
        place: Place | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        shared = {
            "use_bias": c.bias,
            "dropout": c.dropout,
            "kernel_init": nn.initializers.normal(INIT_STD),
            "residual_init": residual_init(c),
            "dtype": self.dtype,
        }
        attn = CausalSelfAttention(
            n_head=c.n_head,
            n_kv_head=c.kv_heads,
            qk_norm=c.qk_norm,
            norm_eps=c.norm_eps,
            rope_theta=c.rope_theta if c.position == "rope" else None,
            kernel=self.attention,
            name="attn",
            **shared,
        )
        mlp = MLP(hidden=c.mlp_hidden, activation=c.activation, name="mlp", **shared)
        norm_1, norm_2 = make_norm(c, "ln_1"), make_norm(c, "ln_2")
        pre = c.norm_position == "pre"

        out_BTD, cache = attn(norm_1(x_BTD) if pre else x_BTD, positions_BT, train=train, cache=cache, place=place)
        if pre:
            x_BTD = x_BTD + out_BTD
            return x_BTD + mlp(norm_2(x_BTD), train=train), cache
        x_BTD = norm_1(x_BTD + out_BTD)
        return norm_2(x_BTD + mlp(x_BTD, train=train)), cache
