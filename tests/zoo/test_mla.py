"""experiments/zoo/mla.py: against the paper's equations, causality, decoding with absorbed products, the cache's size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.layers.block import Compute
from tests.helpers import TINY, import_pages

(mla,) = import_pages("zoo", "mla")

CONFIG = mla.MLAConfig(
    **dataclasses.asdict(TINY) | dict(position="rope", norm="rmsnorm", bias=False, n_embd=24, n_head=3, head_dim=6),
    kv_rank=7,
    q_rank=9,
    rope_dim=4,
    value_dim=5,
)


@pytest.mark.parametrize("q_rank", [None, 9])
def test_output_is_as_defined(q_rank):
    """Against loops in float64 over the paper's equations, with positions that restart in a second document."""
    module = dataclasses.replace(CONFIG, q_rank=q_rank).make_attention(0, Compute())
    x_BTD = jax.random.normal(jax.random.key(0), (1, 6, 24))
    positions_T, segments_T = np.array([0, 1, 2, 3, 0, 1]), np.array([1, 1, 1, 1, 2, 2])
    params = module.init(jax.random.key(1), x_BTD)["params"]
    params = jax.tree.map(lambda p: p + 0.4 * jax.random.normal(jax.random.key(p.size), p.shape), params)
    segments_BT = jnp.asarray(segments_T)[None]
    found = module.apply({"params": params}, x_BTD, jnp.asarray(positions_T)[None], segments_BT=segments_BT)[0]
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2) + 1e-5) * scale

    def turn(x, position):
        angle = position * 10_000.0 ** (-np.arange(2) / 2)
        return np.concatenate(
            [x[:2] * np.cos(angle) - x[2:] * np.sin(angle), x[2:] * np.cos(angle) + x[:2] * np.sin(angle)]
        )

    q, k, v = np.zeros((6, 3, 10)), np.zeros((6, 3, 10)), np.zeros((6, 3, 5))
    for t, x_D in enumerate(np.asarray(x_BTD[0], np.float64)):
        q_in = x_D if q_rank is None else norm(x_D @ p["q_down"]["kernel"], p["q_norm"]["scale"])
        q_F, down_F = q_in @ p["q"]["kernel"], x_D @ p["kv_down"]["kernel"]
        up_F = norm(down_F[:7], p["kv_norm"]["scale"]) @ p["kv_up"]
        for n in range(3):
            q_N, up_N = q_F[10 * n : 10 * n + 10], up_F[11 * n : 11 * n + 11]
            q[t, n] = np.concatenate([q_N[:6], turn(q_N[6:], positions_T[t])])
            k[t, n] = np.concatenate([up_N[:6], turn(down_F[7:], positions_T[t])])
            v[t, n] = up_N[6:]
    for t in range(6):
        seen = [s for s in range(t + 1) if segments_T[s] == segments_T[t]]
        heads = []
        for n in range(3):
            weights = np.exp([q[t, n] @ k[s, n] / np.sqrt(10) for s in seen])
            heads.append(sum(w * v[s, n] for w, s in zip(weights / weights.sum(), seen, strict=True)))
        np.testing.assert_allclose(found[t], np.concatenate(heads) @ p["c_proj"]["kernel"], rtol=1e-4, atol=1e-4)
