"""Causal attention by `jax.nn.dot_product_attention`: XLA's own, and cuDNN's fused kernel for Nvidia GPUs."""

import functools
from typing import Any, Literal

import jax

from jaxgpt.layers.kernels.plain import plain_attention
from jaxgpt.layers.remat import save_in_remat


def fused_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    implementation: Literal["xla", "cudnn"],
    segments_BT: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Attend like `plain_attention`, by a fused kernel. -> out_BTNH.

    Dropout, and with cuDNN several documents per row, fall back to `plain_attention`. Neither implementation can cap
    scores. cuDNN needs 16-bit types and a head size that is a multiple of 8.
    """
    if key is not None or (implementation == "cudnn" and segments_BT is not None):
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "dropout": dropout}
        return plain_attention(q_BTNH, k_BSKH, v_BSKH, segments_BT=segments_BT, key=key, **options)
    assert softcap is None
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=None if segments_BT is None else (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None],
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return out_BTNH if implementation == "cudnn" else save_in_remat(out_BTNH)


xla_attention = functools.partial(fused_attention, implementation="xla")
cudnn_attention = functools.partial(fused_attention, implementation="cudnn")
