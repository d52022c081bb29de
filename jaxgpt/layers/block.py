"""A Transformer block: attention, then MLP, each added to the residual stream. `Compute` is what depends on hardware."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.layers.kernels.plain import AttentionFn, plain_attention
from jaxgpt.layers.linear import take_rows


class ShardingHooks(NamedTuple):
    """Functions that shard a model's arrays over a mesh. The defaults do nothing."""

    constrain: Callable[[jax.Array], jax.Array] = lambda x: x  # x_BTD -> x_BTD with the batch's sharding
    embed: Callable[[jax.Array, jax.Array], jax.Array] = take_rows  # (table_VD, tokens_BT) -> x_BTD
    # wraps a function (params, *arrays of B rows) -> sums over the rows, to sum each device's rows, then over devices
    reduce_loss: Callable[[Callable], Callable] = lambda x: x


NO_SHARDING = ShardingHooks()  #: the functions of `ShardingHooks` that do nothing
# Prefix of the name of cuDNN's forward primitive, by which a remat policy recognises it: JAX does not name its result,
# and its residuals cannot be named from outside.
CUDNN_FORWARD = "dot_product_attention_fwd"


class Compute(NamedTuple):
    """How modules compute, which is not part of the architecture: `GPTConfig.make_...` hand it to what they build."""

    dtype: DTypeLike = jnp.float32  # dtype of activations and matrix products
    attention_fn: AttentionFn = plain_attention  # the kernel of causal attention
    sharding: ShardingHooks = NO_SHARDING  # the sharding of arrays on a mesh


class Block(nn.Module):
    """A block, x_BTD -> x_BTD, with the parts that `config` makes. See `GPTConfig.norm_position` and `parallel_residual`.

    >>> from jaxgpt.model import GPTConfig
    >>> block = Block(GPTConfig(n_head=2, n_embd=8))
    """

    config: Any  # a GPTConfig: the architecture, which makes attention, MLP and norms
    layer: int = 0  # number of the block, from 0. With scan_layers it is 0 for all of them
    compute: Compute = Compute()  # dtype, kernel and sharding

    def setup(self) -> None:
        """Create attention, MLP and norms."""
        c = self.config
        self.attn = c.make_attention(self.layer, self.compute)
        self.mlp = c.make_mlp(self.layer, self.compute)
        self.ln_1, self.ln_2 = c.make_norm(), c.make_norm()
        if c.norm_position == "sandwich":
            self.ln_1_out, self.ln_2_out = c.make_norm(), c.make_norm()

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array | None = None,
        *,
        segments_BT: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Return the residual stream after both branches. Arguments: see `Attention`."""

        def attend(x_BTD: jax.Array) -> jax.Array:
            return self.attn(x_BTD, positions_BT, segments_BT=segments_BT, train=train)

        def feed(x_BTD: jax.Array) -> jax.Array:
            return self.mlp(x_BTD, train=train)

        position = self.config.norm_position
        if position == "pre":  # the stream itself is never normed
            middle_BTD = self.middle(x_BTD + attend(self.ln_1(x_BTD)))
            # Parallel branches both read what enters the block.
            read_BTD = x_BTD if self.config.parallel_residual else middle_BTD
            x_BTD = middle_BTD + feed(self.ln_2(read_BTD))
        elif position == "post":  # the Add & Norm of 2017
            x_BTD = self.middle(self.ln_1(x_BTD + attend(x_BTD)))
            x_BTD = self.ln_2(x_BTD + feed(x_BTD))
        elif position == "output":
            x_BTD = self.middle(x_BTD + self.ln_1(attend(x_BTD)))
            x_BTD = x_BTD + self.ln_2(feed(x_BTD))
        else:  # sandwich
            x_BTD = self.middle(x_BTD + self.ln_1_out(attend(self.ln_1(x_BTD))))
            x_BTD = x_BTD + self.ln_2_out(feed(self.ln_2(x_BTD)))
        return self.compute.sharding.constrain(x_BTD)

    def middle(self, x_BTD: jax.Array) -> jax.Array:
        """Return the stream between attention and MLP as it is: a method, so that `nn.intercept_methods` sees it."""
        return x_BTD


def remat(run_block: Callable[..., jax.Array], kind: str, *, is_scanned: bool) -> Any:
    """Return `run_block`, a function of a module and x_BTD, recomputed in the backward pass: see `GPTConfig.remat`."""
    if kind == "none":
        return run_block
    policy = _kept_with_dots if kind == "dots" else None
    return nn.remat(run_block, policy=policy, prevent_cse=not is_scanned)


def _kept_with_dots(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether remat="dots" keeps a result: of dense layers, of attention kernels and the norms' statistics.

    The plain kernel then recomputes the attention weights, which are not kept.
    """
    policies = jax.checkpoint_policies
    return (
        primitive.name.startswith(CUDNN_FORWARD)
        or policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params)
        or policies.save_only_these_names("attention", "statistics")(primitive, *avals, **params)
    )
