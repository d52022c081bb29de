"""GPT: embed, blocks, unembed; and, where its configuration has one, the encoder of another text."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.layers.block import INIT_STD, Block, make_norm
from jaxgpt.layers.cache import KVCache, LayerCache, Place
from jaxgpt.layers.hooks import NO_SHARDING, ShardingHooks
from jaxgpt.layers.kernels.fused import CUDNN_FORWARD
from jaxgpt.layers.kernels.plain import KEPT, AttentionFn, plain_attention
from jaxgpt.layers.linear import Embedding
from jaxgpt.layers.position import positions_in, sinusoidal


class GPT(nn.Module):
    """A Transformer: tokens_BT -> logits_BTV in float32. Decoder-only, or with an encoder, as in 2017.

    Initialisation is GPT-2's: every matrix and embedding N(0, 0.02), the projections into the residual stream
    divided by sqrt(2 n_layer) (`layers.block.residual_init`), biases 0, norms 1. Parameters are float32.

    dtype: of activations and matrix products; norms, softmax and logits are float32 whatever it is.
    attention_fn: the kernel of causal attention. sharding: of activations on a mesh.
    All three depend on the hardware, hence not in `config`: `parallel` chooses them.

    Example:
        >>> model = GPT(GPTConfig(vocab_size=65, block_size=256, n_layer=6, n_head=6, n_embd=384))
        >>> params = model.init(jax.random.key(0), tokens_BT)["params"]
        >>> logits_BTV = model.apply({"params": params}, tokens_BT)
    """

    config: GPTConfig
    dtype: DTypeLike = jnp.float32
    attention_fn: AttentionFn = plain_attention
    sharding: ShardingHooks = NO_SHARDING

    @nn.nowrap
    def shapes(self) -> dict:
        """Shape and dtype of each parameter; nothing is computed."""
        tokens_BT = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        return jax.eval_shape(self.init, jax.random.key(0), tokens_BT)["params"]

    @property
    def head(self) -> tuple[str, ...]:
        """The names of the parameters that `unembed` reads."""
        return ("wte",) if self.config.tie_embeddings else ("lm_head",)

    def setup(self) -> None:
        c = self.config
        if c.vocab_size is None:
            raise UserError("GPTConfig(vocab_size=None): a model needs it; give the tokenizer's vocab_size")
        init = nn.initializers.normal(INIT_STD)
        self.wte = Embedding(c.vocab_size, c.n_embd, init, self.sharding.embed)
        if c.position == "learned":
            self.wpe = nn.Embed(c.block_size, c.n_embd, embedding_init=init)
        self.drop = nn.Dropout(c.dropout)
        if c.n_encoder_layer:
            self.encoder = [
                _remat(Block, c)(c, self.attention_fn, self.dtype, self.sharding, causal=False)
                for _ in range(c.n_encoder_layer)
            ]
            if c.norm_position != "post":
                self.encoder_ln_f = make_norm(c)
        block = _remat(Block, c)
        if c.scan_layers:
            scanned = nn.scan(
                _scan_body(block),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
                length=c.n_layer,
            )
            self.h: Any = scanned(c, self.attention_fn, self.dtype, self.sharding)
        else:
            self.h: Any = [
                block(
                    c,
                    self.attention_fn,
                    self.dtype,
                    self.sharding,
                    c.window(layer),
                    reads_memory=c.n_encoder_layer > 0,
                )
                for layer in range(c.n_layer)
            ]
        if c.norm_position != "post":  # those blocks end in a norm already
            self.ln_f = make_norm(c, "ln_f")
        if not c.tie_embeddings and not self.has_variable("params", "lm_head_decode_matrix"):
            self.lm_head = self.param("lm_head", init, (c.n_embd, c.vocab_size), jnp.float32)

    def __call__(self, tokens_BT: jax.Array, **how: Any) -> jax.Array:
        """Logits of each next token. T is at most block_size; what else there is: see `features`."""
        return self.unembed(self.features(tokens_BT, **how))

    def features(
        self,
        tokens_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        source_BS: jax.Array | None = None,
        source_segments_BS: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """The residual stream after the last norm, x_BTD, in `dtype`. `train=True` drops, with `rngs={"dropout": key}`.

        segments_BT: int32, the document of each token where a row holds several, one after the other: positions start
        anew in each, and no token reads another document than its own. None: a row is one document.
        source_BS: of a model with an encoder, the tokens of the text that each row is made of, S at most block_size;
        a document reads the source of its own number in source_segments_BS, 0 for padding (None: there is none).
        """
        self._check_length(tokens_BT)
        positions_BT = jnp.arange(tokens_BT.shape[-1])[None] if segments_BT is None else positions_in(segments_BT)
        memory: dict[str, Any] = {}
        if self.config.n_encoder_layer:
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
            memory_BSD = self.encode(source_BS, source_segments_BS, train=train)
            memory = {"memory": memory_BSD, "memory_segments_BS": source_segments_BS}
        elif source_BS is not None:
            raise UserError("source_BS is for a model with an encoder: give n_encoder_layer, or leave it out")
        return self._features(tokens_BT, positions_BT, train=train, segments_BT=segments_BT, **memory)[0]

    def encode(self, source_BS: jax.Array, segments_BS: jax.Array, *, train: bool = False) -> jax.Array:
        """x_BSD: the encoder's view of a source text, each token of which reads all others of its document."""
        self._check_length(source_BS)
        positions_BS = positions_in(segments_BS)
        x_BSD = self._embedded(source_BS, positions_BS, train)
        for layer in self.encoder:
            x_BSD, _ = layer(x_BSD, positions_BS, train, None, None, segments_BS)
        return x_BSD if self.config.norm_position == "post" else self.encoder_ln_f(x_BSD)

    def remember(self, cache: KVCache, source_BS: jax.Array, segments_BS: jax.Array) -> KVCache:
        """The cache with each layer's keys and values of a source text, for `extend`."""
        memory_BSD = self.encode(source_BS, segments_BS)
        layers = (layer.cross.keys_values(memory_BSD) for layer in self.h)
        memory = tuple(LayerCache(k.swapaxes(1, 2), v.swapaxes(1, 2)) for k, v in layers)
        return cache.replace(memory=memory, memory_segments_BS=segments_BS)

    def _check_length(self, tokens_BT: jax.Array) -> None:
        T = tokens_BT.shape[-1]
        if self.config.block_size < T:
            raise UserError(
                f"{T} tokens exceed block_size={self.config.block_size}: cut the input to its last {self.config.block_size}"
            )

    def extend(self, tokens_BT: jax.Array, cache: KVCache, place: Place) -> tuple[jax.Array, KVCache]:
        """(x_BTD, cache): `features` of T more tokens of texts whose beginnings are in the cache.

        A token reads itself and the block_size - 1 before it, wherever `place` puts them. Positions of valid tokens
        are below block_size, but for rope and none, which have no last one. Needs `scan_layers=False`: slices of
        stacked parameters would be copied at each token (`sample.weights.unrolled` converts them).
        """
        assert not self.config.scan_layers, "unroll the layers first"
        cache, place = cache.placed(place, self.config.block_size)
        memory = {"memory": cache.memory or None, "memory_segments_BS": cache.memory_segments_BS}
        x_BTD, layers = self._features(tokens_BT, place.positions_BT, caches=cache.layers, place=place, **memory)
        return x_BTD, cache.replace(layers=layers)

    def _embedded(self, tokens_BT, positions_BT, train: bool) -> jax.Array:
        c = self.config
        x_BTD = self.wte(tokens_BT)
        if c.scale_embeddings:  # Vaswani et al. 2017, section 3.4: else the sines drown N(0, 0.02) embeddings
            x_BTD = x_BTD * math.sqrt(c.n_embd)
        if c.position == "learned":
            positions_BT = jnp.clip(positions_BT, 0, c.block_size - 1)  # padding is -1, finished rows run on
            x_BTD = x_BTD + jnp.broadcast_to(self.wpe(positions_BT).astype(jnp.float32), x_BTD.shape)
        elif c.position == "sinusoidal":
            x_BTD = x_BTD + jnp.broadcast_to(sinusoidal(positions_BT, c.n_embd), x_BTD.shape)
        return self.sharding.constrain(self.drop(x_BTD.astype(self.dtype), deterministic=not train))

    def _features(
        self,
        tokens_BT,
        positions_BT,
        *,
        train=False,
        caches=None,
        place=None,
        segments_BT=None,
        memory=None,
        memory_segments_BS=None,
    ):
        c = self.config
        x_BTD = self._embedded(tokens_BT, positions_BT, train)
        extended = []
        if c.scan_layers:
            x_BTD, _ = self.h(x_BTD, positions_BT, train, segments_BT)
        else:
            memories = memory if isinstance(memory, tuple) and memory else [memory] * c.n_layer
            for layer, cache, read in zip(self.h, caches or [None] * c.n_layer, memories, strict=True):
                x_BTD, cache = layer(x_BTD, positions_BT, train, cache, place, segments_BT, read, memory_segments_BS)
                extended.append(cache)
        return x_BTD if c.norm_position == "post" else self.ln_f(x_BTD), tuple(extended)

    def unembed(self, x_BTD: jax.Array) -> jax.Array:
        """Logits_BTV of features. bfloat16 inputs, float32 sums: rounded logits would shift the loss by 0.1%."""
        c = self.config
        x_ND = x_BTD.reshape(-1, c.n_embd)  # two axes: see layers.linear
        if c.tie_embeddings:
            logits_NV = self.wte.logits(x_ND)
        elif self.has_variable("params", "lm_head_decode_matrix"):
            logits_NV = self.get_variable("params", "lm_head_decode_matrix").matmul(x_ND)
        else:
            logits_NV = jnp.dot(x_ND, self.lm_head.astype(x_ND.dtype), preferred_element_type=jnp.float32)
        logits_BTV = logits_NV.reshape(*x_BTD.shape[:-1], c.vocab_size)
        if c.logit_softcap is not None:  # Gemma 2, arXiv:2408.00118
            logits_BTV = c.logit_softcap * jnp.tanh(logits_BTV / c.logit_softcap)
        return logits_BTV


