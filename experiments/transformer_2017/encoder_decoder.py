"""The encoder-decoder of Vaswani et al. 2017, arXiv:1706.03762: a GPT whose blocks also attend to an encoder's states.

It is built by a configuration of its own, from the norms, attention and MLP of `GPTConfig`. Annotations are not
strings here: the command line reads them later, when this module is no longer imported.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgpt.config.validate import Count
from jaxgpt.errors import UserError
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.block import Block, Compute, remat
from jaxgpt.layers.kernels.cached import LayerCache, is_decoding
from jaxgpt.layers.kernels.plain import Scores, plain_attention
from jaxgpt.layers.norm import RMSNorm
from jaxgpt.layers.position import positions_from_segments
from jaxgpt.model import GPT, GPTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(GPTConfig):
    """The architecture of the encoder: its tokens also attend to later ones."""

    def make_attention(self, layer: int, compute: Compute) -> nn.Module:
        """Return attention without a causal mask."""
        return super().make_attention(layer, compute).clone(causal=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(GPTConfig):
    """The architecture of the decoder, whose blocks also attend to the encoder's states, and of its encoder."""

    has_cache = True
    n_encoder_layer: Count = 6  # blocks of the encoder, which differ from the decoder's in reading both ways

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.scan_layers or self.sliding_window:
            raise UserError(
                f"scan_layers={self.scan_layers}, sliding_window={self.sliding_window}: an encoder-decoder has neither"
            )

    def make_model(self, compute: Compute | None = None) -> "EncoderDecoder":
        """Return the encoder-decoder."""
        return EncoderDecoder(self, *(compute or Compute()))

    def make_block(self, layer: int, compute: Compute) -> nn.Module:
        """Return a block of the decoder."""
        return CrossBlock(self, layer, compute)

    def make_encoder_block(self, layer: int, compute: Compute) -> nn.Module:
        """Return a block of the encoder."""
        fields = dataclasses.asdict(self)
        del fields["n_encoder_layer"]
        return EncoderConfig(**fields).make_block(layer, compute)

    def make_cross_attention(self, compute: Compute) -> "CrossAttention":
        """Return the attention to the encoder's states."""
        c = self.explicit()
        assert c.query_scale
        return CrossAttention(
            n_embd=c.n_embd,
            n_head=c.n_head,
            n_kv_head=c.n_kv_head,
            head_dim=c.head_dim,
            qkv_bias=bool(c.qkv_bias),
            out_bias=bool(c.out_bias),
            dropout=c.dropout,
            qk_norm=c.qk_norm_over if c.qk_norm else None,
            make_norm=functools.partial(RMSNorm, c.norm_eps, offset=c.norm_offset),
            scale=c.query_scale**-0.5,
            softcap=c.attention_softcap,
            kernel_init=c.make_kernel_init(),
            residual_init=c.make_residual_init(),
            dtype=compute.dtype,
        )


