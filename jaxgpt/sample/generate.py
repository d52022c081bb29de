"""Text from a model: prompts in, tokens out, in one jitted program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.sample.filters import Sampling


@dataclasses.dataclass(frozen=True)
class Generated:
    """tokens: for each prompt the ids that were generated, without the prompt."""

    tokens: list[list[int]]


def generate(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    vocab_size: int | None = None,
) -> Generated:
    """Continue each prompt, a list of ids of any length, by `max_new_tokens` ids.

    The model sees the last block_size tokens, as in nanoGPT; of a longer prompt the beginning is not read.
    Every step runs the whole window: there is no cache yet. vocab_size: ids from it on are never drawn, for
    models whose vocabulary is padded beyond the tokenizer's.
    Raises `UserError` for no prompts, an empty prompt, or max_new_tokens below 1.
    """
    sampling = Sampling() if sampling is None else sampling
    limit = model.config.vocab_size
    assert limit is not None, "a model with parameters has one"
    if not len(prompts):
        raise UserError("no prompts: give at least one list of token ids")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}: needs at least 1")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {number} is empty: start it from a token, such as the end-of-text or a newline")
        if min(prompt) < 0 or max(prompt) >= limit:
            raise UserError(
                f"prompt {number} has ids from {min(prompt)} to {max(prompt)}, the model knows 0 to {limit - 1}"
            )

    T = model.config.block_size
    window_BT = np.zeros((len(prompts), T), np.int32)
    lengths_B = np.zeros(len(prompts), np.int32)
    for row, prompt in enumerate(prompts):
        last = prompt[-T:]
        window_BT[row, : len(last)], lengths_B[row] = last, len(last)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(prompts)))
    tokens_BS = _generate(model, params, window_BT, lengths_B, keys_B, max_new_tokens, sampling, vocab_size or limit)
    return Generated(tokens=np.asarray(tokens_BS).tolist())


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7))
def _generate(model, params, window_BT, lengths_B, keys_B, new_tokens, sampling, vocab_size):
    """tokens_BS, S = new_tokens. Prompts stand at the left of their window; causality hides what is behind them."""
    T = window_BT.shape[1]

    def step(carry, index):
        window_BT, lengths_B = carry
        x_BTD = model.apply({"params": params}, window_BT, method="features")
        last_B1D = jnp.take_along_axis(x_BTD, (lengths_B - 1)[:, None, None], axis=1)
        logits_BV = model.apply({"params": params}, last_B1D, method="unembed")[:, 0, :vocab_size]
        tokens_B = sampling.draw(logits_BV, jax.vmap(jax.random.fold_in, (0, None))(keys_B, index))
        tokens_B = tokens_B.astype(jnp.int32)
        # A full window slides by one; position T - 1 is then the new token's.
        full_B1 = (lengths_B == T)[:, None]
        window_BT = jnp.where(full_B1, jnp.roll(window_BT, -1, axis=1), window_BT)
        at_B = jnp.minimum(lengths_B, T - 1)
        window_BT = jax.vmap(lambda row, at, token: row.at[at].set(token))(window_BT, at_B, tokens_B)
        return (window_BT, jnp.minimum(lengths_B + 1, T)), tokens_B

    _, tokens_SB = jax.lax.scan(step, (window_BT, lengths_B), jnp.arange(new_tokens))
    return tokens_SB.T