def _remat(block: type[nn.Module], config: GPTConfig) -> Any:
    """`block`, recomputed in the backward pass as the configuration says."""
    if config.remat == "none":
        return block
    policy = _kept_with_dots if config.remat == "dots" else None
    return nn.remat(block, policy=policy, static_argnums=(3,), prevent_cse=not config.scan_layers)


def _kept_with_dots(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Whether a result of the forward pass is kept with remat="dots": of dense layers and of attention kernels.

    The plain and the xla kernel then compute the scores anew, for the weights, which are not kept.
    """
    policies = jax.checkpoint_policies
    return (
        primitive.name.startswith(CUDNN_FORWARD)
        or policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params)
        or policies.save_only_these_names(KEPT)(primitive, *avals, **params)
    )


def _scan_body(block: type[nn.Module]) -> type[nn.Module]:
    """`block` as nn.scan wants it: (carry, *broadcast) -> (carry, output per layer)."""

    class Layer(nn.Module):
        config: GPTConfig
        attention_fn: AttentionFn
        dtype: DTypeLike
        sharding: ShardingHooks

        @nn.compact
        def __call__(self, x_BTD, positions_BT, train, segments_BT):
            window = self.config.window(0)  # that of every layer
            one = block(self.config, self.attention_fn, self.dtype, self.sharding, window, name="block")
            return one(x_BTD, positions_BT, train, None, None, segments_BT)

    return Layer
