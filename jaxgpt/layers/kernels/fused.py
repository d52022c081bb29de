"""Causal attention by `jax.nn.dot_product_attention`: XLA's own, and cuDNN's fused kernel for Nvidia GPUs.

Both compute what `plain_attention` does and hand over to it what they cannot: dropout, and for cuDNN several documents
in a row. Neither can cap scores.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxgpt.layers.kernels.plain import KEPT, plain_attention

# Begins the name of the primitive that cuDNN's forward pass is. A remat policy recognises it by that: JAX gives the
# result no name, and what the backward pass reads cannot be named from outside.
CUDNN_FORWARD = "dot_product_attention_fwd"


def xla_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Attend as `plain_attention` does. -> out_BTNH."""
    options: dict[str, Any] = {"segments_BT": segments_BT, "scale": scale, "window": window}
    if key is not None:
        return plain_attention(q_BTNH, k_BSKH, v_BSKH, softcap=softcap, dropout=dropout, key=key, **options)
    assert softcap is None
    return checkpoint_name(_dot_product_attention("xla", q_BTNH, k_BSKH, v_BSKH, **options), KEPT)


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Attend as `plain_attention` does. -> out_BTNH. Needs 16-bit types and a head size that is a multiple of 8."""
    options: dict[str, Any] = {"segments_BT": segments_BT, "scale": scale, "window": window}
    if key is not None or segments_BT is not None:
        return plain_attention(q_BTNH, k_BSKH, v_BSKH, softcap=softcap, dropout=dropout, key=key, **options)
    assert softcap is None
    return _dot_product_attention("cudnn", q_BTNH, k_BSKH, v_BSKH, **options)


def _dot_product_attention(
    implementation: str,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segments_BT: jax.Array | None,
    scale: float | None,
    window: int | None,
) -> jax.Array:
    mask = None if segments_BT is None else (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(  # type: ignore[no-matching-overload]
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
