"""Gradient checkpointing: what the backward pass recomputes, and what remat="dots" keeps."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

SAVED_NAME = "saved"
# Prefix of the name of cuDNN's forward primitive, by which a remat policy recognises it: JAX does not name its result,
# and its residuals cannot be named from outside.
CUDNN_FORWARD = "dot_product_attention_fwd"


def save_in_remat(x: jax.Array) -> jax.Array:
    """Return x, which remat="dots" keeps for the backward pass instead of computing it again."""
    return checkpoint_name(x, SAVED_NAME)


def remat(run_block: Callable[..., jax.Array], kind: str, *, is_scanned: bool) -> Any:
    """Return `run_block`, a function of a module and x_BTD, recomputed in the backward pass: see `GPTConfig.remat`."""
    if kind == "none":
        return run_block
    policy = _kept_with_dots if kind == "dots" else None
    return nn.remat(run_block, policy=policy, prevent_cse=not is_scanned)


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
