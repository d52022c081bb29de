"""The invariants of a module with a cache of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import FLOAT32_REORDERED


def check_decoding(module, params, inputs_BTX):
    """Compare `decode` with `__call__` on two rows of ten tokens: prompts of five and three tokens, so that one row has
    padding, then single tokens, then the same again in the used cache, as a new sequence finds it."""
    positions_BT = jnp.broadcast_to(jnp.arange(10)[None], (2, 10))
    whole_BTD = jax.jit(module.apply)({"params": params}, inputs_BTX, positions_BT)
    decode = jax.jit(functools.partial(module.apply, method="decode"))
    cache, lengths_B, rows_B = module.init_cache(2, 10, jnp.float32), jnp.array([5, 3]), jnp.arange(2)
    for _ in range(2):
        valid_BT = jnp.arange(5)[None] < lengths_B[:, None]
        out, cache = decode({"params": params}, inputs_BTX[:, :5], positions_BT[:, :5], cache, valid_BT=valid_BT)
        np.testing.assert_allclose(out[valid_BT], whole_BTD[:, :5][valid_BT], **FLOAT32_REORDERED)
        for step in range(5):
            at_B, one = lengths_B + step, jnp.ones((2, 1), bool)
            out, cache = decode(
                {"params": params}, inputs_BTX[rows_B, at_B][:, None], at_B[:, None], cache, valid_BT=one
            )
            np.testing.assert_allclose(out[:, 0], whole_BTD[rows_B, at_B], **FLOAT32_REORDERED)


def find_reach(model, params, tokens: int) -> np.ndarray:
    """Return whether the hidden state of each token depends on each token, by exchanging one token at a time."""
    config = model.config
    first_T = jnp.arange(tokens) % config.vocab_size
    changed_TT = jnp.where(jnp.eye(tokens, dtype=bool), (first_T + 3)[None] % config.vocab_size, first_T[None])
    states = jax.jit(functools.partial(model.apply, method="hidden_states"))
    same, others = states({"params": params}, first_T[None]), states({"params": params}, changed_TT)
    return (np.abs(others - same).max(axis=-1) > 1e-6).T
