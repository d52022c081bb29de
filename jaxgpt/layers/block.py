"""One Transformer block: attention, then MLP, each added to the residual stream."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.layers.attention import CausalSelfAttention
from jaxgpt.layers.cache import LayerCache, Place
from jaxgpt.layers.linear import take_rows
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


class Spread(NamedTuple):
    """How a model's arrays lie on several devices: functions that the layers apply and do not look into."""

    rows: Callable[[jax.Array], jax.Array] = lambda x_BTD: x_BTD  # the same array, each row where its tokens are
    attend: Callable[[Callable], Callable] | None = None  # `attend`, run where its rows and heads are
    lookup: Callable[[jax.Array, jax.Array], jax.Array] = take_rows  # (table_VD, tokens_BT) -> x_BTD
    # a function (head, *arrays by rows) -> sums over the rows, added up where the rows are
    sums: Callable[[Callable], Callable] = lambda function: function


ON_ONE_DEVICE = Spread()


class Block(nn.Module):
    """x_BTD -> (x_BTD, cache). Pre-norm keeps the stream untouched from end to end; post-norm is 2017's Add & Norm."""

    config: GPTConfig
    attention: str = "plain"
    dtype: DTypeLike = jnp.float32
    spread: Spread = ON_ONE_DEVICE

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
            spread=self.spread.attend,
            name="attn",
            **shared,
        )
        mlp = MLP(hidden=c.mlp_hidden, activation=c.activation, name="mlp", **shared)
        norm_1, norm_2 = make_norm(c, "ln_1"), make_norm(c, "ln_2")
        pre = c.norm_position == "pre"

        out_BTD, cache = attn(norm_1(x_BTD) if pre else x_BTD, positions_BT, train=train, cache=cache, place=place)
        if pre:
            x_BTD = x_BTD + out_BTD
            x_BTD = x_BTD + mlp(norm_2(x_BTD), train=train)
        else:
            x_BTD = norm_1(x_BTD + out_BTD)
            x_BTD = norm_2(x_BTD + mlp(x_BTD, train=train))
        return self.spread.rows(x_BTD), cache
