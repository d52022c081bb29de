import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.layers import rope, sinusoidal
from tests.helpers import DIMS, FLOAT32_REORDERED


def test_sinusoidal_is_the_papers_formula():
    T, D = 9, 6
    expected = np.zeros((T, D))
    for position in range(T):
        for i in range(D // 2):
            angle = position / 10_000 ** (2 * i / D)
            expected[position, 2 * i], expected[position, 2 * i + 1] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(sinusoidal(jnp.arange(T)[None], D)[0], expected, **FLOAT32_REORDERED)


def test_positions_are_not_rounded():
    """bfloat16 has no 257."""
    at = sinusoidal(jnp.array([[256, 257]]), 4)[0]
    assert abs(float(at[0, 0] - at[1, 0])) > 0.1


def test_rope_keeps_lengths_and_position_0():
    x_BTNH = jax.random.normal(jax.random.key(0), DIMS["BTNH"])
    y_BTNH = rope(x_BTNH, jnp.arange(DIMS["T"][0])[None], 10_000.0)
    np.testing.assert_allclose(jnp.linalg.norm(y_BTNH, axis=-1), jnp.linalg.norm(x_BTNH, axis=-1), **FLOAT32_REORDERED)
    np.testing.assert_array_equal(y_BTNH[:, 0], x_BTNH[:, 0])


def test_rope_scores_depend_on_distance_alone():
    q_BTNH, k_BTNH = jax.random.normal(jax.random.key(0), (2, *DIMS["BTNH"]))
    positions = jnp.arange(DIMS["T"][0])[None]

    def scores(shift):
        q, k = (rope(x, positions + shift, 10_000.0) for x in (q_BTNH, k_BTNH))
        return jnp.einsum("BTNH,BSNH->BNTS", q, k)

    np.testing.assert_allclose(scores(0), scores(37), rtol=1e-3, atol=1e-3)  # float32 angles of about 40 radians
    assert not np.allclose(scores(0), jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH), atol=1e-2)
