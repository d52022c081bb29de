"""Attention: project, place, attend, merge."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxgpt.layers.cache import LayerCache, Place
from jaxgpt.layers.kernels.splash import KEPT, splash
from jaxgpt.layers.linear import dense
from jaxgpt.layers.position import Rope, rope

# The plain kernel cuts the queries of a context of at least LONG into so many blocks: more save less each, and cost
# compilation; in a shorter one, cutting costs what it saves.
BLOCKS, LONG = 4, 256
# Begins the name of the primitive that cuDNN's forward pass is: a remat policy tells it by that, for JAX gives what it
# makes no name of its own, and what its backward pass reads cannot be named from outside.
CUDNN_FORWARD = "dot_product_attention_fwd"
WEIGHTS = "attention_weights"  # a collection of its own: to make it mutable asks for the weights, which costs


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    kernel: str = "plain",
    dropout: float = 0.0,
    key: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """softmax(q k * scale) v, each group of N // K query heads sharing a key/value head. -> out_BTNH.

    Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245. With "plain" the values
    may have a size of their own, which is the result's.
    causal: each query reads the keys up to its own place, T and S are equal; else all keys, and the kernel is "plain".
    kernel: "plain" (the reference, and the fastest on CPU), "splash" (TPU), or an implementation of
        `jax.nn.dot_product_attention`: "xla", "cudnn" (16-bit types, head size a multiple of 8 up to 128, a GPU).
    dropout: share of the attention weights dropped, by `key`. Only "plain" can; the others fall back to it.
    segments_BT: int32, the document of each query, which reads no other; None: a row is one. "cudnn" knows none, and
        falls back to "plain".
    key_segments_BS: int32, that of each key; None: segments_BT.
    scale: of the scores; None: 1 / sqrt(H). window: tokens that each one reads, itself included; None: all.
    softcap: c in c tanh(score / c); None: no cap. Not for "xla" and "cudnn".
    """
    if not causal or (kernel == "cudnn" and segments_BT is not None):
        kernel = "plain"
    if kernel == "splash" and key is None:
        return splash(q_BTNH, k_BSKH, v_BSKH, segments_BT, scale=scale, window=window, softcap=softcap)
    key_segments_BS = segments_BT if key_segments_BS is None else key_segments_BS
    same_BTS = None
    if segments_BT is not None and key_segments_BS is not None:
        same_BTS = segments_BT[:, :, None] == key_segments_BS[:, None, :]
    if kernel != "plain" and key is None:
        assert softcap is None, kernel
        out_BTNH = jax.nn.dot_product_attention(  # type: ignore[no-matching-overload]
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask=None if same_BTS is None else same_BTS[:, None],
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=kernel,
        )
        return out_BTNH if kernel == "cudnn" else checkpoint_name(out_BTNH, KEPT)

    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    scale = H**-0.5 if scale is None else scale
    G = N // K
    # Heads fold into the batch, so that each product is a batch of plain matrices: XLA on CPU takes 3.3 ms for
    # what costs 5.5 ms with the heads inside (B=12, T=64, N=4, H=32, forward and backward).
    q_ = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B * K, G, T, H)
    k_ = k_BSKH.transpose(0, 2, 1, 3).reshape(B * K, S, H)
    v_ = v_BSKH.transpose(0, 2, 1, 3).reshape(B * K, S, -1)
    visible_TS = jnp.ones((T, S), bool)
    if causal:
        visible_TS = jnp.tril(visible_TS)
    if window is not None:
        visible_TS &= jnp.triu(jnp.ones((T, S), bool), 1 - window)

    # A block of queries leaves out the keys after its last one: of four blocks' scores, 5/8 of the square are left.
    size = T // BLOCKS if causal and T >= LONG and T % BLOCKS == 0 else T

    def block(start: int, end: int) -> jax.Array:
        """Of the queries from start to end, over the keys that the first of them to the last may read."""
        read = slice(0 if window is None else max(0, start + 1 - window), end if causal else S)
        t = end - start
        # Scaled by the head size: the paper's d_k. float32 from the product on, whatever the inputs.
        scores = jnp.einsum(
            "btH,bsH->bts",
            q_[:, :, start:end].reshape(B * K, G * t, H),
            k_[:, read],
            preferred_element_type=jnp.float32,
        )
        scores = _capped(scores * scale, softcap)
        visible = jnp.tile(visible_TS[start:end, read], (G, 1))[None]
        if same_BTS is not None:
            visible = jnp.tile(visible_TS[None, start:end, read] & same_BTS[:, start:end, read], (1, G, 1))
            visible = jnp.repeat(visible, K, axis=0)
        # finfo.min, not -inf: a row of -inf would be 0/0. A softmax of it is an exact zero all the same.
        weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min), axis=-1)
        if dropout and key is not None:
            own = key if size == T else jax.random.fold_in(key, start)
            keep = jax.random.bernoulli(own, 1.0 - dropout, weights.shape)
            weights = jnp.where(keep, weights / (1.0 - dropout), 0.0)
        return jnp.einsum("bts,bsH->btH", weights.astype(v_.dtype), v_[:, read]).reshape(B * K, G, t, -1)

    out = jnp.concatenate([block(start, start + size) for start in range(0, T, size)], axis=2)
    return checkpoint_name(out.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1), KEPT)


def attend_cached(
    q_BTNH: jax.Array,
    cache: LayerCache,
    visible_BTS: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """The same mathematics over the slots of a cache. -> out_BTNH; a query that sees nothing gets something finite."""
    B, T, N, H = q_BTNH.shape
    K = cache.k_BKSH.shape[1]
    G = N // K
    # Heads stay apart here: folded into the batch as in `attend`, a step of GPT-2 at 8 rows takes 86 ms and not 52.
    q_ = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    k_, v_ = cache.k_BKSH, cache.v_BKSH
    if k_.dtype == jnp.int8:
        k_, v_ = k_.astype(q_.dtype), v_.astype(q_.dtype)
    scale = H**-0.5 if scale is None else scale
    scores = jnp.einsum("bktH,bksH->bkts", q_.astype(k_.dtype), k_, preferred_element_type=jnp.float32) * scale
    if cache.k_scale_BKS is not None:  # one number per key scales one score, so the keys need no product
        scores = scores * cache.k_scale_BKS[:, :, None]
    scores = _capped(scores, softcap)
    visible = jnp.tile(visible_BTS[:, None], (1, 1, G, 1))
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if cache.v_scale_BKS is not None:
        weights = weights * cache.v_scale_BKS[:, :, None]
    out = jnp.einsum("bkts,bksH->bktH", weights.astype(v_.dtype), v_)
    return out.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


class Attention(nn.Module):
    """x_BTD -> x_BTD: every token reads others, through n_head heads of size H = head_dim.

    Query head n reads key/value head n // G. positions_BT are the tokens' places, which rope needs; B may be 1.
    What is read is x itself, each token those before it or, where `causal` is false, all of its document; with a
    `memory`, x_BSD of another text, that one. segments_BT, memory_segments_BS: see `attend`.
    With a cache, the tokens before are those in its slots, and a memory is its `keys_values` in a LayerCache, all of
    which are read but those of segment 0.
    Returns (x_BTD, the extended cache or None).
    """

    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    dropout: float  # of the attention weights, and of the output
    qk_norm: str | None  # "head": over each query and key head; "heads": over all of them side by side; None: none
    make_norm: Callable[..., nn.Module]
    rope: Rope | None  # None: no rotation
    scale: float | None  # of the scores; None: 1 / sqrt(H)
    window: int | None  # tokens that each one reads, itself included; None: all
    softcap: float | None  # of the scores; None: no cap
    kernel_init: nn.initializers.Initializer
    residual_init: nn.initializers.Initializer  # of c_proj, which writes into the residual stream
    causal: bool = True
    kernel: str = "plain"
    spread: Callable[[Callable], Callable] | None = None  # wraps `attend`, see `Spread`
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        H, linear = self.head_dim, functools.partial(dense, dtype=self.dtype)
        heads = functools.partial(linear, use_bias=self.qkv_bias, kernel_init=self.kernel_init)
        self.q, self.k, self.v = heads(self.n_head * H), heads(self.n_kv_head * H), heads(self.n_kv_head * H)
        self.c_proj = linear(self.n_embd, use_bias=self.out_bias, kernel_init=self.residual_init)
        if self.qk_norm:
            self.q_norm, self.k_norm = self.make_norm(), self.make_norm()

    def _heads(self, projected_BTF: jax.Array, n: int, norm: nn.Module | None) -> jax.Array:
        B, T, _ = projected_BTF.shape
        if norm is not None and self.qk_norm == "heads":
            projected_BTF = norm(projected_BTF)
        x_BTnH = projected_BTF.reshape(B, T, n, self.head_dim)
        return norm(x_BTnH) if norm is not None and self.qk_norm == "head" else x_BTnH

    def keys_values(self, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(k_BSKH, v_BSKH) of what is read."""
        k_BSKH = self._heads(self.k(x_BSD), self.n_kv_head, self.k_norm if self.qk_norm else None)
        return k_BSKH, self._heads(self.v(x_BSD), self.n_kv_head, None)

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        train: bool = False,
        cache: LayerCache | None = None,
        place: Place | None = None,
        segments_BT: jax.Array | None = None,
        memory: jax.Array | LayerCache | None = None,
        memory_segments_BS: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        q_BTNH = self._heads(self.q(x_BTD), self.n_head, self.q_norm if self.qk_norm else None)
        if self.rope is not None:
            q_BTNH = rope(q_BTNH, positions_BT, self.rope)
        if isinstance(memory, LayerCache):
            assert memory_segments_BS is not None
            visible_BTS = jnp.broadcast_to((memory_segments_BS > 0)[:, None], (*x_BTD.shape[:2], memory.slots))
            out_BTNH = attend_cached(q_BTNH, memory, visible_BTS, scale=self.scale, softcap=self.softcap)
            return self._merged(out_BTNH, train), cache
        k_BSKH, v_BSKH = self.keys_values(x_BTD if memory is None else memory)
        if self.rope is not None:
            k_BSKH = rope(k_BSKH, positions_BT, self.rope)

        if cache is not None:
            assert place is not None and place.visible_BTS is not None
            cache = cache.extend(k_BSKH, v_BSKH, place)
            visible_BTS = place.visible_BTS if self.window is None else place.within(self.window)
            out_BTNH = attend_cached(q_BTNH, cache, visible_BTS, scale=self.scale, softcap=self.softcap)
            return self._merged(out_BTNH, train), cache

        key = self.make_rng("dropout") if train and self.dropout else None
        read: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        if not self.causal:
            read |= {"causal": False, "key_segments_BS": memory_segments_BS}
        whole = functools.partial(attend, kernel=self.kernel, dropout=self.dropout, **read)
        placed = whole if self.spread is None or not self.causal else self.spread(whole)
        out_BTNH = placed(q_BTNH, k_BSKH, v_BSKH, key=key, segments_BT=segments_BT)
        if self.is_mutable_collection(WEIGHTS) and not self.is_initializing():
            # The weights are what attention makes of the identity.
            B, S, K, _ = k_BSKH.shape
            eye_BSKS = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, K, S))
            weights_BTNS = attend(q_BTNH, k_BSKH, eye_BSKS, segments_BT=segments_BT, **read)
            self.sow(WEIGHTS, "weights_BTNS", weights_BTNS)
        return self._merged(out_BTNH, train), None

    def _merged(self, out_BTNH: jax.Array, train: bool) -> jax.Array:
        B, T, N, H = out_BTNH.shape
        out_BTD = self.c_proj(out_BTNH.reshape(B, T, N * H))
        return nn.Dropout(self.dropout)(out_BTD, deterministic=not train)
