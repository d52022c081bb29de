"""Cross-attention: each token of a decoder reads the tokens of an encoder."""

import functools

import jax
import jax.numpy as jnp

from jaxgpt.layers.attention import Attention
from jaxgpt.layers.block import Block, attention_fields, make_norm
from jaxgpt.layers.cache import CacheIndex, LayerCache
from jaxgpt.layers.kernels.plain import plain_attention


class CrossAttention(Attention):
    """x_BTD, states_BSD -> x_BTD: every token reads all tokens of its document in the encoder. Nothing is rotated."""

    def __call__(  # type: ignore[bad-override]
        self,
        x_BTD: jax.Array,
        states_BSD: jax.Array,
        *,
        segments_BT: jax.Array,
        source_segments_BS: jax.Array,
        train: bool = False,
    ) -> jax.Array:
        """Return what each token reads of the encoder's states."""
        q_BTNH = self.project_queries(x_BTD)
        k_BSKH, v_BSKH = self.project_keys_values(states_BSD)
        plain = functools.partial(plain_attention, causal=False, key_segments_BS=source_segments_BS)
        return self.attend(plain, plain, q_BTNH, k_BSKH, v_BSKH, segments_BT=segments_BT, train=train)

    def decode(self, x_BTD: jax.Array, encoder_kv: LayerCache, source_segments_BS: jax.Array) -> jax.Array:  # type: ignore[bad-override]
        """Return what T more tokens read of the encoder's keys and values, which have segment 0 for padding."""
        q_BTNH = self.project_queries(x_BTD)
        visible_BTS = jnp.broadcast_to((source_segments_BS > 0)[:, None], (*x_BTD.shape[:2], encoder_kv.slots))
        out_BTNH = encoder_kv.attend(q_BTNH, visible_BTS, scale=self.scale, softcap=self.softcap)
        return self.merge_heads(out_BTNH)


class CrossBlock(Block):
    """A block with cross-attention between attention and MLP."""

    def setup(self) -> None:
        c = self.config.explicit()
        self.cross, self.ln_cross = CrossAttention(**attention_fields(c), dtype=self.dtype), make_norm(c)
        if c.norm_position == "sandwich":
            self.ln_cross_out = make_norm(c)
        super().setup()

    def __call__(  # type: ignore[bad-override]
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        train: bool,
        segments_BT: jax.Array,
        states_BSD: jax.Array,
        source_segments_BS: jax.Array,
    ) -> jax.Array:
        """Return the residual stream after the three branches."""
        out_BTD = self.attn(self.norm_input(x_BTD, "ln_1"), positions_BT, segments_BT=segments_BT, train=train)
        attended_BTD = self.add_output(x_BTD, out_BTD, "ln_1")
        out_BTD = self.cross(
            self.read_cross(x_BTD, attended_BTD),
            states_BSD,
            segments_BT=segments_BT,
            source_segments_BS=source_segments_BS,
            train=train,
        )
        return self.feed_forward(x_BTD, self.add_output(attended_BTD, out_BTD, "ln_cross"), train)

    def decode(  # type: ignore[bad-override]
        self,
        x_BTD: jax.Array,
        cache: LayerCache,
        index: CacheIndex,
        encoder_kv: LayerCache,
        source_segments_BS: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        """Return the stream of T more tokens, and the cache with them."""
        out_BTD, cache = self.attn.decode(self.norm_input(x_BTD, "ln_1"), cache, index)
        attended_BTD = self.add_output(x_BTD, out_BTD, "ln_1")
        out_BTD = self.cross.decode(self.read_cross(x_BTD, attended_BTD), encoder_kv, source_segments_BS)
        return self.feed_forward(x_BTD, self.add_output(attended_BTD, out_BTD, "ln_cross")), cache

    def read_cross(self, entered_BTD: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Return what cross-attention reads of the stream."""
        return self.norm_input(entered_BTD if self.config.parallel_residual else x_BTD, "ln_cross")
