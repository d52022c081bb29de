"""The encoder-decoder: a GPT whose blocks also attend to an encoder's states of a source text."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.block import Block, attention_fields, make_norm
from jaxgpt.layers.cache import CacheIndex, KVCache, LayerCache
from jaxgpt.layers.hooks import NO_SHARDING, ShardingHooks
from jaxgpt.layers.kernels.plain import AttentionFn, plain_attention
from jaxgpt.layers.position import positions_from_segments
from jaxgpt.layers.stack import remat
from jaxgpt.model import GPT


def build_model(
    config: GPTConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    attention_fn: AttentionFn = plain_attention,
    sharding: ShardingHooks = NO_SHARDING,
) -> GPT:
    """Return the model of a configuration: a GPT, or an EncoderDecoder if it has encoder layers."""
    model = EncoderDecoder if config.n_encoder_layer else GPT
    return model(config, dtype, attention_fn, sharding)


class CrossAttention(Attention):
    """x_BTD, states_BSD -> x_BTD: tokens attend to all encoder states of their document, without rope."""

    def __call__(  # type: ignore[bad-override]
        self,
        x_BTD: jax.Array,
        states_BSD: jax.Array,
        *,
        segments_BT: jax.Array,
        source_segments_BS: jax.Array,
        train: bool = False,
    ) -> jax.Array:
        """Attend to the encoder's states, and project the merged heads to x_BTD."""
        q_BTNH = self.project_queries(x_BTD)
        k_BSKH, v_BSKH = self.project_keys_values(states_BSD)
        plain = functools.partial(plain_attention, causal=False, key_segments_BS=source_segments_BS)
        return self.attend(plain, plain, q_BTNH, k_BSKH, v_BSKH, segments_BT=segments_BT, train=train)

    def decode(self, x_BTD: jax.Array, encoder_kv: LayerCache, source: CacheIndex) -> jax.Array:  # type: ignore[bad-override]
        """Attend T new tokens to the encoder's keys and values. source: as if all were at the source's last position."""
        out_BTNH = encoder_kv.attend(self.project_queries(x_BTD), source, scale=self.scale, softcap=self.softcap)
        return self.merge_heads(out_BTNH)

    def project_queries(self, x_BTD: jax.Array) -> jax.Array:
        """Return q_BTNH."""
        return self.split_heads(self.q(x_BTD), "q_norm")

    def project_keys_values(self, states_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (k_BSKH, v_BSKH)."""
        return self.split_heads(self.k(states_BSD), "k_norm"), self.split_heads(self.v(states_BSD))


class CrossBlock(Block):
    """A block with cross-attention between attention and MLP."""

    def setup(self) -> None:
        """Create the three branches and their norms."""
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
        source: CacheIndex,
    ) -> tuple[jax.Array, LayerCache]:
        """Return the stream of T new tokens, and the updated cache. source: see `CrossAttention.decode`."""
        out_BTD, cache = self.attn.decode(self.norm_input(x_BTD, "ln_1"), cache, index)
        attended_BTD = self.add_output(x_BTD, out_BTD, "ln_1")
        out_BTD = self.cross.decode(self.read_cross(x_BTD, attended_BTD), encoder_kv, source)
        return self.feed_forward(x_BTD, self.add_output(attended_BTD, out_BTD, "ln_cross")), cache

    def read_cross(self, entered_BTD: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Return the input of cross-attention. entered_BTD: the stream before attention, for parallel_residual."""
        return self.norm_input(entered_BTD if self.config.parallel_residual else x_BTD, "ln_cross")


class CrossCache(KVCache):
    """A KV cache that also has each layer's keys and values of the encoder's states."""

    encoder_kv: tuple[LayerCache, ...] = flax.struct.field(kw_only=True)
    source_length_B: jax.Array = flax.struct.field(kw_only=True)  # tokens; padding follows them

    def insert(self, row: KVCache, number: jax.Array, columns: jax.Array) -> KVCache:
        """Return the cache with one row of another in row `number`: see `KVCache.insert`."""
        assert isinstance(row, CrossCache)
        cache = super().insert(row, number, columns)

        def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(buffer, new, number, axis=0)

        return cache.replace(
            encoder_kv=jax.tree.map(put, self.encoder_kv, row.encoder_kv),
            source_length_B=put(self.source_length_B, row.source_length_B),
        )


class EncoderDecoder(GPT):
    """A GPT with an encoder of `config.n_encoder_layer` blocks without causal mask, and cross-attention to it.

    Its methods also take the source: `source_BS`, int32, its tokens, S at most block_size; and `source_segments_BS`,
    int32, the document of each token, 0 for padding. A token attends to the source that has its own number in
    `segments_BT`. None means one document per row and no padding.
    """

    def setup(self) -> None:
        """Create the encoder and the decoder."""
        c = self.config
        block = remat(Block, c)
        self.encoder = [
            block(c, self.dtype, self.attention_fn, self.sharding, causal=False) for _ in range(c.n_encoder_layer)
        ]
        if c.norm_position != "post":
            self.encoder_ln_f = make_norm(c)
        super().setup()

    @nn.nowrap
    def make_layers(self) -> Any:
        """Return the decoder's blocks."""
        c, block = self.config, remat(CrossBlock, self.config)
        return [block(c, self.dtype, self.attention_fn, self.sharding) for _ in range(c.n_layer)]

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        train: bool = False,
        source_BS: jax.Array | None = None,
        source_segments_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Return the logits of each next token, logits_BTV."""
        source = {"source_BS": source_BS, "source_segments_BS": source_segments_BS}
        return self.unembed(self.hidden_states(tokens_BT, segments_BT=segments_BT, train=train, **source))

    def hidden_states(
        self,
        tokens_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        train: bool = False,
        source_BS: jax.Array | None = None,
        source_segments_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Return the decoder's residual stream after the last norm, x_BTD."""
        self.check_length(tokens_BT)
        positions_BT = (
            jnp.arange(tokens_BT.shape[-1])[None] if segments_BT is None else positions_from_segments(segments_BT)
        )
        if source_BS is None and self.is_initializing():
            source_BS = jnp.zeros((tokens_BT.shape[0], 1), jnp.int32)
        if source_BS is None:
            raise UserError(
                f"a model with n_encoder_layer={self.config.n_encoder_layer} needs source_BS, tokens to read"
            )
        if source_segments_BS is None:
            source_segments_BS = jnp.ones(source_BS.shape, jnp.int32)
        if segments_BT is None:
            segments_BT = jnp.ones(tokens_BT.shape, jnp.int32)
        states_BSD = self.encode(source_BS, source_segments_BS, train=train)
        x_BTD = self.embed(tokens_BT, positions_BT, train)
        for layer in self.h:
            x_BTD = layer(x_BTD, positions_BT, train, segments_BT, states_BSD, source_segments_BS)
        return self.norm_output(x_BTD)

    def encode(self, source_BS: jax.Array, segments_BS: jax.Array, *, train: bool = False) -> jax.Array:
        """Return the encoder's states of a source, x_BSD. Tokens attend to all of their document."""
        self.check_length(source_BS)
        positions_BS = positions_from_segments(segments_BS)
        x_BSD = self.embed(source_BS, positions_BS, train)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, positions_BS, train, segments_BS)
        return x_BSD if self.config.norm_position == "post" else self.encoder_ln_f(x_BSD)

    def init_cross_cache(self, cache: KVCache, source_BS: jax.Array, segments_BS: jax.Array) -> CrossCache:
        """Encode a source. Return the cache with each layer's keys and values of it, for `decode`.

        segments_BS: 1 for the source's tokens, then 0 for padding.
        """
        states_BSD = self.encode(source_BS, segments_BS)
        layers = (layer.cross.project_keys_values(states_BSD) for layer in self.h)
        encoder_kv = tuple(LayerCache(k.swapaxes(1, 2), v.swapaxes(1, 2)) for k, v in layers)
        return CrossCache(cache.layers, cache.block, encoder_kv=encoder_kv, source_length_B=segments_BS.sum(axis=1))

    def decode(self, tokens_BT: jax.Array, cache: KVCache, positions_BT: jax.Array) -> tuple[jax.Array, KVCache]:
        """Return `hidden_states` x_BTD of T new tokens, and the updated cache. cache: from `init_cross_cache`."""
        assert isinstance(cache, CrossCache), "the encoder reads its source first"
        index = cache.index(positions_BT, self.config.block_size)
        S = cache.encoder_kv[0].columns
        last_BT = jnp.broadcast_to(cache.source_length_B[:, None] - 1, positions_BT.shape)
        source = CacheIndex(last_BT, jnp.int32(1), block=S, context=S)
        x_BTD = self.embed(tokens_BT, positions_BT)
        layers = []
        for block, layer, read in zip(self.h, cache.layers, cache.encoder_kv, strict=True):
            x_BTD, layer = block.decode(x_BTD, layer, index, read, source)
            layers.append(layer)
        return self.norm_output(x_BTD), cache.replace(layers=tuple(layers))
