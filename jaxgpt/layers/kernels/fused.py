"""Causal attention by `jax.nn.dot_product_attention`: XLA's own, and cuDNN's fused kernel for Nvidia GPUs."""

import dataclasses
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxgpt.layers.kernels.plain import SAVED_NAME, plain_attention


@dataclasses.dataclass(frozen=True)
class FusedAttention:
    """Attend as `plain_attention` does, which takes over what an implementation cannot.

    That is dropout, and for cuDNN several documents in a row. Neither can cap scores. cuDNN needs 16-bit types and a
    head size that is a multiple of 8.
    """

    implementation: Literal["xla", "cudnn"]

    def __call__(
        self,
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
        """Return out_BTNH."""
        if key is not None or (self.implementation == "cudnn" and segments_BT is not None):
            options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "dropout": dropout}
            return plain_attention(q_BTNH, k_BSKH, v_BSKH, segments_BT=segments_BT, key=key, **options)
        assert softcap is None
        out_BTNH = jax.nn.dot_product_attention(  # type: ignore[no-matching-overload]
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask=None if segments_BT is None else (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None],
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=self.implementation,
        )
        return out_BTNH if self.implementation == "cudnn" else checkpoint_name(out_BTNH, SAVED_NAME)


xla_attention, cudnn_attention = FusedAttention("xla"), FusedAttention("cudnn")
