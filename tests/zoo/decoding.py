"""Compare a mixer's cached decoding with its pass over the whole sequence."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import FLOAT32_REORDERED


def check_decoding(module, *, width, columns=16, tolerance=FLOAT32_REORDERED):
    """Read a prompt in a chunk of 5 and padding, then tokens one by one, then another sequence in the same cache."""
    T = 11
    x_BTD = jax.random.normal(jax.random.key(0), (2, T, width))
    other_BTD = jax.random.normal(jax.random.key(1), (2, T, width))
    params = module.init(jax.random.key(2), x_BTD, jnp.arange(T)[None])["params"]
    params = jax.tree.map(lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape), params)
    cache = module.init_cache(2, columns, jnp.float32)

    def step(x_BTD, start_B, cache, valid_BT):
        positions_BT = start_B[:, None] + jnp.arange(x_BTD.shape[1])[None]
        return module.apply({"params": params}, x_BTD, positions_BT, cache, valid_BT=valid_BT, method="decode")

    step = jax.jit(step)
    for sequence_BTD in (x_BTD, other_BTD):
        whole_BTD = module.apply({"params": params}, sequence_BTD, jnp.arange(T)[None])
        outs = []
        # Row 0 has 5 valid tokens of its chunk, row 1 only 3, then padding: it goes on from 3.
        valid_BT = jnp.array([[True] * 5, [True] * 3 + [False] * 2])
        chunk_BTD = jnp.where(valid_BT[..., None], sequence_BTD[:, :5], 7.0)
        out_BTD, cache = step(chunk_BTD, jnp.zeros(2, jnp.int32), cache, valid_BT)
        np.testing.assert_allclose(out_BTD[0], whole_BTD[0, :5], **tolerance)
        np.testing.assert_allclose(out_BTD[1, :3], whole_BTD[1, :3], **tolerance)
        for t in range(6):
            at_B = jnp.array([5 + t, 3 + t])
            out_BTD, cache = step(sequence_BTD[jnp.arange(2), at_B][:, None], at_B, cache, jnp.ones((2, 1), bool))
            outs.append([out_BTD[0, 0], out_BTD[1, 0]])
            np.testing.assert_allclose(out_BTD[:, 0], whole_BTD[jnp.arange(2), at_B], **tolerance)


def check_causal(module, *, width):
    """Check by gradients that a token reads itself and all before it, and none after."""
    T = 6
    x_BTD = jax.random.normal(jax.random.key(0), (1, T, width))
    params = module.init(jax.random.key(2), x_BTD, jnp.arange(T)[None])["params"]
    params = jax.tree.map(lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape), params)

    def out_TD(x_BTD):
        return module.apply({"params": params}, x_BTD, jnp.arange(T)[None])[0]

    reach_TS = jnp.abs(jax.jacobian(out_TD)(x_BTD)).sum(axis=(1, 2, 4))
    np.testing.assert_array_equal(np.asarray(reach_TS > 0), np.tri(T, dtype=bool))
