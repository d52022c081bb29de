"""Names of the results that remat="dots" keeps for the backward pass, besides those of dense layers."""

import jax
from jax.ad_checkpoint import checkpoint_name

SAVED_NAME = "saved"
# Prefix of the name of cuDNN's forward primitive, by which a remat policy recognises it: JAX does not name its result,
# and its residuals cannot be named from outside.
CUDNN_FORWARD = "dot_product_attention_fwd"


def save_in_remat(x: jax.Array) -> jax.Array:
    """Return x, which remat="dots" keeps for the backward pass instead of computing it again."""
    return checkpoint_name(x, SAVED_NAME)
