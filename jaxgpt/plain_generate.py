"""Generate text token by token, as shortly as it can be written. `sample` has the engine, with a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnums=0, static_argnames=("max_new_tokens", "temperature", "top_k", "block_size"))
def generate(
    model: Any,
    params: dict,
    prompts_BT: jax.Array,
    key: jax.Array,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    block_size: int | None = None,
) -> jax.Array:
    """Continue prompts of one length: int32, [B, T + max_new_tokens]. Each token reads the last block_size tokens again.

    Args:
        model: a `GPT`, or any other module tokens_BT -> logits_BTV.
        prompts_BT: int32, at least one token per row.
        key: the key of all draws.
        max_new_tokens: tokens to add.
        temperature: what logits are divided by. 0 takes the most probable token.
        top_k: draw from this many most probable tokens. None means from all.
        block_size: the most tokens that the model reads. None means `model.config.block_size`, which other modules lack.
    """
    B, T = prompts_BT.shape
    window = min(T + max_new_tokens, block_size or model.config.block_size)

    def add_token(t: jax.Array, tokens_BX: jax.Array) -> jax.Array:
        start = jnp.maximum(t - window, 0)  # the tokens after t are zeros, which no earlier one attends to
        read_BT = jax.lax.dynamic_slice_in_dim(tokens_BX, start, window, axis=1)
        logits_BTV = model.apply({"params": params}, read_BT)
        logits_BV = jax.lax.dynamic_index_in_dim(logits_BTV, t - 1 - start, axis=1, keepdims=False)
        if top_k is not None:
            kth_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
            logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
        if temperature == 0:
            token_B = logits_BV.argmax(axis=-1)
        else:
            token_B = jax.random.categorical(jax.random.fold_in(key, t), logits_BV / temperature)
        return tokens_BX.at[:, t].set(token_B.astype(jnp.int32))

    tokens_BX = jnp.zeros((B, T + max_new_tokens), jnp.int32).at[:, :T].set(prompts_BT)
    return jax.lax.fori_loop(T, T + max_new_tokens, add_token, tokens_BX)
