"""The invariants of a module with a cache of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import FLOAT32_REORDERED


def draw_inputs(module, *, rows=2, tokens=11, width=24):
    """(Parameters of which none is 0 or 1, inputs)."""
    x_BTD = jax.random.normal(jax.random.key(0), (rows, tokens, width))
    params = module.init(jax.random.key(2), x_BTD, jnp.arange(tokens)[None])["params"]
    return jax.tree.map(lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape), params), x_BTD


def check_decoding(module, params, inputs_BTX):
    """Read a prompt in a chunk of 5 and padding, then tokens one by one, then another sequence in the same cache."""
    positions_BT = jnp.broadcast_to(jnp.arange(inputs_BTX.shape[1])[None], inputs_BTX.shape[:2])
    decode = jax.jit(functools.partial(module.apply, method="decode"))
    # Row 0 has 5 valid tokens of its chunk, row 1 only 3, then padding: it goes on from 3.
    cache, lengths_B, rows_B = module.init_cache(2, 16, jnp.float32), jnp.array([5, 3]), jnp.arange(2)
    valid_BT = jnp.arange(5)[None] < lengths_B[:, None]
    for sequence_BTX in (inputs_BTX, inputs_BTX[:, ::-1]):
        whole_BTD = jax.jit(module.apply)({"params": params}, sequence_BTX, positions_BT)
        chunk_BTX = sequence_BTX[:, :5].at[1, 3:].set(7)
        out, cache = decode({"params": params}, chunk_BTX, positions_BT[:, :5], cache, valid_BT=valid_BT)
        np.testing.assert_allclose(out[valid_BT], whole_BTD[:, :5][valid_BT], **FLOAT32_REORDERED)
        for step in range(inputs_BTX.shape[1] - 5):
            at_B, one = lengths_B + step, jnp.ones((2, 1), bool)
            tokens_B1X = sequence_BTX[rows_B, at_B][:, None]
            out, cache = decode({"params": params}, tokens_B1X, at_B[:, None], cache, valid_BT=one)
            np.testing.assert_allclose(out[:, 0], whole_BTD[rows_B, at_B], **FLOAT32_REORDERED)


def check_causal(module):
    """Check by gradients that a token reads itself and all before it, and none after."""
    params, x_BTD = draw_inputs(module, rows=1, tokens=6)

    def out_TD(x_BTD):
        return module.apply({"params": params}, x_BTD, jnp.arange(6)[None])[0]

    reach_TS = jnp.abs(jax.jacobian(out_TD)(x_BTD)).sum(axis=(1, 2, 4))
    np.testing.assert_array_equal(np.asarray(reach_TS > 0), np.tri(6, dtype=bool))


def find_reach(model, params, tokens: int) -> np.ndarray:
    """Return whether the hidden state of each token depends on each token, by exchanging one token at a time."""
    config = model.config
    first_T = jnp.arange(tokens) % config.vocab_size
    changed_TT = jnp.where(jnp.eye(tokens, dtype=bool), (first_T + 3)[None] % config.vocab_size, first_T[None])
    states = jax.jit(functools.partial(model.apply, method="hidden_states"))
    same, others = states({"params": params}, first_T[None]), states({"params": params}, changed_TT)
    return (np.abs(others - same).max(axis=-1) > 1e-6).T
