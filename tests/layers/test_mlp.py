import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.layers import ACTIVATIONS, MLP
from tests.conftest import SIZES
from tests.helpers import DIMS, FLOAT32_REORDERED


def make_mlp(hidden, width, **kwargs):
    init = jax.nn.initializers.normal(0.1)
    options = dict(activation="gelu", use_bias=True, dropout=0.0)
    mlp = MLP(hidden=hidden, **options | kwargs, kernel_init=init, residual_init=init)
    return mlp, jax.jit(mlp.init)(jax.random.key(0), jnp.ones((1, 1, width)))


@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1.2e-6), (jnp.bfloat16, 0.0)])
def test_gelu_by_erf_equals_gelu_by_erfc(dtype, atol):
    """The slope, too. In float32 to a rounding error of 1 times x, up to 8; in 16 bits erfc it is."""
    x = jnp.linspace(-8, 8, 999).astype(dtype)
    by_erfc = lambda x: jax.nn.gelu(x, approximate=False)  # noqa: E731
    np.testing.assert_allclose(ACTIVATIONS["gelu"](x), by_erfc(x), rtol=3e-7, atol=atol)
    slope, expected = (jax.jit(jax.vmap(jax.grad(f)))(x) for f in (ACTIVATIONS["gelu"], by_erfc))
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_formula(activation):
    D, F = SIZES["D"], SIZES["F"]
    mlp, variables = make_mlp(F, D, activation=activation)
    p = variables["params"]
    x = jax.random.normal(jax.random.key(1), (3, D))

    @jax.jit
    def formula(x):
        h = x @ p["c_fc"]["kernel"]
        gate = x @ p["c_gate"]["kernel"] if "glu" in activation else h
        h = ACTIVATIONS[activation](gate) * (h if "glu" in activation else 1.0)
        return h @ p["c_proj"]["kernel"]  # biases start at 0

    np.testing.assert_allclose(jax.jit(mlp.apply)(variables, x), formula(x), **FLOAT32_REORDERED)


def test_dropout_of_the_output():
    mlp, variables = make_mlp(SIZES["F"], SIZES["D"], dropout=0.5)
    x_BTD = jax.random.normal(jax.random.key(1), DIMS["BTD"])
    out = mlp.apply(variables, x_BTD, train=True, rngs={"dropout": jax.random.key(0)})
    assert 0.3 < float(jnp.mean(out == 0.0)) < 0.7
    kept = out != 0.0
    np.testing.assert_allclose(out[kept], 2.0 * mlp.apply(variables, x_BTD)[kept], **FLOAT32_REORDERED)
