"""Speculative decoding: a small draft model proposes tokens, and the model checks several of them in one pass.

Leviathan, Kalman and Matias 2022, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. A completion has exactly the
model's own distribution, and a greedy one is the same token for token; a bad draft only costs time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config.validate import check_whole
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.sample.decoding import Decoding, pad_stop_tokens
from jaxgpt.sample.filters import Sampling, draw
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.sample.state import (
    DecodeState,
    has_unbounded_positions,
    init_state,
    prefill,
    prefill_chunk,
    recompute_window,
)


def speculate(
    model: GPT,
    params: dict,
    draft: GPT,
    draft_params: dict,
    prompt: Sequence[int],
    decoding: Decoding,
    *,
    key: jax.Array,
    every: int | None = 8,
    num_draft_tokens: int = 4,
) -> Iterator[list[int]]:
    """Yield the completion of one prompt as lists of new ids.

    One prompt, since the rows of a batch would accept different numbers of tokens. The completion depends on the prompt
    and the key only; unless greedy, it is not the one that `generate` draws with this key.

    Args:
        model: a GPT.
        params: its parameters.
        draft: a GPT with the same tokenizer.
        draft_params: its parameters.
        prompt: a list of ids.
        decoding: see `generate`.
        key: see `generate`.
        every: tokens between two items, or a few more; the first has at least one. None means one item, at the end.
        num_draft_tokens: tokens that the draft proposes for each pass of the model, at most half of either block_size.

    Raises:
        UserError: as `generate`; also if the draft has a smaller vocabulary, or num_draft_tokens is out of range.
    """
    limit, every = decoding.limits(every)[0], every or decoding.max_new_tokens
    vocab_size = decoding.known_ids(model)
    if decoding.known_ids(draft) < vocab_size:
        raise UserError(
            f"the draft knows {draft.config.vocab_size} tokens, the model writes {vocab_size}: both need one tokenizer"
        )
    most = min(model.config.block_size, draft.config.block_size) // 2
    G = check_whole("num_draft_tokens", num_draft_tokens)
    if not 1 <= G <= most:
        raise UserError(f"num_draft_tokens={G}: needs 1 to {most}, half of the shorter block_size")
    init = functools.partial(init_state, decoding=decoding, key=key)
    # One slot more than a round reads: rejected tokens must not overwrite slots that the window still needs.
    t = init(model, params, [prompt], extra_slots=G + 1)
    d = init(draft, draft_params, [prompt[-draft.config.block_size :]], extra_slots=G + 1)
    sampling, stops = decoding.sampling, pad_stop_tokens(decoding.stop_tokens)
    start, shown = int(t.cursor), 0
    while True:
        t, d = _advance(model, draft, params, draft_params, t, d, sampling, stops, start + limit, vocab_size, G)
        length = min(int(t.length_B[0]), decoding.max_new_tokens)
        yield np.asarray(t.tokens_BX)[0, start + shown : start + length].tolist()
        shown = length
        if shown == decoding.max_new_tokens or bool(t.stopped_B[0]):
            return
        limit = min(shown + every, decoding.max_new_tokens)


class _Model(NamedTuple):
    """One of the two models, for a batch of one."""

    model: GPT
    params: dict
    vocab_size: int

    def catch_up(self, state: DecodeState, ahead: int) -> DecodeState:
        """Read all tokens but the last, which is read with the next ones."""
        state = recompute_window(self.model, state, ahead)
        # More is unread than a round leaves: a prompt, or half of a full window.
        is_behind = state.cursor - state.cache_cursor > 1
        state = jax.lax.cond(is_behind, lambda s: prefill(self.model, self.params, s)[0], lambda s: s, state)
        return state.replace(cache_cursor=state.cursor - 1)

    def read(self, state: DecodeState, T: int) -> tuple[DecodeState, jax.Array]:
        return prefill_chunk(self.model, self.params, state, T)

    def probabilities(self, x_BTD: jax.Array, sampling: Sampling, seen_TV: jax.Array | None) -> jax.Array:
        logits_BTV: Any = self.model.apply({"params": self.params}, x_BTD, method="unembed")
        return sampling.probabilities(logits_BTV[0, :, : self.vocab_size], seen_TV)


@functools.partial(jax.jit, static_argnums=(0, 1, 9, 10), donate_argnums=(4, 5))
def _advance(model, draft, params, draft_params, t, d, sampling, stops, limit, vocab_size, G):
    """Generate at least up to column `limit` of t, the model's state, unless it stops.

    d is the draft's state: the same tokens, in other columns.
    """
    target = _Model(*unstack_layers(model, params), vocab_size)
    drafter = _Model(*unstack_layers(draft, draft_params), vocab_size)

    def run_round(states):
        t, d = target.catch_up(states[0], 0), drafter.catch_up(states[1], G - 1)
        key = jax.random.fold_in(t.keys_B[0], t.length_B[0])
        d_start = d.cursor
        d, q_GV, tokens_G, seen_RV = _propose(drafter, d, sampling, key, t.seen_ids(vocab_size), G)
        t, n, last = _verify(target, t, sampling, key, tokens_G, q_GV, seen_RV)
        order_R = jnp.arange(G + 1)
        new_R = jnp.where(order_R < n, jnp.append(tokens_G, 0), last)
        is_end_R = jnp.isin(new_R, stops) & (order_R <= n)
        return _accept(t, t.cursor, new_R, n, is_end_R), _accept(d, d_start, new_R, n, is_end_R)

    def is_unfinished(states):
        return (states[0].cursor < limit) & ~states[0].stopped_B.all()

    return jax.lax.while_loop(is_unfinished, run_round, (t, d))


def _propose(drafter: _Model, d: DecodeState, sampling: Sampling, key: jax.Array, seen_1V: jax.Array | None, G: int):
    """Draw G tokens from the draft. Return (state, q_GV they were drawn from, tokens_G, tokens seen before each)."""
    # The draft may not have read the token before the last, so it first reads two.
    d, x_BTD = drafter.read(d.replace(cache_cursor=d.cursor - 2), 2)
    q, tokens, seen = [], [], [seen_1V]  # without the penalty its elements are None, a tree without leaves
    for i in range(G):
        if i:
            d, x_BTD = drafter.read(d, 1)
        q.append(drafter.probabilities(x_BTD[:, -1:], sampling, seen[-1]))
        token_1 = draw(q[-1], jax.random.fold_in(key, i)[None])
        d = d.append(token_1)
        tokens.append(token_1)
        seen.append(jax.tree.map(lambda seen_1V, token_1=token_1: seen_1V.at[0, token_1[0]].set(True), seen[-1]))
    seen_RV = jax.tree.map(lambda *rows: jnp.concatenate(rows), *seen)
    return d, jnp.concatenate(q), jnp.concatenate(tokens), seen_RV


def _verify(target: _Model, t: DecodeState, sampling: Sampling, key, tokens_G, q_GV, seen_RV):
    """Read the last token and the G proposed. Return (state, n, token): n are kept, and the token follows them."""
    G = len(tokens_G)
    proposed_BX = jax.lax.dynamic_update_slice(t.tokens_BX, tokens_G[None], (0, t.cursor))
    t, x_BTD = target.read(t.replace(tokens_BX=proposed_BX), G + 1)
    p_RV = target.probabilities(x_BTD, sampling, seen_RV)  # token i should have been drawn from p_RV[i]

    # If all before it are kept, token i is kept with probability min(1, p/q): u q < p, since q may be tiny.
    kept_key, last_key = jax.random.split(jax.random.fold_in(key, G))
    each = jnp.arange(G)
    u_G = jax.random.uniform(kept_key, (G,))
    kept_G = u_G * q_GV[each, tokens_G] < p_RV[each, tokens_G]
    is_bounded = not has_unbounded_positions(target.model)
    room = target.model.config.block_size - (t.cursor - t.start_B[0])  # positions after which nothing can be checked
    if is_bounded:
        kept_G &= each < room
    n = jnp.argmin(jnp.concatenate([kept_G, jnp.zeros(1, bool)]))  # up to the first that is rejected
    # After a rejection, draw from the positive part of p - q, which corrects the distribution. At the end of the
    # position table nothing was rejected: as after G kept tokens, the next one is drawn from p.
    is_rejected = n < G
    if is_bounded:
        is_rejected &= n < room
    rest_V = jnp.maximum(p_RV[n] - jnp.where(is_rejected, q_GV[jnp.minimum(n, G - 1)], 0.0), 0.0)
    # If p and q are equal up to rounding, nothing may be left: then draw from p.
    return t, n, draw(jnp.where(rest_V.sum() > 0, rest_V, p_RV[n])[None], last_key[None])[0]


def _accept(state: DecodeState, start: jax.Array, new_R: jax.Array, n: jax.Array, is_end_R: jax.Array) -> DecodeState:
    """Write n + 1 of the new tokens to the columns from `start` on."""
    stopped = is_end_R.any()
    state = state.replace(
        tokens_BX=jax.lax.dynamic_update_slice(state.tokens_BX, new_R[None], (0, start)),
        cursor=start + n + 1,
        cache_cursor=start + n,
        length_B=state.length_B + jnp.where(stopped, jnp.argmax(is_end_R), n + 1),
        stopped_B=state.stopped_B | stopped,
    )
    if state.seen_BV is None:
        return state
    V = state.seen_BV.shape[1]  # out of range, dropped by mode="drop"
    kept_R = jnp.where(jnp.arange(len(new_R)) <= n, new_R, V)
    return state.replace(seen_BV=state.seen_BV.at[0, kept_R].set(True, mode="drop"))
