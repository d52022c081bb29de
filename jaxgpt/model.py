"""GPT, and the configuration that builds it: embed, blocks, unembed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config.serialize import Checked
from jaxgpt.config.validate import (
    LARGEST_SIZE,
    Count,
    Fraction,
    Interval,
    PositiveFloat,
    Size,
    check_value,
)
from jaxgpt.errors import UserError
from jaxgpt.layers import Attention
from jaxgpt.layers.block import NO_SHARDING, Block, Compute, ShardingHooks, remat
from jaxgpt.layers.kernels.cached import is_decoding
from jaxgpt.layers.kernels.plain import AttentionFn, plain_attention
from jaxgpt.layers.linear import INIT_STD, Embedding, Head
from jaxgpt.layers.mlp import ACTIVATIONS, MLP
from jaxgpt.layers.norm import LayerNorm, RMSNorm
from jaxgpt.layers.position import Rope, positions_from_segments, sinusoidal


class Shape(NamedTuple):
    """The fields of a `GPTConfig` that follow from others where they are None."""

    n_kv_head: int
    head_dim: int
    mlp_dim: int
    qkv_bias: bool
    out_bias: bool
    query_scale: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(Checked):
    """The architecture, in the names of GPT-2. Other model families use the same layers with different settings.

    It builds the model that it describes: a subclass that overrides one of its `make_` methods is another architecture.

    >>> config = GPTConfig(vocab_size=65, n_layer=2, n_head=4, n_embd=128)
    >>> config.shape.head_dim, config.shape.mlp_dim
    (32, 512)
    """

    vocab_size: Size | None = None  # number of tokens in the vocabulary. None means the tokenizer's
    block_size: Size = 1024  # length of the context, in tokens
    n_layer: Count = 12  # number of blocks
    n_head: Count = 12  # number of query heads in each block
    # number of key/value heads in each block. n_head // n_kv_head query heads share one (GQA, arXiv:2305.13245). None means n_head
    n_kv_head: Count | None = None
    n_embd: Size = 768  # width of the residual stream
    head_dim: Size | None = None  # elements of each head. None means n_embd / n_head
    # hidden units of the MLP. None means 4 n_embd, or 8/3 n_embd with a gated activation (the same parameter count)
    mlp_dim: Annotated[int, Interval(ge=1, le=4 * LARGEST_SIZE)] | None = None
    dropout: Fraction = 0.0  # dropout rate of embeddings, attention weights, attention output and MLP output
    bias: bool = True  # linear layers and LayerNorm have biases
    qkv_bias: bool | None = None  # the projections to queries, keys and values have biases. None means as bias
    out_bias: bool | None = None  # attention's output projection has a bias. None means as bias
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467)
    # where a block has its norms. pre is x + f(norm(x)). post is norm(x + f(x)), as in 2017. output is x + norm(f(x)), as in
    # OLMo 2 (arXiv:2501.00656). sandwich is x + norm(f(norm(x))), as in Gemma 2 (arXiv:2408.00118)
    norm_position: Literal["pre", "post", "output", "sandwich"] = "pre"
    norm_eps: PositiveFloat = 1e-5  # number added to the variance
    norm_offset: bool = False  # RMSNorm's parameter is its scale minus 1, as in Gemma
    parallel_residual: bool = False  # blocks: x + attention(norm(x)) + mlp(norm(x)), as in GPT-NeoX (arXiv:2204.06745)
    # nonlinearity of the MLP. gelu is computed by erf, gelu_tanh as in GPT-2. Names with glu are gated (arXiv:2002.05202)
    activation: Literal["relu", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"] = "gelu_tanh"
    position: Literal["learned", "sinusoidal", "rope", "none"] = "learned"  # how the positions of tokens are encoded
    rope_theta: PositiveFloat = 10_000.0  # the longest wavelength of rope is 2 pi rope_theta tokens (arXiv:2104.09864)
    rope_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0  # share of a head that rope rotates, its first elements
    # how rope adapts to sequences longer than in pre-training. linear multiplies all wavelengths by rope_factor
    # (arXiv:2306.15595), llama3 only the long ones, and longrope each by a number of its own (arXiv:2402.13753)
    rope_scaling: Literal["none", "linear", "llama3", "longrope"] = "none"
    rope_factor: Annotated[float, Interval(ge=1)] = 1.0  # linear and llama3: factor of the wavelengths
    rope_low_freq_factor: PositiveFloat = 1.0  # llama3: wavelengths above rope_original_context / this are scaled
    rope_high_freq_factor: float = 4.0  # llama3: wavelengths below rope_original_context / this are kept
    rope_original_context: Size = 8192  # llama3 and longrope: length of the context in pre-training, in tokens
    rope_short_factors: tuple[float, ...] = ()  # longrope: factor of each pair, up to rope_original_context tokens
    rope_long_factors: tuple[float, ...] = ()  # longrope: the same if block_size is longer
    rope_magnitude: PositiveFloat = 1.0  # longrope: factor of rotated queries and keys
    sliding_window: Size | None = None  # tokens that a token attends to, with itself (arXiv:2004.05150). None means all
    global_every: Count | None = None  # every n-th layer attends to all tokens, not to a window. None means no layer
    rope_local_theta: PositiveFloat | None = None  # rope_theta of layers with a window, unscaled. None means rope_theta
    qk_norm: bool = False  # apply RMSNorm to queries and keys before their product (arXiv:2302.05442)
    qk_norm_over: Literal["head", "heads"] = "head"  # qk_norm normalises each head, or all heads together, as in OLMo 2
    query_scale: PositiveFloat | None = None  # attention scores are divided by its square root. None means head_dim
    # cap c of attention scores, which become c tanh(score / c) (arXiv:2408.00118). None means no cap
    attention_softcap: PositiveFloat | None = None
    tie_embeddings: bool = True  # use the token embedding as the output matrix too
    scale_embeddings: bool = False  # multiply token embeddings by sqrt(n_embd), as in 2017 and in Gemma
    logit_softcap: PositiveFloat | None = None  # cap c of logits, which become c tanh(logit / c). None means no cap
    # initial values of the projections into the residual stream. scaled has std 0.02 / sqrt(2 n_layer), and zero is 0
    residual_init: Literal["scaled", "zero"] = "scaled"
    # width from which muP (arXiv:2203.03466) scales initial values and learning rates to n_embd, so that the best ones
    # of a narrow model are also best for a wide one with heads of the same size. None means the same ones at every width
    mup_base_width: Size | None = None
    scan_layers: bool = False  # compile one block and run it n_layer times, with stacked parameters: compile time does not grow with depth
    # what the backward pass computes again, to save memory. dots is all but dense layers and attention kernels, and full is all
    remat: Literal["none", "dots", "full"] = "none"
    # whether every module of a subclass that mixes tokens keeps what it needs of earlier ones in linen's collection
    # "cache". If not, each token that is drawn computes its context again
    has_cache = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: take a multiple")
        if self.n_head % self.shape.n_kv_head:
            raise UserError(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}: take a divisor")
        turned = int(self.shape.head_dim * self.rope_fraction)
        if self.position == "rope" and (turned % 2 or not turned):
            said = f"head size times rope_fraction={self.rope_fraction} is {turned}"
            raise UserError(f"{said}: rope rotates pairs, so it must be even and not 0")
        if self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise UserError(f"rope_high_freq_factor={self.rope_high_freq_factor}: needs more than rope_low_freq_factor")
        lengths = {len(self.rope_short_factors), len(self.rope_long_factors)}
        if self.rope_scaling == "longrope" and lengths != {turned // 2}:
            raise UserError(f"rope_short_factors and rope_long_factors: need {turned // 2} numbers each")
        if self.norm_offset and self.norm != "rmsnorm":
            raise UserError(f"norm_offset=True with norm={self.norm}: only rmsnorm has it")
        if self.parallel_residual and self.norm_position != "pre":
            raise UserError(f"parallel_residual=True with norm_position={self.norm_position}: give pre")
        if self.sliding_window is None and (self.global_every is not None or self.rope_local_theta is not None):
            raise UserError("global_every and rope_local_theta need a window: give sliding_window as well")
        if self.scan_layers and self.global_every is not None:
            raise UserError("global_every: layers are not alike, and one block runs all: take scan_layers=False")
        if self.mup_base_width is not None and (self.norm_position == "post" or self.scale_embeddings):
            raise UserError("mup_base_width needs another norm_position than post, and scale_embeddings=False")
        if self.position == "sinusoidal" and self.n_embd % 2:
            raise UserError(f"n_embd={self.n_embd} is odd: sinusoidal positions are pairs, so it must be even")

    @property
    def gated(self) -> bool:
        """Return whether the MLP has a gate."""
        return "glu" in self.activation

    @property
    def is_foreign(self) -> bool:
        """Return whether this is a subclass, so that what is known of GPTConfig's modules need not hold."""
        return type(self) is not GPTConfig

    @property
    def width_ratio(self) -> float:
        """Return muP's base width / n_embd, or 1.0 without muP."""
        return 1.0 if self.mup_base_width is None else self.mup_base_width / self.n_embd

    @functools.cached_property
    def shape(self) -> Shape:
        """The sizes that follow from other fields where their own are None."""
        head_dim = self.n_embd // self.n_head if self.head_dim is None else self.head_dim
        # With a gate 8/3, rounded up to a multiple of 8, which suits accelerators' tiles.
        mlp_dim = -(-8 * self.n_embd // 3 // 8) * 8 if self.gated else 4 * self.n_embd
        return Shape(
            n_kv_head=self.n_head if self.n_kv_head is None else self.n_kv_head,
            head_dim=head_dim,
            mlp_dim=mlp_dim if self.mlp_dim is None else self.mlp_dim,
            qkv_bias=self.bias if self.qkv_bias is None else self.qkv_bias,
            out_bias=self.bias if self.out_bias is None else self.out_bias,
            query_scale=float(head_dim if self.query_scale is None else self.query_scale),
        )

    def explicit(self) -> Self:
        """Return the architecture with its `shape` in its fields."""
        return dataclasses.replace(self, **self.shape._asdict())

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that each token attends to in a layer. None means all."""
        if self.global_every is not None and (layer + 1) % self.global_every == 0:
            return None
        return self.sliding_window

    def label_parameter(self, path: tuple[str, ...], shape: tuple[int, ...]) -> Literal["matrix", "table", "vector"]:
        """Return how optimizers treat a parameter: Muon takes a "matrix", weight decay a "matrix" and a "table".

        By its rank: 2 or more, without the axis of stacked layers, is a matrix in a block and a table elsewhere. Muon
        takes the last two axes as the matrix, and those before as a batch of them. A subclass may know better.
        """
        rank = len(shape) - (path[:2] == ("h", "block"))
        return "vector" if rank < 2 else "matrix" if path[0].split("_")[0] in ("h", "encoder") else "table"

    def shard_parameter(self, path: tuple[str, ...], shape: tuple[int, ...], *, fsdp: int) -> tuple[str | None, ...]:
        """Return the mesh axis, or None, of each axis of a parameter that jaxgpt's own rules do not name.

        The largest axis that fsdp divides is sharded over it. Without one the parameter is on every device. A subclass
        may shard over "tensor" as well: the compiler then inserts what its products need.
        """
        stacked = path[:2] == ("h", "block")
        axes = [axis for axis in range(stacked, len(shape)) if fsdp > 1 and shape[axis] % fsdp == 0]
        largest = max(axes, key=lambda axis: shape[axis], default=None)
        return tuple("fsdp" if axis == largest else None for axis in range(len(shape)))

    def make_model(self, compute: Compute | None = None) -> GPT:
        """Return the model: a linen module with the methods of `GPT`. compute: None means float32 and the plain kernel."""
        return GPT(self, *(compute or Compute()))

    def make_block(self, layer: int, compute: Compute) -> nn.Module:
        """Return a block: `(x_BTD, positions_BT, *, segments_BT, train) -> x_BTD`. layer: its number, from 0.

        With scan_layers one block, made as layer 0, runs as all of them.
        """
        if not self.is_foreign:  # equal blocks are equal values, which decoding traces once
            layer = next(i for i in range(layer + 1) if self.window(i) == self.window(layer))
        return Block(self, layer, compute)

    def make_attention(self, layer: int, compute: Compute) -> nn.Module:
        """Return the attention of a block: `(x_BTD, positions_BT, *, segments_BT, train) -> x_BTD`."""
        shape = self.shape
        return Attention(
            n_embd=self.n_embd,
            n_head=self.n_head,
            n_kv_head=shape.n_kv_head,
            head_dim=shape.head_dim,
            qkv_bias=shape.qkv_bias,
            out_bias=shape.out_bias,
            dropout=self.dropout,
            qk_norm=self.qk_norm_over if self.qk_norm else None,
            make_norm=functools.partial(RMSNorm, self.norm_eps, offset=self.norm_offset),
            rope=self.make_rope(self.window(layer)),
            scale=shape.query_scale**-0.5,
            window=self.window(layer),
            softcap=self.attention_softcap,
            kernel_init=self.make_kernel_init(),
            residual_init=self.make_residual_init(),
            attention_fn=compute.attention_fn,
            dtype=compute.dtype,
        )

    def make_mlp(self, layer: int, compute: Compute) -> nn.Module:
        """Return the MLP of a block: `(x_BTD, *, train) -> x_BTD`."""
        return MLP(
            hidden=self.shape.mlp_dim,
            activation=self.activation,
            function=self.make_activation(),
            use_bias=self.bias,
            dropout=self.dropout,
            kernel_init=self.make_kernel_init(),
            residual_init=self.make_residual_init(),
            dtype=compute.dtype,
        )

    def make_activation(self) -> Callable[[jax.Array], jax.Array]:
        """Return the nonlinearity of the MLPs, or of their gates: it maps each number on its own."""
        return ACTIVATIONS[self.activation]

    def make_norm(self, *, first_scale: float = 1.0) -> nn.Module:
        """Return a norm of the residual stream: x_BTD -> x_BTD. first_scale: the initial value of its scale."""
        if self.norm == "rmsnorm":
            return RMSNorm(self.norm_eps, offset=self.norm_offset, first_scale=first_scale)
        return LayerNorm(self.norm_eps, use_bias=self.bias, first_scale=first_scale)

    def make_rope(self, window: int | None) -> Rope | None:
        """Return the rotation of a layer with this window (None: a global layer), or None without rope."""
        if self.position != "rope":
            return None
        size = int(self.shape.head_dim * self.rope_fraction)
        if window is not None and self.rope_local_theta is not None:
            return Rope(size, self.rope_local_theta)
        scaled = (self.rope_factor, self.rope_low_freq_factor, self.rope_high_freq_factor, self.rope_original_context)
        rope = Rope(size, self.rope_theta, self.rope_scaling, *scaled)
        if self.rope_scaling != "longrope":
            return rope
        is_long = self.block_size > self.rope_original_context
        divisors = self.rope_long_factors if is_long else self.rope_short_factors
        return rope._replace(divisors=divisors, magnitude=self.rope_magnitude)

    def make_kernel_init(self, branches: int = 1) -> nn.initializers.Initializer:
        """Return the initialiser of matrices whose outputs are summed over some branches. For muP see `optim`."""
        return nn.initializers.normal(INIT_STD * math.sqrt(self.width_ratio) / math.sqrt(branches))

    def make_residual_init(self) -> nn.initializers.Initializer:
        """Return the initialiser of the 2 n_layer projections that write into the residual stream.

        With "scaled" their sum has the variance of one (GPT-2, Radford et al. 2019, section 2.3). With "zero" every
        block starts as the identity, so that depth does not slow down the first steps.
        """
        return nn.initializers.zeros if self.residual_init == "zero" else self.make_kernel_init(2 * self.n_layer)


class GPT(nn.Module):
    """A decoder-only Transformer: tokens_BT -> logits_BTV in float32.

    Initialisation follows GPT-2: every matrix and embedding N(0, 0.02), the projections into the residual stream divided
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
        tokens_BT, depth = jax.ShapeDtypeStruct((1, 1), jnp.int32), self.config.n_layer
        if type(self) is not GPT or self.config.is_foreign or self.config.scan_layers or depth == 1:
            return jax.eval_shape(self.init, jax.random.key(0), tokens_BT)["params"]
        shapes = self.clone(config=dataclasses.replace(self.config, n_layer=1)).shapes()  # one block is traced
        block = shapes.pop("h_0")
        return shapes | {f"h_{layer}": jax.tree.map(lambda x: x, block) for layer in range(depth)}

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

        return self.norm_output(self.run_blocks(x_BTD, self.wrap_block(run_block), tokens_BT))

    def wrap_block(self, run_block: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Return the function that runs a block, which training may compute again, and decoding traces once."""
        if is_decoding(self):
            return nn.jit(run_block)
        return remat(run_block, self.config.remat, is_scanned=self.config.scan_layers)

    def run_blocks(self, x_BTD: jax.Array, run_block: Callable[..., jax.Array], tokens_BT: jax.Array) -> jax.Array:
        """Run the blocks `h` in turn. A subclass may connect them otherwise.

        run_block: `(block, x_BTD, **more) -> x_BTD`, where `more` are further arguments of the block.
        """
        if self.config.scan_layers:
            x_BTD, _ = nn.scan(
                lambda layers, x_BTD: (run_block(layers.block, x_BTD), None),
                variable_axes={"params": 0, "losses": 0, "metrics": 0, "cache": 0},
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
