"""Beam search for the most probable completion, in one jitted program."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config.validate import check_count
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.sample.cache import KVCache
from jaxgpt.sample.decoding import Decoding, next_bucket, pad_stop_tokens
from jaxgpt.sample.prefill import allocate_cache, cache_columns, encode_source, read_prompt
from jaxgpt.sample.prompts import check_sources, truncate_prompts
from jaxgpt.sample.quantize import apply_model, unstack_layers
from jaxgpt.sample.state import insert_cache

NEVER = -1e30  # score of an impossible completion; the sum of two is still finite


class BeamResult(NamedTuple):
    """At most `beams` completions of each prompt, best first."""

    tokens: list[list[list[int]]]  # without the prompt and the stop token
    scores: list[list[float]]  # log-probability in nats over the length penalty


def beam_search(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    beams: int,
    length_penalty: float = 0.6,
    sources: Sequence[Sequence[int]] | None = None,
) -> BeamResult:
    """Continue each prompt up to a stop token, keeping the `beams` most probable partial completions at every token.

    The score of a completion is its log-probability, divided by ((5 + tokens) / 6) ^ length_penalty; both include the
    stop token (Wu et al. 2016, arXiv:1609.08144, equation 14; 0.6 is Vaswani et al. 2017's). The search for a prompt
    ends when no unfinished completion could still beat the finished ones. At max_new_tokens, or when prompt and
    completion have block_size + 1 tokens, unfinished completions compete as they are. The result for a prompt does not
    depend on the others.

    `decoding` must have a stop token; its sampling is ignored, since nothing is drawn. `length_penalty` is at least 0,
    which compares log-probabilities only. Other arguments: see `generate`. Raises `UserError` for a prompt of more than
    block_size tokens.
    """
    beams = check_count("beams", beams)
    if not decoding.stop_tokens:
        raise UserError("beam search needs a stop token: without one, the shortest text would always be the likeliest")
    if not 0 <= length_penalty < math.inf:
        raise UserError(f"length_penalty={length_penalty}: needs a finite number of at least 0")
    block_size = model.config.block_size
    room_B = [block_size + 1 - len(prompt) for prompt in prompts]  # the last token of a completion is not read
    if min(room_B, default=1) < 1:
        raise UserError(
            f"a prompt has {block_size + 1 - min(room_B)} tokens: needs at most block_size={block_size}, within which a search stays"
        )
    max_new_tokens = min(decoding.max_new_tokens, max(room_B, default=decoding.max_new_tokens))
    check_sources(model, sources, len(prompts))
    limit_B = np.minimum(room_B, max_new_tokens).astype(np.int32)
    state = _read_prompts(model, params, truncate_prompts(model, prompts), sources, beams, decoding, max_new_tokens)
    stops, V = pad_stop_tokens(decoding.stop_tokens), decoding.known_ids(model)
    results = jax.device_get(_search(model, params, state, stops, limit_B, length_penalty, beams, V))
    result = BeamResult([], [])
    for tokens_WX, length_W, score_W in zip(*results, strict=True):
        real = [w for w in np.argsort(-score_W, kind="stable").tolist() if score_W[w] > NEVER / 2]
        result.tokens.append([tokens_WX[w, : length_W[w]].tolist() for w in real])
        result.scores.append([float(score_W[w]) for w in real])
    return result


class BeamState(flax.struct.PyTreeNode):
    """R = B W partial completions, W of each prompt."""

    tokens_RX: jax.Array  # int32: the completions
    last_R: jax.Array  # int32: last tokens, not in the cache yet
    position_R: jax.Array  # int32: their positions
    count: jax.Array  # int32: tokens in each completion
    cache: KVCache


def _read_prompts(
    model: GPT,
    params: dict,
    prompts: list[list[int]],
    sources: Sequence[Sequence[int]] | None,
    beams: int,
    decoding: Decoding,
    max_new_tokens: int,
) -> BeamState:
    """Return the state before the first token: each prompt, read up to its last token, in the rows of its beams."""
    rows = len(prompts) * beams
    columns = cache_columns(model, next_bucket(decoding.bucket, max(map(len, prompts)) + max_new_tokens))
    like = jax.tree.leaves(params)[0]
    one = allocate_cache(like, model, 1, columns, decoding.cache_dtype)
    cache = allocate_cache(like, model, rows, columns, decoding.cache_dtype)
    source_columns = min(next_bucket(16, max(map(len, sources or [()]))), model.config.block_size)
    for number, prompt in enumerate(prompts):
        if sources is not None:
            one = encode_source(model, params, one, sources[number], source_columns)
            cache = cache if number else encode_source(model, params, cache, sources[number], source_columns)
        one = read_prompt(model, params, one, prompt[:-1])
        for row in range(number * beams, (number + 1) * beams):
            cache = insert_cache(cache, np.int32(row), one, np.int32(len(prompt)))
    return BeamState(
        tokens_RX=jnp.zeros((rows, next_bucket(64, max_new_tokens)), jnp.int32),
        last_R=jnp.repeat(jnp.array([prompt[-1] for prompt in prompts]), beams),
        position_R=jnp.repeat(jnp.array([len(prompt) - 1 for prompt in prompts]), beams),
        count=jnp.int32(0),
        cache=cache,
    )


class Beams(flax.struct.PyTreeNode):
    """For each of B prompts, W unfinished completions, best first, and the best W finished ones."""

    state: BeamState
    logprob_BW: jax.Array
    finished_BWX: jax.Array
    finished_length_BW: jax.Array  # tokens generated
    finished_score_BW: jax.Array

    def finish(self, tokens_BWX: jax.Array, length_BW: jax.Array, score_BW: jax.Array) -> Beams:
        """Merge candidates into the finished completions and keep the best W."""
        B, W = score_BW.shape
        all_BRX = jnp.concatenate([self.finished_BWX, tokens_BWX], axis=1)
        length_BR = jnp.concatenate([self.finished_length_BW, length_BW], axis=1)
        top_BW, at_BW = jax.lax.top_k(jnp.concatenate([self.finished_score_BW, score_BW], axis=1), W)
        b_B1 = jnp.arange(B)[:, None]
        return self.replace(
            finished_BWX=all_BRX[b_B1, at_BW], finished_length_BW=length_BR[b_B1, at_BW], finished_score_BW=top_BW
        )


@functools.partial(jax.jit, static_argnums=(0, 6, 7))
def _search(model, params, state: BeamState, stops, limit_B, alpha, W: int, V: int) -> Any:
    """Return (tokens_BWX, length_BW, score_BW) of the best finished completions. limit_B: tokens at which to stop."""
    model, params = unstack_layers(model, params)
    R, X = state.tokens_RX.shape
    B = R // W

    def is_unfinished(beams: Beams):
        # A log-probability can only fall, and the longest possible completion has the largest divisor.
        bound_B = over_length(beams.logprob_BW[:, 0], limit_B + 1, alpha)
        return ((beams.state.count < limit_B) & (bound_B > beams.finished_score_BW[:, -1])).any()

    def step(beams: Beams) -> Beams:
        state = beams.state
        x_R1D, cache = state.cache.decode(model, params, state.last_R[:, None], state.position_R[:, None])
        logits = apply_model(model, params, x_R1D, method="unembed")
        logprob_BWV = jax.nn.log_softmax(logits[:, 0, :V], axis=-1).reshape(B, W, V)
        return _extend(beams.replace(state=state.replace(cache=cache)), logprob_BWV, stops, limit_B, alpha)

    beams = Beams(
        state=state,
        # At first all beams of a prompt are equal: only one of them counts.
        logprob_BW=jnp.broadcast_to(jnp.where(jnp.arange(W) == 0, 0.0, NEVER)[None], (B, W)),
        finished_BWX=jnp.zeros((B, W, X), state.tokens_RX.dtype),
        finished_length_BW=jnp.zeros((B, W), jnp.int32),
        finished_score_BW=jnp.full((B, W), NEVER),
    )
    beams = jax.lax.while_loop(is_unfinished, step, beams)
    return beams.finished_BWX, beams.finished_length_BW, beams.finished_score_BW


def _extend(beams: Beams, logprob_BWV: jax.Array, stops, limit_B, alpha) -> Beams:
    """Add a token to every beam: keep the best of the W V continuations that stop, and the best that do not."""
    state, (B, W, V), X = beams.state, logprob_BWV.shape, beams.finished_BWX.shape[-1]
    logprob_BWV = logprob_BWV + beams.logprob_BW[:, :, None]
    is_stop_V = jnp.isin(jnp.arange(V), stops)
    tokens = state.count + 1  # including the new one

    # A stop counts only among the W most probable continuations: with one beam, that is greedy decoding.
    least_B1 = jax.lax.top_k(logprob_BWV.reshape(B, W * V), W)[0][:, -1:]
    stopping_BW = jnp.where(is_stop_V[None, None], logprob_BWV, NEVER).max(axis=-1)
    stops_BW = (stopping_BW >= least_B1) & (stopping_BW > NEVER / 2)
    score_BW = jnp.where(stops_BW, over_length(stopping_BW, tokens, alpha), NEVER)
    beams = beams.finish(state.tokens_RX.reshape(B, W, X), jnp.full((B, W), tokens - 1), score_BW)

    going_BR = jnp.where(is_stop_V[None, None], NEVER, logprob_BWV).reshape(B, W * V)
    logprob_BW, at_BW = jax.lax.top_k(going_BR, W)
    rows_R = (jnp.arange(B)[:, None] * W + at_BW // V).reshape(-1)
    # The encoder's keys and values are the same for all beams of a prompt: only `cache.layers` is reordered.
    layers = jax.tree.map(lambda x: x[rows_R], state.cache.layers)
    token_R = (at_BW % V).reshape(-1)
    state = state.replace(
        tokens_RX=jax.lax.dynamic_update_slice_in_dim(state.tokens_RX[rows_R], token_R[:, None], state.count, axis=1),
        last_R=token_R,
        position_R=state.position_R + 1,
        count=tokens,
        cache=state.cache.replace(layers=layers),
    )
    # At its limit a completion is taken as it is.
    is_cut_B1 = (state.count >= limit_B)[:, None]
    score_BW = jnp.where(is_cut_B1 & (logprob_BW > NEVER / 2), over_length(logprob_BW, tokens, alpha), NEVER)
    beams = beams.finish(state.tokens_RX.reshape(B, W, X), jnp.full((B, W), tokens), score_BW)
    return beams.replace(state=state, logprob_BW=jnp.where(is_cut_B1, NEVER, logprob_BW))


def over_length(logprob: jax.Array, tokens: jax.Array, alpha: jax.Array) -> jax.Array:
    """Return the score of a completion: its log-probability over the length penalty."""
    return logprob / ((5.0 + tokens) / 6.0) ** alpha
