"""Beam search: the likeliest text that a search of a certain width finds, in one jitted program."""

from __future__ import annotations

import dataclasses
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
from jaxgpt.sample.decoding import Decoding, pad_stop_tokens
from jaxgpt.sample.quantize import unrolled
from jaxgpt.sample.score import token_ids
from jaxgpt.sample.state import Texts, begin, read, read_all

NEVER = -1e30  # a score that nothing real has, and that stays finite when two are added


class Found(NamedTuple):
    """What a search found for each prompt, best first: of `beams` texts, those that there are."""

    tokens: list[list[list[int]]]  # without the prompt and the stop token
    scores: list[list[float]]  # log-probability in nats over the length penalty


class Beams(flax.struct.PyTreeNode):
    """Each of the B prompts has W texts that go on, best first, and the best W that have stopped."""

    texts: Texts  # B W rows
    logprob_BW: jax.Array
    done_BWX: jax.Array  # their columns
    done_length_BW: jax.Array  # tokens written
    done_score_BW: jax.Array


def beam_search(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    beams: int,
    length_penalty: float = 0.6,
    sources: Sequence[Sequence[int]] | None = None,
) -> Found:
    """Continue each prompt to the stop token, keeping the `beams` likeliest beginnings at every token.

    A text's score is its log-probability, stop token included, over ((5 + tokens) / 6) ^ length_penalty, whose tokens
    are those written and the stop token (Wu et al. 2016, arXiv:1609.08144, equation 14; 0.6 is Vaswani et al. 2017's).
    A search ends when no text that goes on could still beat the ones that have stopped. Texts are taken as they are at
    max_new_tokens, or sooner, where the last token that they were made from was the block_size-th of prompt and text.
    It reads through the cache, whose rows follow the beams.
    length_penalty: at least 0, where log-probabilities alone count.
    decoding: its sampling is not used, since nothing is drawn; it needs a stop token. Prompts and sources: see
    `generate`. What is found for a prompt does not depend on the others. Raises `UserError` for a prompt of more than
    block_size tokens.
    """
    beams = check_count("beams", beams)
    if not decoding.stop_tokens:
        raise UserError("beam search needs a stop token: without one, the shortest text would always be the likeliest")
    if not 0 <= length_penalty < math.inf:
        raise UserError(f"length_penalty={length_penalty}: needs a finite number of at least 0")
    block_size = model.config.block_size
    ids = [token_ids(model, prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
    room_B = [block_size + 1 - len(prompt) for prompt in ids]  # the last token of a text need not be read
    if min(room_B, default=1) < 1:
        raise UserError(
            f"a prompt has {block_size + 1 - min(room_B)} tokens: needs at most block_size={block_size}, within which a search stays"
        )
    max_new_tokens = min(decoding.max_new_tokens, max(room_B, default=decoding.max_new_tokens))
    decoding = dataclasses.replace(decoding, max_new_tokens=max_new_tokens)

    def each(rows: Sequence[Sequence[int]] | None) -> list[Sequence[int]] | None:
        return None if rows is None else [row for row in rows for _ in range(beams)]

    texts = begin(model, params, each(prompts) or [], decoding, key=jax.random.key(0), sources=each(sources))
    first = int(texts.written)
    limit_B = first + np.minimum(room_B, max_new_tokens).astype(np.int32)
    stops, V = pad_stop_tokens(decoding.stop_tokens), decoding.known_ids(model)
    searched = _search(model, params, texts, stops, limit_B, length_penalty, beams, V)
    tokens_BWX, lengths_BW, scores_BW = jax.device_get(searched)
    order_BW = np.argsort(-scores_BW, axis=1, kind="stable")
    found = Found([], [])
    for tokens_WX, lengths_W, scores_W, order_W in zip(tokens_BWX, lengths_BW, scores_BW, order_BW, strict=True):
        real = [w for w in order_W.tolist() if scores_W[w] > NEVER / 2]
        found.tokens.append([tokens_WX[w, first : first + lengths_W[w]].tolist() for w in real])
        found.scores.append([float(scores_W[w]) for w in real])
    return found


@functools.partial(jax.jit, static_argnums=(0, 6, 7))
def _search(model, params, texts: Texts, stops, limit_B, alpha, W: int, V: int) -> Any:
    """(tokens_BWX, lengths_BW, scores_BW) of the best that have stopped, or were cut at their limit, a column."""
    model, params = unrolled(model, params)
    rows, X = texts.tokens_BX.shape
    B, start = rows // W, texts.written
    b_B1 = jnp.arange(B)[:, None]

    def over_length(logprob_BW, tokens):
        return logprob_BW / ((5.0 + tokens) / 6.0) ** alpha

    def best(s: Beams, columns_BWX, length_BW, score_BW) -> Beams:
        """With these among those that have stopped, of which the best W stay."""
        all_BWX = jnp.concatenate([s.done_BWX, columns_BWX], axis=1)
        length_BM = jnp.concatenate([s.done_length_BW, length_BW], axis=1)
        top_BW, at_BW = jax.lax.top_k(jnp.concatenate([s.done_score_BW, score_BW], axis=1), W)
        return s.replace(done_BWX=all_BWX[b_B1, at_BW], done_length_BW=length_BM[b_B1, at_BW], done_score_BW=top_BW)

    def step(s: Beams, x_RD: jax.Array) -> Beams:
        """One more token for every beam: of all W V continuations, the best that stop and the best that do not."""
        t = s.texts
        logits: Any = model.apply({"params": params}, x_RD[:, None], method="unembed")
        logprob_BWV = jax.nn.log_softmax(logits[:, 0, :V], axis=-1).reshape(B, W, V) + s.logprob_BW[:, :, None]
        is_stop_V = (jnp.arange(V)[:, None] == stops[None]).any(axis=1)
        tokens = t.written - start + 1  # with the one that is chosen now
        columns_BWX = t.tokens_BX.reshape(B, W, X)

        # Only a stop among the W likeliest of all continuations: with one beam, what greedy decoding would do.
        least_B1 = jax.lax.top_k(logprob_BWV.reshape(B, W * V), W)[0][:, -1:]
        stopping_BW = jnp.where(is_stop_V[None, None], logprob_BWV, NEVER).max(axis=-1)
        stops_BW = (stopping_BW >= least_B1) & (stopping_BW > NEVER / 2)
        score_BW = jnp.where(stops_BW, over_length(stopping_BW, tokens), NEVER)
        s = best(s, columns_BWX, jnp.full((B, W), tokens - 1), score_BW)

        going_BM = jnp.where(is_stop_V[None, None], NEVER, logprob_BWV).reshape(B, W * V)
        logprob_BW, at_BW = jax.lax.top_k(going_BM, W)
        from_BW, token_BW = at_BW // V, at_BW % V
        rows_R = (b_B1 * W + from_BW).reshape(-1)
        tokens_BX = jax.lax.dynamic_update_slice_in_dim(
            t.tokens_BX[rows_R], token_BW.reshape(-1, 1).astype(t.tokens_BX.dtype), t.written, axis=1
        )
        # The prompt's cache is the same in all beams of it, and so is the source: only what was written since differs.
        layers = jax.tree.map(lambda x: x[rows_R], t.cache.layers)
        t = t.replace(tokens_BX=tokens_BX, written=t.written + 1, cache=t.cache.replace(layers=layers))
        # Those that did not stop in time are taken as they are, and do not go on.
        cut_B1 = (t.written >= limit_B)[:, None]
        score_BW = jnp.where(cut_B1 & (logprob_BW > NEVER / 2), over_length(logprob_BW, tokens), NEVER)
        s = best(s, tokens_BX.reshape(B, W, X), jnp.full((B, W), tokens), score_BW)
        return s.replace(texts=t, logprob_BW=jnp.where(cut_B1, NEVER, logprob_BW))

    def unfinished(s: Beams):
        # A text's log-probability only falls; the longest that it may become divides it by the most.
        most_B = over_length(s.logprob_BW[:, 0], limit_B - start + 1)
        return ((s.texts.written < limit_B) & (most_B > s.done_score_BW[:, -1])).any()

    def go_on(s: Beams) -> Beams:
        t, x_RTD = read(model, params, s.texts, 1)
        return step(s.replace(texts=t), x_RTD[:, 0])

    # At first the beams of a prompt are all the same: one of them is taken for real.
    alone_BW = jnp.broadcast_to(jnp.where(jnp.arange(W) == 0, 0.0, NEVER)[None], (B, W))
    texts, x_RD = read_all(model, params, texts)
    s = Beams(
        texts=texts,
        logprob_BW=alone_BW,
        done_BWX=jnp.zeros((B, W, X), texts.tokens_BX.dtype),
        done_length_BW=jnp.zeros((B, W), jnp.int32),
        done_score_BW=jnp.full((B, W), NEVER),
    )
    s = jax.lax.while_loop(unfinished, go_on, step(s, x_RD))
    return s.done_BWX, s.done_length_BW, s.done_score_BW
