"""One Transformer block: attention, then MLP, each added to the residual stream."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.cache import LayerCache, Place
from jaxgpt.layers.hooks import NO_SHARDING, ShardingHooks
from jaxgpt.layers.kernels.plain import AttentionFn, plain_attention
from jaxgpt.layers.mlp import MLP
from jaxgpt.layers.norm import LayerNorm, RMSNorm
from jaxgpt.layers.position import Rope

INIT_STD = 0.02  # GPT-2's, for every matrix and embedding


def make_norm(config: GPTConfig, name: str | None = None) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.norm_eps, offset=config.norm_offset, name=name)
    return LayerNorm(config.norm_eps, use_bias=config.bias, name=name)


def make_rope(config: GPTConfig, window: int | None) -> Rope | None:
    """The rotations of a layer that reads `window` tokens, None: all."""
    if config.position != "rope":
        return None
    if window is not None and config.rope_local_theta is not None:
        return Rope(config.rotary_size, config.rope_local_theta)
    return Rope(
        config.rotary_size,
        config.rope_theta,
        config.rope_scaling,
        config.rope_factor,
        config.rope_low_freq_factor,
        config.rope_high_freq_factor,
        config.rope_original_context,
    )


def residual_init(config: GPTConfig) -> nn.initializers.Initializer:
    """Of the 2 n_layer projections that write into the residual stream.

    "scaled": their sum keeps the variance of one (GPT-2, Radford et al. 2019, section 2.3).
    "zero": every block starts as the identity, so that depth costs nothing at the first steps.
    """
    if config.residual_init == "zero":
        return nn.initializers.zeros
    return nn.initializers.normal(INIT_STD / math.sqrt(2 * config.n_layer))


class Block(nn.Module):
    """x_BTD -> (x_BTD, cache): branches, f, each added to the residual stream x, as `norm_position` says.

    pre: x + f(norm(x)), which leaves the stream untouched from end to end. post: norm(x + f(x)), 2017's Add & Norm.
    output: x + norm(f(x)). sandwich: x + norm(f(norm(x))). window: tokens that attention reads; None: all.
    The branches are attention and the MLP; between them, with `reads_memory`, attention to an encoder's text.
    causal: False in an encoder, whose tokens read those after them too.
    """

    config: GPTConfig
    attention_fn: AttentionFn = plain_attention
    dtype: DTypeLike = jnp.float32
    sharding: ShardingHooks = NO_SHARDING
    window: int | None = None
    causal: bool = True
    reads_memory: bool = False

    def setup(self) -> None:
        c = self.config
        shared = {
            "dropout": c.dropout,
            "kernel_init": nn.initializers.normal(INIT_STD),
            "residual_init": residual_init(c),
            "dtype": self.dtype,
        }
        attention = functools.partial(
            Attention,
            n_embd=c.n_embd,
            n_head=c.n_head,
            n_kv_head=c.kv_heads,
            head_dim=c.head_size,
            qkv_bias=c.has_qkv_bias,
            out_bias=c.has_out_bias,
            qk_norm=c.qk_norm_over if c.qk_norm else None,
            make_norm=functools.partial(RMSNorm, c.norm_eps, offset=c.norm_offset),
            scale=None if c.query_scale is None else c.query_scale**-0.5,
            softcap=c.attention_softcap,
            attention_fn=self.attention_fn,
            **shared,
        )
        self.attn = attention(rope=make_rope(c, self.window), window=self.window, causal=self.causal)
        self.ln_1, self.ln_2 = make_norm(c), make_norm(c)
        if self.reads_memory:
            # Places in two texts have no distance, so that nothing is rotated.
            self.cross, self.ln_cross = attention(rope=None, window=None, causal=False), make_norm(c)
        if c.norm_position == "sandwich":
            self.ln_1_out, self.ln_2_out = make_norm(c), make_norm(c)
            if self.reads_memory:
                self.ln_cross_out = make_norm(c)
        self.mlp = MLP(hidden=c.mlp_hidden, activation=c.activation, use_bias=c.bias, **shared)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        train: bool = False,
        cache: LayerCache | None = None,
        place: Place | None = None,
        segments_BT: jax.Array | None = None,
        memory: jax.Array | LayerCache | None = None,
        memory_segments_BS: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config

        def attend(x_BTD: jax.Array) -> jax.Array:
            nonlocal cache
            out_BTD, cache = self.attn(
                x_BTD, positions_BT, train=train, cache=cache, place=place, segments_BT=segments_BT
            )
            return out_BTD

        def look_up(x_BTD: jax.Array) -> jax.Array:
            assert memory is not None, "without a text to read, this would read its own"
            read = {"memory": memory, "memory_segments_BS": memory_segments_BS, "segments_BT": segments_BT}
            return self.cross(x_BTD, positions_BT, train=train, **read)[0]

        def feed_forward(x_BTD: jax.Array) -> jax.Array:
            return self.mlp(x_BTD, train=train)

        branches = [("ln_1", attend), *([("ln_cross", look_up)] if self.reads_memory else []), ("ln_2", feed_forward)]
        entered_BTD = x_BTD
        for name, branch in branches:
            norm = getattr(self, name)
            if c.parallel_residual:
                x_BTD = x_BTD + branch(norm(entered_BTD))
            elif c.norm_position == "pre":
                x_BTD = x_BTD + branch(norm(x_BTD))
            elif c.norm_position == "post":
                x_BTD = norm(x_BTD + branch(x_BTD))
            elif c.norm_position == "output":
                x_BTD = x_BTD + norm(branch(x_BTD))
            else:
                x_BTD = x_BTD + getattr(self, f"{name}_out")(branch(norm(x_BTD)))
        return self.sharding.constrain(x_BTD), cache
