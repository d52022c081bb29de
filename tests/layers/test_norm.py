import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.layers import RMSNorm, layer_norm, rms_norm
from tests.helpers import DIMS


def test_layer_norm_of_the_lesson():
    """The worked example of sancho-mini's lesson: mean 0.5, variance 6.25, then gamma and beta."""
    x_D = jnp.array([1.0, 0.0, -3.0, 4.0])
    ones = jnp.ones(4)
    np.testing.assert_allclose(layer_norm(x_D, ones, None, eps=0.0), [0.2, -0.2, -1.4, 1.4], atol=1e-6)
    gamma, beta = jnp.array([2.0, 1.0, 0.5, 1.0]), jnp.array([0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(layer_norm(x_D, gamma, beta, eps=0.0), [0.5, 0.0, -0.4, 1.8], atol=1e-6)


def test_statistics_are_float32_whatever_the_input():
    """bfloat16 has no 259: its mean of these four would be 258 or 260, and the signs wrong."""
    x_D = jnp.array([256.0, 258.0, 260.0, 262.0], jnp.bfloat16)
    y_D = layer_norm(x_D, jnp.ones(4), None, 0.0)
    assert y_D.dtype == jnp.bfloat16
    np.testing.assert_allclose(y_D.astype(jnp.float32), [-1.3416, -0.4472, 0.4472, 1.3416], rtol=1e-2)


def test_eps_is_added_to_the_variance():
    """Under the root: of 3 and -3, whose variance is 9, and 7 more, a root of 4."""
    x_D, ones = jnp.array([3.0, -3.0]), jnp.ones(2)
    np.testing.assert_allclose(layer_norm(x_D, ones, None, eps=7.0), [0.75, -0.75], rtol=1e-6)
    np.testing.assert_allclose(rms_norm(x_D, ones, eps=7.0), [0.75, -0.75], rtol=1e-6)


def test_an_offset_changes_what_is_kept_and_not_what_is_computed():
    x_BTD = jax.random.normal(jax.random.key(0), DIMS["BTD"])
    plain, offset = (RMSNorm(offset=offset).init_with_output(jax.random.key(0), x_BTD) for offset in (False, True))
    np.testing.assert_array_equal(plain[0], offset[0])
    assert not offset[1]["params"]["scale"].any()
