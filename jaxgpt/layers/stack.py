"""Stacks of blocks: recomputed in the backward pass (gradient checkpointing), or compiled once and scanned."""

from typing import Any

import jax
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.layers.hooks import ShardingHooks
from jaxgpt.layers.kernels.plain import AttentionFn
from jaxgpt.layers.saved import CUDNN_FORWARD, SAVED_NAME


def remat(block: type[nn.Module], config: GPTConfig) -> Any:
    """Return `block`, recomputed in the backward pass as the configuration says."""
    if config.remat == "none":
        return block
    policy = _kept_with_dots if config.remat == "dots" else None
    return nn.remat(block, policy=policy, static_argnums=(3,), prevent_cse=not config.scan_layers)


def _kept_with_dots(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether remat="dots" keeps a result: of dense layers, of attention kernels and the norms' statistics.

    The plain and the xla kernel then recompute the attention weights, which are not kept.
    """
    policies = jax.checkpoint_policies
    return (
        primitive.name.startswith(CUDNN_FORWARD)
        or policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params)
        or policies.save_only_these_names(SAVED_NAME)(primitive, *avals, **params)
    )


def scan(block: type[nn.Module], config: GPTConfig) -> Any:
    """Return a module that applies `block` n_layer times, with one set of stacked parameters."""

    class Layer(nn.Module):
        """`block` as nn.scan takes it: (carry, *broadcast) -> (carry, output per layer)."""

        config: GPTConfig
        dtype: DTypeLike
        attention_fn: AttentionFn
        sharding: ShardingHooks

        @nn.compact
        def __call__(self, x_BTD, positions_BT, train, segments_BT):
            window = self.config.window(0)  # that of every layer
            layer = block(self.config, self.dtype, self.attention_fn, self.sharding, window, name="block")
            return layer(x_BTD, positions_BT, train, segments_BT), None

    return nn.scan(
        Layer,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
        length=config.n_layer,
    )
