"""Causal self-attention: project, place, attend, merge."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.layers.cache import LayerCache, Place
from jaxgpt.layers.linear import dense
from jaxgpt.layers.norm import RMSNorm
from jaxgpt.layers.position import rope
from jaxgpt.layers.splash import splash


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    kernel: str = "plain",
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Causal softmax(q k / sqrt(H)) v, each group of N // K query heads sharing a key/value head. -> out_BTNH.

    Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245. T and S are equal.
    kernel: "plain" (the reference, and the fastest on CPU), "splash" (TPU), or an implementation of
        `jax.nn.dot_product_attention`: "xla", "cudnn" (16-bit types, head size a multiple of 8 up to 128, a GPU).
    dropout: share of the attention weights dropped, by `key`. Only "plain" can; the others fall back to it.
    """
    if kernel == "splash" and key is None:
        return splash(q_BTNH, k_BSKH, v_BSKH)
    if kernel != "plain" and key is None:
        return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation=kernel)  # type: ignore[arg-type]

    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    G = N // K
    # Heads fold into the batch, so that each product is a batch of plain matrices: XLA on CPU takes 3.3 ms for
    # what costs 5.5 ms with the heads inside (B=12, T=64, N=4, H=32, forward and backward).
    q_ = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B * K, G * T, H)
    k_ = k_BSKH.transpose(0, 2, 1, 3).reshape(B * K, S, H)
    v_ = v_BSKH.transpose(0, 2, 1, 3).reshape(B * K, S, H)

    # Scaled by the head size: the paper's d_k. float32 from the product on, whatever the inputs.
    scores = jnp.einsum("btH,bsH->bts", q_, k_, preferred_element_type=jnp.float32) * H**-0.5
    causal_TS = jnp.tril(jnp.ones((T, S), bool))
    # finfo.min, not -inf: a row of -inf would be 0/0. A softmax of it is an exact zero all the same.
    scores = jnp.where(jnp.tile(causal_TS, (G, 1))[None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if dropout and key is not None:
        keep = jax.random.bernoulli(key, 1.0 - dropout, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout), 0.0)
    out = jnp.einsum("bts,bsH->btH", weights.astype(v_.dtype), v_)
    return out.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def attend_cached(q_BTNH: jax.Array, cache: LayerCache, visible_BTS: jax.Array) -> jax.Array:
    """The same mathematics over the slots of a cache. -> out_BTNH; a query that sees nothing gets something finite."""
    B, T, N, H = q_BTNH.shape
    K = cache.k_BKSH.shape[1]
    G = N // K
    # Heads stay apart here: folded into the batch as in `attend`, a step of GPT-2 at 8 rows takes 86 ms and not 52.
    q_ = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    k_, v_ = cache.k_BKSH, cache.v_BKSH
    if k_.dtype == jnp.int8:
        k_, v_ = k_.astype(q_.dtype), v_.astype(q_.dtype)
    scores = jnp.einsum("bktH,bksH->bkts", q_.astype(k_.dtype), k_, preferred_element_type=jnp.float32) * H**-0.5
    if cache.k_scale_BKS is not None:  # one number per key scales one score, so the keys need no product
        scores = scores * cache.k_scale_BKS[:, :, None]
    visible = jnp.tile(visible_BTS[:, None], (1, 1, G, 1))
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if cache.v_scale_BKS is not None:
        weights = weights * cache.v_scale_BKS[:, :, None]
    out = jnp.einsum("bkts,bksH->bktH", weights.astype(v_.dtype), v_)
    return out.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


class CausalSelfAttention(nn.Module):
    """x_BTD -> x_BTD: every token reads those before it, through n_head windows of size H = D // n_head.

    Query head n reads key/value head n // G. positions_BT are the tokens' places, which rope needs; B may be 1.
    With a cache, the tokens before are those in its slots. Returns (x_BTD, the extended cache or None).
    """

    n_head: int
    n_kv_head: int
    use_bias: bool
    dropout: float  # of the attention weights, and of the output
    qk_norm: bool
    norm_eps: float
    rope_theta: float | None  # None: no rotation
    kernel_init: nn.initializers.Initializer
    residual_init: nn.initializers.Initializer  # of c_proj, which writes into the residual stream
    kernel: str = "plain"
    spread: Callable[[Callable], Callable] | None = None  # wraps `attend`, see `Spread`
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        train: bool = False,
        cache: LayerCache | None = None,
        place: Place | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        B, T, D = x_BTD.shape
        H = D // self.n_head
        linear = functools.partial(dense, use_bias=self.use_bias, dtype=self.dtype)

        def heads(n: int, name: str) -> jax.Array:
            projection = linear(n * H, axes=("embed", "heads"), kernel_init=self.kernel_init, name=name)
            return projection(x_BTD).reshape(B, T, n, H)

        q_BTNH, k_BTKH, v_BTKH = (
            heads(self.n_head, "q"),
            heads(self.n_kv_head, "k"),
            heads(self.n_kv_head, "v"),
        )
        if self.qk_norm:
            q_BTNH = RMSNorm(self.norm_eps, axis=None, name="q_norm")(q_BTNH)
            k_BTKH = RMSNorm(self.norm_eps, axis=None, name="k_norm")(k_BTKH)
        if self.rope_theta is not None:
            q_BTNH = rope(q_BTNH, positions_BT, self.rope_theta)
            k_BTKH = rope(k_BTKH, positions_BT, self.rope_theta)

        if cache is not None:
            assert place is not None and place.visible_BTS is not None
            cache = cache.extend(k_BTKH, v_BTKH, place)
            out_BTNH = attend_cached(q_BTNH, cache, place.visible_BTS)
        else:
            key = self.make_rng("dropout") if train and self.dropout else None
            whole = functools.partial(attend, kernel=self.kernel, dropout=self.dropout)
            out_BTNH = (whole if self.spread is None else self.spread(whole))(q_BTNH, k_BTKH, v_BTKH, key=key)
        project = linear(D, axes=("heads", "embed"), kernel_init=self.residual_init, name="c_proj")
        out_BTD = project(out_BTNH.reshape(B, T, D))
        return nn.Dropout(self.dropout)(out_BTD, deterministic=not train), cache
