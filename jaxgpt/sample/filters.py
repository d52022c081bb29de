"""Filter next-token logits, and sample from them: pure functions on logits_BV.

`SamplingRows` holds the `Sampling` of each row of a batch as arrays, so that other values never compile another program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxgpt.config.validate import LARGEST_SIZE, short_repr
from jaxgpt.sample import COLDEST, MAX_BIASES, Sampling

SMALL_K = 128  # most tokens of top-k that are found by sorting, which takes longer for more


class SamplingRows(flax.struct.PyTreeNode):
    """The `Sampling` of each row of a batch, as data. B may be 1: the same for all rows.

    A filter runs if any row asks for it, and leaves the logits of the others as they are, to the bit.
    """

    temperature_B: jax.Array  # float32, 1 for greedy rows
    top_k_B: jax.Array  # int32, LARGEST_SIZE for no filter
    top_p_B: jax.Array  # float32, 1 for no filter
    min_p_B: jax.Array  # float32, 0 for no filter
    repetition_B: jax.Array  # float32, 1 for no penalty
    frequency_B: jax.Array  # float32, 0 for no penalty
    presence_B: jax.Array  # float32, 0 for no penalty
    is_greedy_B: jax.Array  # bool: the most likely token is taken
    is_biased_B: jax.Array  # bool: the row has biases
    bias_ids_BK: jax.Array  # int32, K = MAX_BIASES, padded with ids that no model has
    biases_BK: jax.Array  # float32: what is added to the logits of these ids
    __repr__ = short_repr

    @staticmethod
    def stack(samplings: Sequence[Sampling]) -> SamplingRows:
        """Return the rows of several `Sampling`, as NumPy's arrays: they go to the device with a call."""
        rows = []
        for s in samplings:
            temperature = 1.0 if s.is_greedy else s.temperature or 1.0
            top_k = min(s.top_k or LARGEST_SIZE, LARGEST_SIZE)
            top_p = 1.0 if s.top_p is None else s.top_p
            penalties = s.repetition_penalty or 1.0, s.frequency_penalty or 0.0, s.presence_penalty or 0.0
            padding = [(LARGEST_SIZE, 0.0)] * (MAX_BIASES - len(s.logit_bias))
            biases = zip(*s.logit_bias, *padding, strict=True)  # ids, and what is added to their logits
            flags = s.is_greedy, bool(s.logit_bias)
            rows.append((temperature, top_k, top_p, s.min_p or 0.0, *penalties, *flags, *biases))
        types = (np.float32, np.int32, *[np.float32] * 5, bool, bool, np.int32, np.float32)
        columns: Any = (np.array(column, dtype) for column, dtype in zip(zip(*rows, strict=True), types, strict=True))
        return SamplingRows(*columns)

    def draw(self, logits_BV: jax.Array, keys_B: jax.Array, seen_BV: jax.Array | None = None) -> jax.Array:
        """Draw one token for each row with its own key: token_B, int32. The penalties need `seen_BV`."""
        logits_BV = self.adjust(logits_BV, seen_BV)
        likeliest_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        all_greedy = self.is_greedy_B.all()
        drawn_B = jax.lax.cond(all_greedy, lambda: likeliest_B, lambda: draw(self._softmax(logits_BV), keys_B))
        return jnp.where(self.is_greedy_B, likeliest_B, drawn_B)

    def probabilities(self, logits_BV: jax.Array, seen_BV: jax.Array | None = None) -> jax.Array:
        """Return the distribution that tokens are drawn from, [B, V].

        The penalties need `seen_BV`: see `adjust`.
        """
        logits_BV = self.adjust(logits_BV, seen_BV)
        one_hot_BV = jax.nn.one_hot(jnp.argmax(logits_BV, axis=-1), logits_BV.shape[-1])
        return jnp.where(self.is_greedy_B[:, None], one_hot_BV, self._softmax(logits_BV))

    def adjust(self, logits_BV: jax.Array, seen_BV: jax.Array | None) -> jax.Array:
        """Apply the penalties to tokens that were seen, and add the biases.

        seen_BV: int32, twice the number of times that the completion has a token, and 1 more if the prompt has it.
        """

        def repeat(logits_BV: jax.Array, seen_BV: jax.Array) -> jax.Array:
            penalty = _per_row(self.repetition_B)
            return jnp.where(seen_BV > 0, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)

        def count(logits_BV: jax.Array, seen_BV: jax.Array) -> jax.Array:
            count_BV = seen_BV >> 1
            return logits_BV - count_BV * _per_row(self.frequency_B) - (count_BV > 0) * _per_row(self.presence_B)

        def bias(logits_BV: jax.Array, _) -> jax.Array:
            each_B1 = jnp.arange(len(logits_BV))[:, None]
            return logits_BV.at[each_B1, self.bias_ids_BK].add(self.biases_BK, mode="drop")

        steps = [(self.is_biased_B.any(), bias)]
        if seen_BV is not None:
            counts = (self.frequency_B != 0) | (self.presence_B != 0)
            steps = [((self.repetition_B != 1).any(), repeat), (counts.any(), count), *steps]
        for is_wanted, step in steps:
            logits_BV = jax.lax.cond(is_wanted, step, lambda logits_BV, _: logits_BV, logits_BV, seen_BV)
        return logits_BV

    def _softmax(self, logits_BV: jax.Array) -> jax.Array:
        """Return the distribution after temperature and the other filters."""
        logits_BV = logits_BV / jnp.maximum(self.temperature_B, COLDEST)[:, None]
        top_k_B = jnp.minimum(self.top_k_B, logits_BV.shape[-1])
        for wanted, keep, value_B in (
            (top_k_B < logits_BV.shape[-1], keep_top_k, top_k_B),
            (self.top_p_B < 1, keep_top_p, self.top_p_B),
            (self.min_p_B > 0, keep_min_p, self.min_p_B),
        ):
            logits_BV = jax.lax.cond(wanted.any(), keep, lambda logits_BV, _: logits_BV, logits_BV, value_B)
        return jax.nn.softmax(logits_BV, axis=-1)


