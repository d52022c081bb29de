"""Hooks by which a model on several devices differs from a model on one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

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
