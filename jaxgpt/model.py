"""GPT: embed, blocks, unembed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import check_value
from jaxgpt.errors import UserError
from jaxgpt.layers.block import NO_SHARDING, Compute, ShardingHooks
from jaxgpt.layers.kernels.plain import AttentionFn, plain_attention
from jaxgpt.layers.linear import INIT_STD, Embedding, Head
from jaxgpt.layers.position import positions_from_segments, sinusoidal
from jaxgpt.layers.remat import remat


class GPT(nn.Module):
    """A decoder-only Transformer: tokens_BT -> logits_BTV in float32.

    Initialisation is GPT-2's: every matrix and embedding N(0, 0.02), the projections into the residual stream divided
    by sqrt(2 n_layer) (`GPTConfig.make_residual_init`), biases 0, norms 1. Parameters are float32.

    The fields after `config` depend on the hardware: `parallel` chooses them.

    >>> model = GPT(GPTConfig(vocab_size=65, n_layer=2, n_head=2, n_embd=8))
    >>> tokens_BT = jnp.zeros((1, 16), jnp.int32)
    >>> params = model.init(jax.random.key(0), tokens_BT)["params"]
    >>> model.apply({"params": params}, tokens_BT).shape
    (1, 16, 65)
    """

    config: GPTConfig
    dtype: DTypeLike = jnp.float32  # dtype of activations and matrix products. Norms, softmax and logits are float32
    attention_fn: AttentionFn = plain_attention  # the kernel of causal attention
    sharding: ShardingHooks = NO_SHARDING  # the sharding of arrays on a mesh

    @nn.nowrap
    def shapes(self) -> dict:
        """Return shape and dtype of each parameter, without computing it."""
        tokens_BT = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        return jax.eval_shape(self.init, jax.random.key(0), tokens_BT)["params"]

    @property
    def unembed_params(self) -> tuple[str, ...]:
        """Return the names of the parameters that `unembed` reads."""
        return ("wte",) if self.config.tie_embeddings else ("lm_head",)

    @property
    def compute(self) -> Compute:
        """Return what blocks need to know of the hardware."""
        return Compute(self.dtype, self.attention_fn, self.sharding)

    def setup(self) -> None:
        """Create the embeddings, the blocks, the last norm and the output matrix."""
        c = check_value("config", self.config, GPTConfig)
        if c.vocab_size is None:
            raise UserError("GPTConfig(vocab_size=None): a model needs it; give the tokenizer's vocab_size")
        init = nn.initializers.normal(INIT_STD)
        self.wte = Embedding(c.vocab_size, c.n_embd, init, self.sharding.embed)
        if c.position == "learned":
            self.wpe = nn.Embed(c.block_size, c.n_embd, embedding_init=init)
        self.drop = nn.Dropout(c.dropout)
        if c.scan_layers:
            self.h = Layers(c, self.compute)
        else:
            self.h = [c.make_block(layer, self.compute) for layer in range(c.n_layer)]
        if c.norm_position != "post":  # those blocks end in a norm already
            self.ln_f = c.make_norm(first_scale=c.width_ratio)
        if not c.tie_embeddings:
            # Drawn with the model's key, not the module's: a seed keeps its values from when this was no module.
            self.lm_head = Head(
                c.vocab_size,
                lambda key, shape: init(self.make_rng("params") if self.is_initializing() else key, shape),
            )

    def __call__(self, tokens_BT: jax.Array, *, segments_BT: jax.Array | None = None, train: bool = False) -> jax.Array:
        """Return the logits of each next token, logits_BTV. Arguments: see `hidden_states`."""
        return self.unembed(self.hidden_states(tokens_BT, segments_BT=segments_BT, train=train))

    def hidden_states(
        self,
        tokens_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Return the residual stream after the last norm, x_BTD, in `dtype`.

        Args:
            tokens_BT: int32. T is at most block_size, else `UserError`, unless positions are given.
            positions_BT: int32, the position of each token. B may be 1. None means from 0 in each document.
            segments_BT: int32, the document of each token in rows of several: positions restart in each, and tokens
                attend to their own document only. None means one document per row.
            train: apply dropout, with `rngs={"dropout": key}`.
        """
        if positions_BT is None:
            self.check_length(tokens_BT)
            T = tokens_BT.shape[-1]
            positions_BT = jnp.arange(T)[None] if segments_BT is None else positions_from_segments(segments_BT)
        x_BTD = self.embed(tokens_BT, positions_BT, train)

        def run_block(block: nn.Module, x_BTD: jax.Array, **more: Any) -> jax.Array:
            return block(x_BTD, positions_BT, segments_BT=segments_BT, train=train, **more)

        return self.norm_output(self.run_blocks(x_BTD, remat(run_block, self.config), tokens_BT))

    def run_blocks(self, x_BTD: jax.Array, run_block: Callable[..., jax.Array], tokens_BT: jax.Array) -> jax.Array:
        """Run the blocks `h` in turn. A subclass may connect them otherwise.

        run_block: `(block, x_BTD, **more) -> x_BTD`, where `more` are further arguments of the block.
        """
        if self.config.scan_layers:
            x_BTD, _ = nn.scan(
                lambda layers, x_BTD: (run_block(layers.block, x_BTD), None),
                variable_axes={"params": 0, "losses": 0, "metrics": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.config.n_layer,
            )(self.h, x_BTD)
        else:
            for block in self.h:
                x_BTD = run_block(block, x_BTD)
        return x_BTD

    def check_length(self, tokens_BT: jax.Array) -> None:
        """Raise `UserError` for more than block_size tokens."""
        T, most = tokens_BT.shape[-1], self.config.block_size
        if most < T:
            raise UserError(f"{T} tokens exceed block_size={most}: cut the input to its last {most}")

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array, train: bool = False) -> jax.Array:
        """Embed tokens and their positions: x_BTD, with dropout in training."""
        c = self.config
        x_BTD = self.wte(tokens_BT)
        if c.scale_embeddings:  # Vaswani et al. 2017, section 3.4: sines are far larger than N(0, 0.02)
            x_BTD = x_BTD * math.sqrt(c.n_embd)
        if c.position == "learned":
            positions_BT = jnp.clip(positions_BT, 0, c.block_size - 1)  # padding runs past the end
            x_BTD = x_BTD + jnp.broadcast_to(self.wpe(positions_BT).astype(jnp.float32), x_BTD.shape)
        elif c.position == "sinusoidal":
            x_BTD = x_BTD + jnp.broadcast_to(sinusoidal(positions_BT, c.n_embd), x_BTD.shape)
        # Without a barrier XLA on CPU sums the blocks' gradients once more for each position: 4% of a small step.
        x_BTD = jax.lax.optimization_barrier(x_BTD)
        return self.sharding.constrain(self.drop(x_BTD.astype(self.dtype), deterministic=not train))

    def norm_output(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the last norm, unless the blocks end in one."""
        return x_BTD if self.config.norm_position == "post" else self.ln_f(x_BTD)

    def unembed(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits_BTV of hidden states, with float32 sums: bfloat16 logits shift the loss by 0.1%."""
        c = self.config
        x_UD = x_BTD.reshape(-1, c.n_embd)  # two axes: see layers.linear
        logits_UV = self.wte.logits(x_UD) if c.tie_embeddings else self.lm_head(x_UD)
        logits_BTV = logits_UV.reshape(*x_BTD.shape[:-1], c.vocab_size)
        if c.logit_softcap is not None:  # Gemma 2, arXiv:2408.00118
            logits_BTV = c.logit_softcap * jnp.tanh(logits_BTV / c.logit_softcap)
        return logits_BTV


class Layers(nn.Module):
    """The block that `GPT` scans over the stacked parameters of all layers."""

    config: GPTConfig
    compute: Compute

    def setup(self) -> None:
        """Create the block."""
        self.block = self.config.make_block(0, self.compute)
