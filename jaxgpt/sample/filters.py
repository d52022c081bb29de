"""What to do with next-token logits before drawing: pure functions on logits_BV, composed by `Sampling`."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxgpt.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Filters apply in the order temperature, top_k, top_p, as in transformers."""

    temperature: float = 1.0  # logits are divided by it; 0 is greedy
    top_k: int | None = None  # keep the k likeliest (Fan et al. 2018, arXiv:1805.04833); None: all
    top_p: float | None = (
        None  # keep the fewest tokens with this much probability (Holtzman et al. 2019, arXiv:1904.09751)
    )
    greedy: bool = False  # always the likeliest; the rest is ignored

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature={self.temperature}: needs 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k}: needs at least 1")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p}: needs more than 0 and at most 1")

    def draw(self, logits_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
        """One token for each row by that row's key: tokens_B, int32."""
        if self.greedy or self.temperature == 0:
            return jnp.argmax(logits_BV, axis=-1)
        logits_BV = logits_BV / self.temperature
        if self.top_k is not None:
            logits_BV = keep_top_k(logits_BV, self.top_k)
        if self.top_p is not None:
            logits_BV = keep_top_p(logits_BV, self.top_p)
        return jax.vmap(jax.random.categorical)(keys_B, logits_BV)


def keep_top_k(logits_BV: jax.Array, k: int) -> jax.Array:
    """-inf for all but the k largest of each row (ties with the k-th stay). k above V keeps all."""
    kth_B1 = jax.lax.top_k(logits_BV, min(k, logits_BV.shape[-1]))[0][:, -1:]
    return jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)


def keep_top_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """-inf outside the nucleus: the fewest tokens, likeliest first, whose probability together is at least p."""
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    sorted_BV = jax.nn.softmax(jnp.take_along_axis(logits_BV, order_BV, axis=-1), axis=-1)
    before_BV = jnp.cumsum(sorted_BV, axis=-1) - sorted_BV  # probability of all likelier tokens; 0 for the first
    rank_BV = jnp.argsort(order_BV, axis=-1)
    outside_BV = jnp.take_along_axis(before_BV >= p, rank_BV, axis=-1)
    return jnp.where(outside_BV, -jnp.inf, logits_BV)
