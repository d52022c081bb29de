"""Causal attention by `jax.nn.dot_product_attention`: XLA's own, and cuDNN's fused kernel for Nvidia GPUs."""

import functools
from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxgpt.layers.kernels.plain import DEFAULT_SCORES, Scores, plain_attention


def fused_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    scores: Scores = DEFAULT_SCORES,
    *,
    segments_BT: jax.Array | None = None,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    """Attend like `plain_attention`, by a fused kernel. -> out_BTNH.

    Neither implementation can cap scores. cuDNN needs 16-bit types and a head size that is a multiple of 8, and several
    documents per row fall back to `plain_attention`.
    """
    if implementation == "cudnn" and segments_BT is not None:
        return plain_attention(q_BTNH, k_BSKH, v_BSKH, scores, segments_BT=segments_BT)
    assert scores.softcap is None
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=None if segments_BT is None else (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None],
        scale=scores.scale,
        is_causal=True,
        local_window_size=None if scores.window is None else (scores.window - 1, 0),
        implementation=implementation,
    )
    return out_BTNH if implementation == "cudnn" else checkpoint_name(out_BTNH, "attention")


xla_attention = functools.partial(fused_attention, implementation="xla")
cudnn_attention = functools.partial(fused_attention, implementation="cudnn")
