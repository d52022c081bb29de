"""experiments/zoo/gated_deltanet.py: the rule token by token, chunks, documents, who gets Muon."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import FLOAT32_REORDERED, import_pages

(page,) = import_pages("zoo", "gated_deltanet")

B, T, N, H, F = 2, 11, 2, 4, 6
IS_FIRST = np.zeros((B, T), bool)
IS_FIRST[0, [0, 5, 6]] = True  # and row 1 goes on with the state that it was given


def draw_inputs(seed=0):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(B, T, N, H)) for _ in "qk")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = rng.normal(size=(B, T, N, F)), rng.normal(size=(B, N, H, F))
    log_decay, beta = -rng.exponential(size=(B, T, N)), rng.uniform(size=(B, T, N))
    return q, k, v, log_decay, beta, IS_FIRST, state


def rule_token_by_token(q, k, v, log_decay, beta, is_first, state):
    """The definition: S <- a (I - b k k') S + b k v'."""
    state, out = state.copy(), np.zeros(v.shape)
    for b, t, n in np.ndindex(B, T, N):
        S = 0 * state[b, n] if is_first[b, t] else state[b, n]
        key = k[b, t, n]
        erase = np.eye(H) - beta[b, t, n] * np.outer(key, key)
        state[b, n] = np.exp(log_decay[b, t, n]) * erase @ S + beta[b, t, n] * np.outer(key, v[b, t, n])
        out[b, t, n] = q[b, t, n] @ state[b, n]
    return out, state


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_rule_in_chunks_is_the_rule_token_by_token(chunk):
    inputs = draw_inputs()
    rule = jax.jit(functools.partial(page.gated_delta_rule, chunk=chunk))
    out_BTNF, state_BNHF = rule(*(jnp.asarray(x, jnp.float32 if x.dtype == float else bool) for x in inputs))
    expected_out, expected_state = rule_token_by_token(*inputs)
    np.testing.assert_allclose(out_BTNF, expected_out, **FLOAT32_REORDERED)
    np.testing.assert_allclose(state_BNHF, expected_state, **FLOAT32_REORDERED)
