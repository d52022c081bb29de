"""Matrices for decoding: the same products, in fewer bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.layers.linear import to_int8
from jaxgpt.sample.quantize import DecodeMatrix, _matmul_on_gpu
from tests.helpers import FLOAT32_REORDERED

MATRIX_FD = jax.random.normal(jax.random.key(0), (29, 24))


@pytest.mark.parametrize("multiply", [DecodeMatrix.matmul, _matmul_on_gpu])
@pytest.mark.parametrize("rows", [1, 9])
# Sums of 24 products of size 1: half a step of 2^-8, or of 2/127, in each factor.
@pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-5), ("bfloat16", 0.12), ("int8", 0.25)])
def test_a_product_for_decoding_is_the_product(rows, dtype, error, multiply):
    x_ND = jax.random.normal(jax.random.key(1), (rows, 24))
    y_NF = jax.jit(multiply)(DecodeMatrix.quantize(MATRIX_FD, dtype), x_ND)
    assert y_NF.dtype == jnp.float32
    np.testing.assert_allclose(y_NF, x_ND @ MATRIX_FD.T, atol=error, rtol=error)


@pytest.mark.parametrize("rows", [8, 33])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_row_has_the_same_bits_whatever_the_others_are_and_wherever_it_is(rows, dtype):
    matrix = DecodeMatrix.quantize(jax.random.normal(jax.random.key(0), (301, 192)), dtype)
    multiply = jax.jit(lambda x_ND: matrix.matmul(x_ND))
    x_ND = jax.random.normal(jax.random.key(1), (rows, 192))
    alone_NF = multiply(jnp.broadcast_to(x_ND[0], x_ND.shape))
    for row in (0, rows - 1):
        np.testing.assert_array_equal(multiply(x_ND.at[row].set(x_ND[0]))[row], alone_NF[0])


def test_int8_is_off_by_at_most_half_a_step():
    values, scale = to_int8(MATRIX_FD)
    assert values.dtype == jnp.int8 and int(jnp.abs(values).max()) == 127
    error_FD = jnp.abs(values * scale[:, None] - MATRIX_FD)
    assert (error_FD <= jnp.broadcast_to(scale[:, None], error_FD.shape) * 0.5001).all()
    zeros, scale = to_int8(jnp.zeros((1, 3)))
    np.testing.assert_allclose(zeros * scale[:, None], 0.0, **FLOAT32_REORDERED)