class CrossAttention(Attention):
    """x_BTD, states_BSD -> x_BTD: tokens attend to all encoder states of their document, without rope."""

    def __call__(  # type: ignore[bad-override]
        self,
        x_BTD: jax.Array,
        states_BSD: jax.Array | None,
        *,
        segments_BT: jax.Array,
        source_segments_BS: jax.Array | None,
        train: bool = False,
    ) -> jax.Array:
        """Attend to the encoder's states, and project the merged heads to x_BTD. None: to those in the cache."""
        q_BTNH = self.split_heads(self.q(x_BTD), self.q_norm)
        if states_BSD is None or source_segments_BS is None:
            # As if all tokens were at the source's last position.
            last_BT = jnp.broadcast_to(self.get_variable("cache", "last_B")[:, None], x_BTD.shape[:2])
            out_BTNH = self.get_variable("cache", "source").attend(q_BTNH, last_BT, self.scores)
            return self.merge_heads(out_BTNH)
        k_BSKH, v_BSKH = self.project_keys_values(states_BSD)
        if is_decoding(self):  # the first call, with the source: 1 for its tokens, then 0 for padding
            S = states_BSD.shape[1]
            source = LayerCache(k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), context=S, block=S)
            self.put_variable("cache", "source", source)
            self.put_variable("cache", "last_B", source_segments_BS.sum(axis=1) - 1)
        out_BTNH = self.attend_to_source(q_BTNH, k_BSKH, v_BSKH, segments_BT, source_segments_BS, train)
        return self.merge_heads(out_BTNH, train)

    def project_keys_values(self, states_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (k_BSKH, v_BSKH)."""
        return self.split_heads(self.k(states_BSD), self.k_norm), self.split_heads(self.v(states_BSD))

    def attend_to_source(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        segments_BT: jax.Array,
        source_segments_BS: jax.Array,
        train: bool,
    ) -> jax.Array:
        """Return the weighted values, out_BTNH."""
        return plain_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            Scores(self.scale, softcap=self.softcap, dropout=self.dropout),
            key=self.make_rng("dropout") if train and self.dropout else None,
            causal=False,
            mask_BNTS=segments_BT[:, None, :, None] == source_segments_BS[:, None, None, :],
        )


class CrossBlock(Block):
    """A block with cross-attention between attention and MLP."""

    def setup(self) -> None:
        """Create the three branches and their norms."""
        c: Any = self.config
        self.cross, self.ln_cross = c.make_cross_attention(self.compute), c.make_norm()
        if c.norm_position == "sandwich":
            self.ln_cross_out = c.make_norm()
        super().setup()

    def __call__(  # type: ignore[bad-override]
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        states_BSD: jax.Array,
        *,
        segments_BT: jax.Array,
        source_segments_BS: jax.Array,
        train: bool,
    ) -> jax.Array:
        """Return the residual stream after the three branches."""
        attend = functools.partial(self.attn, positions_BT=positions_BT, segments_BT=segments_BT, train=train)
        feed = functools.partial(self.mlp, train=train)
        documents: Any = {"segments_BT": segments_BT, "source_segments_BS": source_segments_BS}
        read_source = functools.partial(self.cross, states_BSD=states_BSD, train=train, **documents)
        position = self.config.norm_position
        if self.config.parallel_residual:  # all branches read what enters the block
            sum_BTD = x_BTD + attend(self.ln_1(x_BTD))
            sum_BTD = sum_BTD + read_source(self.ln_cross(x_BTD))
            x_BTD = sum_BTD + feed(self.ln_2(x_BTD))
        elif position == "pre":
            x_BTD = x_BTD + attend(self.ln_1(x_BTD))
            x_BTD = x_BTD + read_source(self.ln_cross(x_BTD))
            x_BTD = x_BTD + feed(self.ln_2(x_BTD))
        elif position == "post":
            x_BTD = self.ln_1(x_BTD + attend(x_BTD))
            x_BTD = self.ln_cross(x_BTD + read_source(x_BTD))
            x_BTD = self.ln_2(x_BTD + feed(x_BTD))
        elif position == "output":
            x_BTD = x_BTD + self.ln_1(attend(x_BTD))
            x_BTD = x_BTD + self.ln_cross(read_source(x_BTD))
            x_BTD = x_BTD + self.ln_2(feed(x_BTD))
        else:  # sandwich
            x_BTD = x_BTD + self.ln_1_out(attend(self.ln_1(x_BTD)))
            x_BTD = x_BTD + self.ln_cross_out(read_source(self.ln_cross(x_BTD)))
            x_BTD = x_BTD + self.ln_2_out(feed(self.ln_2(x_BTD)))
        return self.compute.sharding.constrain(x_BTD)


class EncoderDecoder(GPT):
    """A GPT with an encoder of `config.n_encoder_layer` blocks without causal mask, and cross-attention to it.

    Its methods also take the source: `source_BS`, int32, its tokens, S at most block_size; and `source_segments_BS`,
    int32, the document of each token, 0 for padding. A token attends to the source that has its own number in
    `segments_BT`. None means one document per row and no padding.
    """

    def setup(self) -> None:
        """Create the encoder and the decoder."""
        c: Any = self.config
        self.encoder = [c.make_encoder_block(layer, self.compute) for layer in range(c.n_encoder_layer)]
        if c.norm_position != "post":
            self.encoder_ln_f = c.make_norm()
        super().setup()

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
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        train: bool = False,
        source_BS: jax.Array | None = None,
        source_segments_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Return the decoder's residual stream after the last norm, x_BTD."""
        if positions_BT is None:
            self.check_length(tokens_BT)
            T = tokens_BT.shape[-1]
            positions_BT = jnp.arange(T)[None] if segments_BT is None else positions_from_segments(segments_BT)
        if source_BS is None and self.is_initializing():
            source_BS = jnp.zeros((tokens_BT.shape[0], 1), jnp.int32)
        if segments_BT is None:
            segments_BT = jnp.ones(tokens_BT.shape, jnp.int32)
        states_BSD = None
        if source_BS is not None or not self.variables.get("cache"):  # else they are in it
            states_BSD, source_segments_BS = self.read_source(source_BS, source_segments_BS, train)

        def run_block(block: nn.Module, x_BTD: jax.Array) -> jax.Array:
            documents: Any = {"segments_BT": segments_BT, "source_segments_BS": source_segments_BS}
            return block(x_BTD, positions_BT, states_BSD, train=train, **documents)

        x_BTD = self.embed(tokens_BT, positions_BT, train)
        run = self.wrap_block(run_block)
        for block in self.h:
            x_BTD = run(block, x_BTD)
        return self.norm_output(x_BTD)

    def read_source(
        self, source_BS: jax.Array | None, segments_BS: jax.Array | None, train: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return the encoder's states of a source, and the document of each token."""
        if source_BS is None:
            raise UserError(
                "an encoder-decoder needs a source, source_BS: use experiments/transformer_2017/translate.py"
            )
        if segments_BS is None:
            segments_BS = jnp.ones(source_BS.shape, jnp.int32)
        return self.encode(source_BS, segments_BS, train=train), segments_BS

    def encode(self, source_BS: jax.Array, segments_BS: jax.Array, *, train: bool = False) -> jax.Array:
        """Return the encoder's states of a source, x_BSD. Tokens attend to all of their document."""
        self.check_length(source_BS)
        positions_BS = positions_from_segments(segments_BS)

        def run_block(block: nn.Module, x_BSD: jax.Array) -> jax.Array:
            return block(x_BSD, positions_BS, segments_BT=segments_BS, train=train)

        x_BSD = self.embed(source_BS, positions_BS, train)
        run = remat(run_block, self.config.remat, is_scanned=self.config.scan_layers)
        for block in self.encoder:
            x_BSD = run(block, x_BSD)
        return x_BSD if self.config.norm_position == "post" else self.encoder_ln_f(x_BSD)
