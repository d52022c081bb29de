"""A Transformer block: attention, then MLP, each added to the residual stream."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.hooks import NO_SHARDING, ShardingHooks
from jaxgpt.layers.kernels.plain import AttentionFn, plain_attention
from jaxgpt.layers.linear import INIT_STD
from jaxgpt.layers.mlp import MLP
from jaxgpt.layers.norm import LayerNorm, RMSNorm
from jaxgpt.layers.position import Rope

if TYPE_CHECKING:
    from jaxgpt.layers.cache import CacheIndex, LayerCache


def make_norm(config: GPTConfig, name: str | None = None, *, first_scale: float = 1.0) -> nn.Module:
    """Return the norm of the residual stream."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.norm_eps, offset=config.norm_offset, first_scale=first_scale, name=name)
    return LayerNorm(config.norm_eps, use_bias=config.bias, first_scale=first_scale, name=name)


def make_rope(config: GPTConfig, window: int | None) -> Rope | None:
    """Return the rotation of a layer with this window (None: a global layer), or None without rope."""
    if config.position != "rope":
        return None
    assert config.head_dim
    size = int(config.head_dim * config.rope_fraction)
    if window is not None and config.rope_local_theta is not None:
        return Rope(size, config.rope_local_theta)
    return Rope(
        size,
        config.rope_theta,
        config.rope_scaling,
        config.rope_factor,
        config.rope_low_freq_factor,
        config.rope_high_freq_factor,
        config.rope_original_context,
    )


def kernel_init(config: GPTConfig, branches: int = 1) -> nn.initializers.Initializer:
    """Return the initialiser of matrices whose outputs are summed over some branches; for muP see `optim`."""
    return nn.initializers.normal(INIT_STD * math.sqrt(config.width_ratio) / math.sqrt(branches))


def residual_init(config: GPTConfig) -> nn.initializers.Initializer:
    """Return the initialiser of the 2 n_layer projections that write into the residual stream.

    With "scaled" their sum has the variance of one (GPT-2, Radford et al. 2019, section 2.3). With "zero" every block
    starts as the identity, so that depth does not slow down the first steps.
    """
    if config.residual_init == "zero":
        return nn.initializers.zeros
    return kernel_init(config, 2 * config.n_layer)


def attention_fields(config: GPTConfig) -> dict[str, Any]:
    """Return the fields that all attention modules of a model share. config: of `GPTConfig.explicit`."""
    assert config.query_scale
    return {
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "n_kv_head": config.n_kv_head,
        "head_dim": config.head_dim,
        "qkv_bias": config.qkv_bias,
        "out_bias": config.out_bias,
        "dropout": config.dropout,
        "qk_norm": config.qk_norm_over if config.qk_norm else None,
        "make_norm": functools.partial(RMSNorm, config.norm_eps, offset=config.norm_offset),
        "scale": config.query_scale**-0.5,
        "softcap": config.attention_softcap,
        "kernel_init": kernel_init(config),
        "residual_init": residual_init(config),
    }


class Block(nn.Module):
    """A block, x_BTD -> x_BTD: attention, then MLP, each a branch f of the residual stream x.

    By `norm_position`, the sum is pre: x + f(norm(x)), which never norms the stream itself; post: norm(x + f(x)), the
    Add & Norm of 2017; output: x + norm(f(x)), as in OLMo 2; sandwich: x + norm(f(norm(x))).
    """

    config: GPTConfig
    dtype: DTypeLike = jnp.float32
    attention_fn: AttentionFn = plain_attention
    sharding: ShardingHooks = NO_SHARDING
    window: int | None = None  # tokens that each token attends to. None means all
    causal: bool = True  # False in an encoder, whose tokens also attend to later ones

    def setup(self) -> None:
        """Create attention, MLP and norms."""
        c = self.config.explicit()
        assert c.mlp_dim
        self.attn = Attention(
            **attention_fields(c),
            rope=make_rope(c, self.window),
            window=self.window,
            causal=self.causal,
            attention_fn=self.attention_fn,
            dtype=self.dtype,
        )
        self.mlp = MLP(
            hidden=c.mlp_dim,
            activation=c.activation,
            use_bias=c.bias,
            dropout=c.dropout,
            kernel_init=kernel_init(c),
            residual_init=residual_init(c),
            dtype=self.dtype,
        )
        self.ln_1, self.ln_2 = make_norm(c), make_norm(c)
        if c.norm_position == "sandwich":
            self.ln_1_out, self.ln_2_out = make_norm(c), make_norm(c)

    # Arguments are positional: nn.remat takes `train` by its position.
    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array | None = None,
        train: bool = False,
        segments_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Return the residual stream after both branches. Arguments: see `Attention`."""
        read_BTD = self.norm_input(x_BTD, "ln_1")
        out_BTD = self.attn(read_BTD, positions_BT, segments_BT=segments_BT, train=train)
        return self.feed_forward(x_BTD, self.add_output(x_BTD, out_BTD, "ln_1"), train)

    def decode(self, x_BTD: jax.Array, cache: LayerCache, index: CacheIndex) -> tuple[jax.Array, LayerCache]:
        """Return the stream of T new tokens, and the updated cache. Arguments: see `Attention.decode`."""
        out_BTD, cache = self.attn.decode(self.norm_input(x_BTD, "ln_1"), cache, index)
        return self.feed_forward(x_BTD, self.add_output(x_BTD, out_BTD, "ln_1")), cache

    def feed_forward(self, entered_BTD: jax.Array, x_BTD: jax.Array, train: bool = False) -> jax.Array:
        """Add the MLP's branch. entered_BTD: the stream before attention, which parallel_residual reads."""
        read_BTD = entered_BTD if self.config.parallel_residual else x_BTD
        out_BTD = self.mlp(self.norm_input(read_BTD, "ln_2"), train=train)
        return self.sharding.constrain(self.add_output(x_BTD, out_BTD, "ln_2"))

    def norm_input(self, x_BTD: jax.Array, norm: str) -> jax.Array:
        """Return the input of a branch: the stream, normed where `norm_position` puts a norm before it."""
        return getattr(self, norm)(x_BTD) if self.config.norm_position in ("pre", "sandwich") else x_BTD

    def add_output(self, x_BTD: jax.Array, out_BTD: jax.Array, norm: str) -> jax.Array:
        """Add the output of a branch to the stream, with the norm that `norm_position` puts after it."""
        if self.config.norm_position == "post":
            return getattr(self, norm)(x_BTD + out_BTD)
        if self.config.norm_position == "output":
            out_BTD = getattr(self, norm)(out_BTD)
        elif self.config.norm_position == "sandwich":
            out_BTD = getattr(self, f"{norm}_out")(out_BTD)
        return x_BTD + out_BTD
