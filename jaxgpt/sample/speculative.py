"""Speculative decoding: a small draft model guesses, the model checks several guesses in one pass.

Leviathan, Kalman and Matias 2022, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. What is written has exactly
the distribution of the model alone, and greedy text is the same token for token; a bad draft costs time only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Precision
from jaxgpt.config.validate import check_whole
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.sample.decoding import BUCKET, Decoding, pad_stop_tokens
from jaxgpt.sample.filters import Sampling, draw
from jaxgpt.sample.quantize import unrolled
from jaxgpt.sample.state import Texts, begin, full_B, read, read_all, restarted, slides

GUESSES = 4  # tokens that the draft writes between two passes of the model


def speculate(
    model: GPT,
    params: dict,
    draft: GPT,
    draft_params: dict,
    prompt: Sequence[int],
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    vocab_size: int | None = None,
    cache_dtype: Precision | None = None,
    bucket: int = BUCKET,
    guesses: int = GUESSES,
    every: int = 8,
) -> Iterator[list[int]]:
    """`stream` for one prompt, with a draft of the same tokenizer: lists of new ids, about `every` at a time.

    One prompt, since rows of a batch would accept different numbers of guesses. The same key gives the same text
    on every call, but another than `generate` gives, unless greedy.
    guesses: tokens that the draft writes between two passes of the model, at most half of either's block_size.
    Raises `UserError` as `generate` does, for another vocabulary, and for guesses out of range.
    """
    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        stop_tokens=stop_tokens,
        vocab_size=vocab_size,
        cache_dtype=cache_dtype,
        bucket=bucket,
        every=every,
    )
    yield from speculate_tokens(model, params, draft, draft_params, prompt, decoding, key=key, guesses=guesses)


def speculate_tokens(
    model: GPT,
    params: dict,
    draft: GPT,
    draft_params: dict,
    prompt: Sequence[int],
    decoding: Decoding,
    *,
    key: jax.Array,
    guesses: int = GUESSES,
) -> Iterator[list[int]]:
    """Yield new ids as `speculate` does, with its options as one value."""
    vocab_size, every = decoding.known_ids(model), decoding.every or decoding.max_new_tokens
    assert draft.config.vocab_size is not None
    if draft.config.vocab_size < vocab_size:
        raise UserError(
            f"the draft knows {draft.config.vocab_size} tokens, the model writes {vocab_size}: both need one tokenizer"
        )
    most = min(model.config.block_size, draft.config.block_size) // 2
    guesses = check_whole("guesses", guesses)
    if not 1 <= guesses <= most:
        raise UserError(f"guesses={guesses}: needs 1 to {most}, half of the shorter block_size")
    extra_slots = guesses + 1  # guesses that fail must not overwrite what the window still reads
    t = begin(model, params, [prompt], decoding, key=key, extra_slots=extra_slots)
    of_draft = prompt[-draft.config.block_size :]
    d = begin(draft, draft_params, [of_draft], decoding, key=key, extra_slots=extra_slots)
    sampling, stops = decoding.sampling, pad_stop_tokens(decoding.stop_tokens)
    start, shown, limit = int(t.written), 0, 1
    while True:
        t, d = _advance(model, draft, params, draft_params, t, d, sampling, stops, start + limit, vocab_size, guesses)
        length = min(int(t.length_B[0]), decoding.max_new_tokens)
        yield np.asarray(t.tokens_BX)[0, start + shown : start + length].tolist()
        shown = length
        if shown == decoding.max_new_tokens or bool(t.stopped_B[0]):
            return
        limit = min(shown + every, decoding.max_new_tokens)


@functools.partial(jax.jit, static_argnums=(0, 1, 9, 10), donate_argnums=(4, 5))
def _advance(model, draft, params, draft_params, t, d, sampling, stops, limit, vocab_size, guesses):
    """(t, d): texts of the model and the draft, which have the same tokens in columns of their own, at least to limit."""
    model, params = unrolled(model, params)
    draft, draft_params = unrolled(draft, draft_params)
    G, V = guesses, vocab_size

    def ready(of, parameters, t: Texts, ahead: int) -> Texts:
        """Read up to the last token, which is left to be read with the next ones."""
        if not slides(of):
            t = restarted(of, t, full_B(of, t, ahead))
        # More than a round leaves unread: a prompt, or what a full text begins anew with.
        t = jax.lax.cond(t.written - t.cached > 1, lambda t: read_all(of, parameters, t)[0], lambda t: t, t)
        return t.replace(cached=t.written - 1)

    def logits_of(of, parameters, x_BTD):
        return of.apply({"params": parameters}, x_BTD, method="unembed")[0, :, :V]

    def round_(td):
        t, d = td
        t, d = ready(model, params, t, 0), ready(draft, draft_params, d, G - 1)
        key = jax.random.fold_in(t.keys_B[0], t.length_B[0])
        seen_1V = None if t.seen_BV is None else t.seen_BV[:, :V]

        # The draft, one token at a time. Of the round before it may lack the last guess, so it first reads two.
        def guess(d, x_1D, seen_1V, i):
            q_1V = sampling.probabilities(logits_of(draft, draft_params, x_1D[:, None]), seen_1V)
            token_1 = draw(q_1V, jax.random.fold_in(key, i)[None])
            tokens_BX = jax.lax.dynamic_update_slice(d.tokens_BX, token_1[:, None], (0, d.written))
            seen_1V = None if seen_1V is None else seen_1V.at[0, token_1[0]].set(True)
            return d.replace(tokens_BX=tokens_BX, written=d.written + 1), q_1V, token_1, seen_1V

        begun = d.written
        d, x_BTD = read(draft, draft_params, d.replace(cached=d.written - 2), 2)
        q, tokens, seen = [], [], [] if seen_1V is None else [seen_1V]
        for i in range(G):
            if i:
                d, x_BTD = read(draft, draft_params, d, 1)
            d, q_1V, token_1, seen_1V = guess(d, x_BTD[:, -1], seen_1V, i)
            q.append(q_1V)
            tokens.append(token_1)
            if seen_1V is not None:
                seen.append(seen_1V)
        q_GV, tokens_G = jnp.concatenate(q), jnp.concatenate(tokens)

        # The model, on its last token and all guesses at once. p[i] is what guess i should have been drawn from.
        guessed_BX = jax.lax.dynamic_update_slice(t.tokens_BX, tokens_G[None], (0, t.written))
        t, x_BTD = read(model, params, t.replace(tokens_BX=guessed_BX), G + 1)
        seen_RV = None if seen_1V is None else jnp.concatenate(seen)
        p_RV = sampling.probabilities(logits_of(model, params, x_BTD), seen_RV)

        # Guess i is kept with probability min(1, p/q), while those before it are: u q < p, since q may be tiny.
        kept_key, last_key = jax.random.split(jax.random.fold_in(key, G))
        each = jnp.arange(G)
        u_G = jax.random.uniform(kept_key, (G,))
        kept_G = u_G * q_GV[each, tokens_G] < p_RV[each, tokens_G]
        if not slides(model):  # past the last position there is nothing to check against
            kept_G &= each < model.config.block_size - (t.written - t.start_B[0])
        n = jnp.argmin(jnp.concatenate([kept_G, jnp.zeros(1, bool)]))  # how many, up to the first that fails
        # After a failure the rest of p over q is drawn from, which makes up for what was kept too rarely. At the
        # table's end nothing failed: like after G guesses, the next token is simply p's.
        failed = n < G
        if not slides(model):
            failed &= n < model.config.block_size - (t.written - t.start_B[0])
        rest_V = jnp.maximum(p_RV[n] - jnp.where(failed, q_GV[jnp.minimum(n, G - 1)], 0.0), 0.0)
        # Rounding can leave nothing where p and q are equal, and then p is as good.
        last = draw(jnp.where(rest_V.sum() > 0, rest_V, p_RV[n])[None], last_key[None])[0]

        places = jnp.arange(G + 1)
        new = jnp.where(places < n, jnp.append(tokens_G, 0), last)
        stop = (new[:, None] == stops[None]).any(axis=1) & (places <= n)
        stopped = stop.any()
        length = jnp.where(stopped, jnp.argmax(stop), n + 1)

        def written(t: Texts, begun) -> Texts:
            t = t.replace(
                tokens_BX=jax.lax.dynamic_update_slice(t.tokens_BX, new[None], (0, begun)),
                written=begun + n + 1,
                cached=begun + n,
                length_B=t.length_B + length,
                stopped_B=t.stopped_B | stopped,
            )
            if t.seen_BV is None:
                return t
            return t.replace(seen_BV=t.seen_BV.at[0, jnp.where(places <= n, new, V)].set(True, mode="drop"))

        return written(t, t.written), written(d, begun)

    def unfinished(td):
        return (td[0].written < limit) & ~td[0].stopped_B.all()

    return jax.lax.while_loop(unfinished, round_, (t, d))
