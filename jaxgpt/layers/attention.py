"""Self-attention: project, rotate, attend, merge heads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.layers.kernels.cached import LayerCache, is_decoding
from jaxgpt.layers.kernels.plain import AttentionFn, Scores, attention_weights, find_visible, plain_attention
from jaxgpt.layers.linear import INIT_STD, Dense
from jaxgpt.layers.norm import RMSNorm
from jaxgpt.layers.position import Rope, rope


class Attention(nn.Module):
    """Self-attention, x_BTD -> x_BTD, with n_head heads of size H = head_dim.

    Query head n uses key/value head n // G. `project`, `attend` and `merge_heads` are methods of their own, so that
    `nn.intercept_methods` can edit what passes between them. To decode, pass linen's collection "cache" and make it
    mutable: `attend` then keeps keys and values there. Without one in it, the first call makes a cache with a column for
    each of its tokens, and writes nothing.

    >>> attention = Attention(n_embd=8, n_head=4, n_kv_head=2)
    >>> params = attention.init(jax.random.key(0), jnp.ones((1, 4, 8)))
    """

    n_embd: int  # width D
    n_head: int  # number of query heads, N
    n_kv_head: int | None = None  # number of key/value heads, K. None means n_head
    head_dim: int | None = None  # elements of each head, H. None means n_embd // n_head
    qkv_bias: bool = True  # q, k and v have biases
    out_bias: bool = True  # c_proj has a bias
    dropout: float = 0.0  # share of the attention weights, and of the output, that is dropped
    qk_norm: str | None = None  # norm of queries and keys: "head" by head, "heads" all concatenated. None means no norm
    make_norm: Callable[[], nn.Module] = RMSNorm  # makes the norms of queries and keys
    rope: Rope | None = None  # the rotation of queries and keys. None means no rotation
    scale: float | None = None  # factor of the scores. None means 1 / sqrt(H)
    window: int | None = None  # tokens that each token attends to, itself included. None means all
    softcap: float | None = None  # cap of the scores. None means no cap
    kernel_init: nn.initializers.Initializer = nn.initializers.normal(INIT_STD)  # initial values of q, k and v
    residual_init: nn.initializers.Initializer = nn.initializers.normal(INIT_STD)  # initial values of c_proj
    causal: bool = True  # False: tokens attend to all of their document, by the plain kernel
    attention_fn: AttentionFn = plain_attention  # the kernel of causal attention
    dtype: DTypeLike = jnp.float32  # dtype of activations and matrix products

    def setup(self) -> None:
        """Create the projections and norms."""
        self.size = self.n_embd // self.n_head if self.head_dim is None else self.head_dim
        n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        project = functools.partial(Dense, use_bias=self.qkv_bias, kernel_init=self.kernel_init, dtype=self.dtype)
        self.q = project(self.n_head * self.size)
        self.k, self.v = project(n_kv_head * self.size), project(n_kv_head * self.size)
        self.c_proj = Dense(self.n_embd, use_bias=self.out_bias, kernel_init=self.residual_init, dtype=self.dtype)
        self.q_norm, self.k_norm = (self.make_norm(), self.make_norm()) if self.qk_norm else (None, None)
        self.drop = nn.Dropout(self.dropout, name="Dropout_0")  # the name decides what is dropped

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array | None = None,
        *,
        segments_BT: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Attend, and project the merged heads to x_BTD.

        Args:
            x_BTD: one vector per token.
            positions_BT: int32, for rope. B may be 1. None means 0, 1, 2 ...
            segments_BT: int32, the document of each token: it attends to no other. None means one document per row.
            train: apply dropout, with `rngs={"dropout": key}`.
        """
        heads = self.project(x_BTD, positions_BT)
        out_BTNH = self.attend(*heads, positions_BT=positions_BT, segments_BT=segments_BT, train=train)
        return self.merge_heads(out_BTNH, train)

    @property
    def scores(self) -> Scores:
        """Return how scores become weights."""
        return Scores(self.scale, self.window, self.softcap, self.dropout)

    def project(self, x_BTD: jax.Array, positions_BT: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (q_BTNH, k_BTKH, v_BTKH), normed and rotated."""
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1])[None]
        q_BTF, k_BTF, v_BTF = self.qkv(x_BTD)
        q_BTNH, k_BTKH = self.split_heads(q_BTF, self.q_norm), self.split_heads(k_BTF, self.k_norm)
        if self.rope is not None:
            q_BTNH, k_BTKH = rope(q_BTNH, positions_BT, self.rope), rope(k_BTKH, positions_BT, self.rope)
        return q_BTNH, k_BTKH, self.split_heads(v_BTF)

    def qkv(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values of all heads side by side, (q_BTF, k_BTF, v_BTF)."""
        return self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)

    def split_heads(self, x_BTF: jax.Array, norm: nn.Module | None = None) -> jax.Array:
        """Split heads that lie side by side, x_BTF -> x_BTNH, with a norm where `qk_norm` says."""
        if norm is not None and self.qk_norm == "heads":
            x_BTF = norm(x_BTF)
        x_BTNH = x_BTF.reshape(*x_BTF.shape[:2], -1, self.size)
        return norm(x_BTNH) if norm is not None and self.qk_norm == "head" else x_BTNH

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Return the weighted values, out_BTNH. With a cache they are its values, once these tokens are in it."""
        if self.causal and is_decoding(self):
            if self.has_variable("cache", "columns"):
                cache = self.get_variable("cache", "columns").write(k_BSKH, v_BSKH, positions_BT)
                # Without a barrier XLA on CPU writes each cache three times, once for each reader, into copies.
                cache = jax.lax.optimization_barrier(cache)
                self.put_variable("cache", "columns", cache)
                return cache.attend(q_BTNH, positions_BT, self.scores)
            self.put_variable("cache", "columns", LayerCache.empty(k_BSKH, v_BSKH))
        kernel = self.attention_fn if self.causal else functools.partial(plain_attention, causal=False)
        key = self.make_rng("dropout") if train and self.dropout else None
        return kernel(q_BTNH, k_BSKH, v_BSKH, self.scores, segments_BT=segments_BT, key=key)

    def weights(
        self, q_BTNH: jax.Array, k_BSKH: jax.Array, *, segments_BT: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        """Return the attention weights, weights_BTNS in float32."""
        T, S = q_BTNH.shape[1], k_BSKH.shape[1]
        visible_B1TS = find_visible(T, S, self.window, segments_BT=segments_BT, causal=self.causal)
        key = self.make_rng("dropout") if train and self.dropout else None
        return attention_weights(q_BTNH, k_BSKH, self.scores, visible_B1TS, key).swapaxes(1, 2)

    def merge_heads(self, out_BTNH: jax.Array, train: bool = False) -> jax.Array:
        """Merge the heads' outputs and project them to x_BTD, with dropout in training."""
        return self.drop(self.c_proj(out_BTNH.reshape(*out_BTNH.shape[:2], -1)), deterministic=not train)
