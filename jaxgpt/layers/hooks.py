"""What a model takes from the hardware it runs on: dtype, attention kernel, and hooks for several devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.layers.kernels.plain import AttentionFn, plain_attention
from jaxgpt.layers.linear import take_rows


def _identity(value: Any) -> Any:
    return value


class ShardingHooks(NamedTuple):
    """Functions that shard a model's arrays over a mesh. The defaults do nothing."""

    constrain: Callable[[jax.Array], jax.Array] = _identity  # x_BTD -> x_BTD with the batch's sharding
    embed: Callable[[jax.Array, jax.Array], jax.Array] = take_rows  # (table_VD, tokens_BT) -> x_BTD
    # wraps a function (params, *arrays of B rows) -> sums over the rows, to sum each device's rows, then over devices
    reduce_loss: Callable[[Callable], Callable] = _identity


NO_SHARDING = ShardingHooks()


class Compute(NamedTuple):
    """How modules compute, which is not part of the architecture: `GPTConfig.make_...` hand it to what they build."""

    dtype: DTypeLike = jnp.float32  # of activations and matrix products
    attention_fn: AttentionFn = plain_attention  # the kernel of causal attention
    sharding: ShardingHooks = NO_SHARDING
