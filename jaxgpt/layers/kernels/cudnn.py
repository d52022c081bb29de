"""Causal attention by cuDNN's fused kernel for Nvidia GPUs."""

import jax

from jaxgpt.layers.kernels.plain import DEFAULT_SCORES, Scores, plain_attention


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    scores: Scores = DEFAULT_SCORES,
    *,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Attend like `plain_attention`, by cuDNN. -> out_BTNH.

    It cannot cap scores, and needs 16-bit types and a head size that is a multiple of 8. Several documents per row fall
    back to `plain_attention`.
    """
    if segments_BT is not None:
        return plain_attention(q_BTNH, k_BSKH, v_BSKH, scores, segments_BT=segments_BT)
    assert scores.softcap is None
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        scale=scores.scale,
        is_causal=True,
        local_window_size=None if scores.window is None else (scores.window - 1, 0),
        implementation="cudnn",
    )
