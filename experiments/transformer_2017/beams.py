"""Beam search over the targets of an encoder-decoder: one jitted program on a cache of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from encoder_decoder import EncoderDecoder

from jaxgpt.config.validate import check_count
from jaxgpt.errors import UserError
from jaxgpt.sample.programs import Cache, next_bucket, read
from jaxgpt.sample.quantize import apply_model, with_decode_matrices

NEVER = -1e30  # score of an impossible target; the sum of two is still finite


class BeamResult(NamedTuple):
    """At most `beams` targets of each source, best first."""

    tokens: list[list[list[int]]]  # without the start and the end
    scores: list[list[float]]  # log-probability in nats over the length penalty


def beam_search(
    model: EncoderDecoder,
    params: dict,
    sources: Sequence[Sequence[int]],
    *,
    beams: int,
    start: int,
    end: int,
    vocab_size: int,
    length_penalty: float = 0.6,
) -> BeamResult:
    """Find targets of each source, keeping the `beams` most probable partial ones at every token.

    The score of a target is its log-probability, divided by ((5 + tokens) / 6) ^ length_penalty; both include the end
    (Wu et al. 2016, arXiv:1609.08144, equation 14; 0.6 is Vaswani et al. 2017's). The search for a source ends when no
    unfinished target could still beat the finished ones. At block_size tokens unfinished targets compete as they are.
    The result for a source does not depend on the others. With one beam and no length
    penalty, the target is what greedy decoding writes.

    Args:
        model: the encoder-decoder, and `params`: see `for_decoding`.
        params: its parameters.
        sources: lists of ids, each of 1 to block_size.
        beams: targets to keep.
        start: id before each target.
        end: id after it.
        vocab_size: ids from it on are never written.
        length_penalty: at least 0, which compares log-probabilities only.
    """
    W, S, B = check_count("beams", beams), model.config.block_size, len(sources)
    for number, source in enumerate(sources):
        if not 1 <= len(source) <= S:
            raise UserError(f"source {number} has {len(source)} tokens: needs 1 to {S}, the context of the model")
    columns = min(next_bucket(16, max(map(len, sources))), S)
    source_BS, segments_BS = np.zeros((2, B, columns), np.int32)
    for number, source in enumerate(sources):
        source_BS[number, : len(source)], segments_BS[number, : len(source)] = source, 1
    results = jax.device_get(_search(model, params, source_BS, segments_BS, W, start, end, length_penalty, vocab_size))
    result = BeamResult([], [])
    for tokens_WX, length_W, score_W in zip(*results, strict=True):
        real = [w for w in np.argsort(-score_W, kind="stable").tolist() if score_W[w] > NEVER / 2]
        result.tokens.append([tokens_WX[w, : length_W[w]].tolist() for w in real])
        result.scores.append([float(score_W[w]) for w in real])
    return result


class Beams(flax.struct.PyTreeNode):
    """For each of B sources, W unfinished targets, best first, in R = B W rows, and the best W finished ones."""

    tokens_RX: jax.Array  # int32: the targets
    last_R: jax.Array  # int32: last tokens, not in the cache yet
    count: jax.Array  # int32: tokens in each target
    cache: Cache
    logprob_BW: jax.Array
    finished_BWX: jax.Array
    length_BW: jax.Array  # tokens of the finished ones
    score_BW: jax.Array

    def finish(self, length: jax.Array, score_BW: jax.Array) -> Beams:
        """Merge the first `length` tokens of each row into the finished targets, and keep the best W."""
        (B, W), X = score_BW.shape, self.tokens_RX.shape[-1]
        all_BRX = jnp.concatenate([self.finished_BWX, self.tokens_RX.reshape(B, W, X)], axis=1)
        length_BR = jnp.concatenate([self.length_BW, jnp.full((B, W), length)], axis=1)
        top_BW, at_BW = jax.lax.top_k(jnp.concatenate([self.score_BW, score_BW], axis=1), W)
        b_B1 = jnp.arange(B)[:, None]
        return self.replace(finished_BWX=all_BRX[b_B1, at_BW], length_BW=length_BR[b_B1, at_BW], score_BW=top_BW)


def make_cache(
    model: EncoderDecoder, params: dict, columns: int, source_BS: jax.Array, segments_BS: jax.Array
) -> Cache:
    """Encode sources. Return an empty cache with room for `columns` tokens, and the keys and values of the sources.

    segments_BS: 1 for the source's tokens, then 0 for padding.
    """
    tokens_BX = jnp.zeros((len(source_BS), columns), jnp.int32)
    how: Any = {"positions_BT": jnp.arange(columns)[None], "source_BS": source_BS, "source_segments_BS": segments_BS}
    apply = with_decode_matrices(model.apply)
    return apply({"params": params}, tokens_BX, **how, method="hidden_states", mutable=["cache"])[1]["cache"]


@functools.partial(jax.jit, static_argnums=(0, 4, 8))
def _search(model, params, source_BS, segments_BS, W: int, start, end, alpha, V: int) -> Any:
    """Return (tokens_BWX, length_BW, score_BW) of the best finished targets."""
    B, X = source_BS.shape[0], model.config.block_size
    rows = (jnp.repeat(x_BS, W, axis=0) for x_BS in (source_BS, segments_BS))
    state = Beams(
        tokens_RX=jnp.zeros((B * W, X), jnp.int32),
        last_R=jnp.full(B * W, start),
        count=jnp.int32(0),
        cache=make_cache(model, params, X, *rows),
        # At first all beams of a source are equal: only one of them counts.
        logprob_BW=jnp.tile(jnp.where(jnp.arange(W) == 0, 0.0, NEVER), (B, 1)),
        finished_BWX=jnp.zeros((B, W, X), jnp.int32),
        length_BW=jnp.zeros((B, W), jnp.int32),
        score_BW=jnp.full((B, W), NEVER),
    )
    is_end_V = (jnp.arange(V) == end)[None, None]

    def is_unfinished(beams: Beams):
        # A log-probability can only fall, and the longest possible target has the largest divisor.
        bound_B = over_length(beams.logprob_BW[:, 0], jnp.int32(X + 1), alpha)
        return (beams.count < X) & (bound_B > beams.score_BW[:, -1]).any()

    def step(beams: Beams) -> Beams:
        """Add a token to every beam: keep the best of the W V continuations that end, and the best that do not."""
        positions_R1 = jnp.broadcast_to(beams.count, (B * W, 1))
        x_R1D, cache = read(model, params, beams.cache, beams.last_R[:, None], positions_R1)
        logits = apply_model(model, params, x_R1D, method="unembed")
        logprob_BWV = jax.nn.log_softmax(logits[:, 0, :V], axis=-1).reshape(B, W, V)
        logprob_BWV = logprob_BWV + beams.logprob_BW[:, :, None]
        tokens = beams.count + 1  # including the new one

        # An end counts only among the W most probable continuations: with one beam, that is greedy decoding.
        least_B1 = jax.lax.top_k(logprob_BWV.reshape(B, W * V), W)[0][:, -1:]
        ending_BW = jnp.where(is_end_V, logprob_BWV, NEVER).max(axis=-1)
        ends_BW = (ending_BW >= least_B1) & (ending_BW > NEVER / 2)
        beams = beams.finish(beams.count, jnp.where(ends_BW, over_length(ending_BW, tokens, alpha), NEVER))

        going_BR = jnp.where(is_end_V, NEVER, logprob_BWV).reshape(B, W * V)
        logprob_BW, at_BW = jax.lax.top_k(going_BR, W)
        rows_R = (jnp.arange(B)[:, None] * W + at_BW // V).reshape(-1)
        # The encoder's keys and values are the same for all beams of a source, and stay.
        for block in cache.values():
            block["attn"] = jax.tree.map(lambda x: x[rows_R], block["attn"])
        token_R = (at_BW % V).reshape(-1)
        is_full = tokens >= X  # then a target is taken as it is
        beams = beams.replace(
            tokens_RX=jax.lax.dynamic_update_slice_in_dim(
                beams.tokens_RX[rows_R], token_R[:, None], beams.count, axis=1
            ),
            last_R=token_R,
            count=tokens,
            cache=cache,
            logprob_BW=logprob_BW,
        )
        is_real_BW = is_full & (logprob_BW > NEVER / 2)
        return beams.finish(tokens, jnp.where(is_real_BW, over_length(logprob_BW, tokens, alpha), NEVER))

    beams = jax.lax.while_loop(is_unfinished, step, state)
    return beams.finished_BWX, beams.length_BW, beams.score_BW


def over_length(logprob: jax.Array, tokens: jax.Array, alpha: jax.Array) -> jax.Array:
    """Return the score of a target: its log-probability over the length penalty."""
    return logprob / ((5.0 + tokens) / 6.0) ** alpha
