"""Attention: project, place, attend, merge."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.layers.cache import LayerCache, Place
from jaxgpt.layers.kernels.plain import AttentionFn, cached_attention, plain_attention
from jaxgpt.layers.linear import Dense
from jaxgpt.layers.position import Rope, rope

WEIGHTS = "attention_weights"  # a collection of its own: to make it mutable asks for the weights, which costs


class Attention(nn.Module):
    """x_BTD -> x_BTD: every token reads others, through n_head heads of size H = head_dim.

    Query head n reads key/value head n // G. positions_BT are the tokens' places, which rope needs; B may be 1.
    What is read is x itself, each token those before it or, where `causal` is false, all of its document; with a
    `memory`, x_BSD of another text, that one. segments_BT, memory_segments_BS: see `plain_attention`.
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
    attention_fn: AttentionFn = plain_attention  # the kernel of causal attention
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        H, linear = self.head_dim, functools.partial(Dense, dtype=self.dtype)
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
            out_BTNH = cached_attention(q_BTNH, memory, visible_BTS, scale=self.scale, softcap=self.softcap)
            return self._merged(out_BTNH, train), cache
        k_BSKH, v_BSKH = self.keys_values(x_BTD if memory is None else memory)
        if self.rope is not None:
            k_BSKH = rope(k_BSKH, positions_BT, self.rope)

        if cache is not None:
            assert place is not None and place.visible_BTS is not None
            cache = cache.extend(k_BSKH, v_BSKH, place)
            visible_BTS = place.visible_BTS if self.window is None else place.within(self.window)
            out_BTNH = cached_attention(q_BTNH, cache, visible_BTS, scale=self.scale, softcap=self.softcap)
            return self._merged(out_BTNH, train), cache

        key = self.make_rng("dropout") if train and self.dropout else None
        scores: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        attend = self.attention_fn
        if not self.causal:
            attend, scores = plain_attention, scores | {"causal": False, "key_segments_BS": memory_segments_BS}
        out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, segments_BT=segments_BT, dropout=self.dropout, key=key, **scores)
        if self.is_mutable_collection(WEIGHTS) and not self.is_initializing():
            # The weights are what attention makes of the identity.
            B, S, K, _ = k_BSKH.shape
            eye_BSKS = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, K, S))
            weights_BTNS = plain_attention(q_BTNH, k_BSKH, eye_BSKS, segments_BT=segments_BT, **scores)
            self.sow(WEIGHTS, "weights_BTNS", weights_BTNS)
        return self._merged(out_BTNH, train), None

    def _merged(self, out_BTNH: jax.Array, train: bool) -> jax.Array:
        B, T, N, H = out_BTNH.shape
        out_BTD = self.c_proj(out_BTNH.reshape(B, T, N * H))
        return nn.Dropout(self.dropout)(out_BTD, deterministic=not train)