def draw(weights_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
    """Draw token_B, int32, in proportion to each row's weights, with the row's key. Weight 0 is never drawn.

    It inverts the cumulative sum with one random number per row, 1 to 2 ms on CPU for GPT-2's 50,257 tokens. The Gumbel
    trick of `jax.random.categorical` needs V random numbers per row, and takes 6 ms.
    """
    cumulative_BV = jnp.cumsum(weights_BV, axis=-1)
    uniform_B1 = jax.vmap(jax.random.uniform)(keys_B)[:, None]
    # A parallel sum need not be monotone in its last bit, so the first token past the threshold could have no weight.
    past_BV = (cumulative_BV > uniform_B1 * cumulative_BV[:, -1:]) & (weights_BV > 0)
    largest_B = jnp.argmax(weights_BV, axis=-1)
    return jnp.where(past_BV.any(axis=-1), jnp.argmax(past_BV, axis=-1), largest_B).astype(jnp.int32)


def keep_top_k(logits_BV: jax.Array, k: int | jax.Array) -> jax.Array:
    """Set all but the k largest logits of each row to -inf. Ties with the k-th are kept. k: also [B], and may exceed V.

    Up to SMALL_K the largest are sorted, 2 ms on CPU for 8 rows of 50,257 tokens. Bisection, for any k, takes 7 ms.
    """
    B, V = logits_BV.shape
    k_B1 = jnp.broadcast_to(jnp.minimum(_per_row(k, jnp.int32), V), (B, 1))
    order_BV, most, ends = _order(logits_BV), min(SMALL_K, V), jnp.iinfo(jnp.int32)

    def sort() -> jax.Array:
        sorted_BK = _order(jax.lax.top_k(logits_BV, most)[0])
        return jnp.take_along_axis(sorted_BK, jnp.minimum(k_B1, most) - 1, axis=-1)

    def bisect() -> jax.Array:
        return _bisect(lambda edge_B1: (order_BV >= edge_B1).sum(-1, keepdims=True) >= k_B1, B, ends.min, ends.max)

    edge_B1 = jax.lax.cond(((k_B1 <= most) | (k_B1 == V)).all(), sort, bisect)
    return jnp.where((order_BV < edge_B1) & (k_B1 < V), -jnp.inf, logits_BV)


def _order(x: jax.Array) -> jax.Array:
    """Return int32 in the order of the floats, -0 before 0."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def keep_top_p(logits_BV: jax.Array, p: float | jax.Array) -> jax.Array:
    """Set logits outside the nucleus to -inf: the smallest set of tokens with a total probability of at least p.

    Ties at its edge are kept. p: also [B]. Bisection over the bits of a float, which have the floats' order, finds the
    edge in 32 passes: 3 ms on CPU for 50,257 tokens, where a sort takes 21 ms.
    """
    probability_BV = jax.nn.softmax(logits_BV, axis=-1)
    bits_BV = jax.lax.bitcast_convert_type(probability_BV, jnp.int32)
    p_B1 = jnp.maximum(_per_row(p), jnp.finfo(jnp.float32).tiny)  # p = 0 would keep no token

    def is_enough(edge_B1: jax.Array) -> jax.Array:
        return jnp.where(bits_BV >= edge_B1, probability_BV, 0.0).sum(axis=-1, keepdims=True) >= p_B1

    edge_B1 = _bisect(is_enough, len(bits_BV), 0, 0x3F800001)  # the bits of the float after 1.0
    # Rounded sums may reach 1 without the least probable tokens, or never, but p = 1 means all.
    return jnp.where((bits_BV < edge_B1) & (p_B1 < 1.0), -jnp.inf, logits_BV)


def keep_min_p(logits_BV: jax.Array, p: float | jax.Array) -> jax.Array:
    """Set the logits of tokens less probable than p times the most probable one to -inf. p: also [B]."""
    return jnp.where(logits_BV < logits_BV.max(axis=-1, keepdims=True) + jnp.log(_per_row(p)), -jnp.inf, logits_BV)


def _per_row(value: float | jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return a number, or one for each row, as a column: [1, 1] or [B, 1]."""
    return jnp.asarray(value, dtype).reshape(-1, 1)


def _bisect(is_enough: Callable[[jax.Array], jax.Array], B: int, low: int, high: int) -> jax.Array:
    """Return the largest int32 edge_B1 from `low`, for which it holds, to `high` at which `is_enough` holds."""

    def halve(_, edges):
        low_B1, high_B1 = edges
        middle_B1 = (low_B1 & high_B1) + ((low_B1 ^ high_B1) >> 1)  # their mean, rounded down, without overflow
        enough_B1 = is_enough(middle_B1)
        return jnp.where(enough_B1, middle_B1, low_B1), jnp.where(enough_B1, high_B1, middle_B1)

    edges = jnp.full((B, 1), low, jnp.int32), jnp.full((B, 1), high, jnp.int32)
    return jax.lax.fori_loop(0, 32, halve, edges)[0]
