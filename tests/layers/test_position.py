import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.layers import Rope, rope, sinusoidal
from jaxgpt.model import GPTConfig
from tests.helpers import FLOAT32_REORDERED


def test_sinusoidal_is_the_papers_formula():
    """To more digits than bfloat16 has."""
    T, D = 9, 6
    expected = np.zeros((T, D))
    for position in range(T):
        for i in range(D // 2):
            angle = position / 10_000 ** (2 * i / D)
            expected[position, 2 * i], expected[position, 2 * i + 1] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(sinusoidal(jnp.arange(T)[None], D)[0], expected, **FLOAT32_REORDERED)


def test_rope_turns_complex_numbers():
    """x_i + i x_{i+2} of a head of 4, by i position theta^(-2i/4): halves, not neighbours, and not the other way."""
    x_BTNH = np.random.default_rng(0).normal(size=(1, 3, 2, 4))
    turned = (x_BTNH[..., :2] + 1j * x_BTNH[..., 2:]) * np.exp(
        1j * np.array([5, 6, 70])[:, None, None] * np.array([1.0, 100.0**-0.5])
    )
    y_BTNH = rope(jnp.asarray(x_BTNH, jnp.float32), jnp.array([[5, 6, 70]]), Rope(4, 100.0))
    np.testing.assert_allclose(y_BTNH, np.concatenate([turned.real, turned.imag], axis=-1), **FLOAT32_REORDERED)


def test_part_of_a_head_is_turned_and_the_rest_left():
    x_BTNH = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    positions = jnp.arange(5)[None]
    y_BTNH = rope(x_BTNH, positions, Rope(4, 100.0))
    np.testing.assert_array_equal(y_BTNH[..., 4:], x_BTNH[..., 4:])
    np.testing.assert_array_equal(y_BTNH[..., :4], rope(x_BTNH[..., :4], positions, Rope(4, 100.0)))


def test_scaling_for_longer_texts():
    """Linear: all wavelengths. Llama 3's: those above 8192 tokens eightfold, those below 2048 not, and between between."""
    plain = np.asarray(Rope(128, 500_000.0).frequencies())
    np.testing.assert_allclose(Rope(128, 500_000.0, "linear", 8.0).frequencies(), plain / 8.0, rtol=1e-6)
    scaled = np.asarray(Rope(128, 500_000.0, "llama3", 8.0, 1.0, 4.0, 8192).frequencies())
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8.0, rtol=1e-6)
    np.testing.assert_array_equal(scaled[wavelength < 2048], plain[wavelength < 2048])
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.sum() == 6  # of 64 pairs
    kept = (8192 / wavelength - 1.0) / (4.0 - 1.0)  # 0: one turn in the original context; 1: four
    blend = kept * plain + (1.0 - kept) * plain / 8.0
    np.testing.assert_allclose(scaled[between], blend[between], rtol=1e-5)


def test_longrope_has_a_factor_for_each_pair_and_one_for_all():
    rotation = Rope(4, 100.0, "longrope", divisors=(2.0, 5.0), magnitude=1.25)
    np.testing.assert_allclose(rotation.frequencies(), Rope(4, 100.0).frequencies() / np.array([2.0, 5.0]), rtol=1e-6)
    y_BTNH = rope(jnp.ones((1, 3, 1, 4)), jnp.arange(3)[None], rotation)
    np.testing.assert_allclose(jnp.linalg.norm(y_BTNH, axis=-1), 2.5, rtol=1e-6)
    sizes = {"n_head": 2, "n_embd": 8, "position": "rope", "rope_scaling": "longrope", "rope_original_context": 16}
    factors = {"rope_short_factors": (1.0, 2.0), "rope_long_factors": (3.0, 4.0)}
    for block_size, divisors in zip((16, 17), factors.values(), strict=True):
        assert GPTConfig(block_size=block_size, **sizes, **factors).make_rope(None).divisors == divisors
    with pytest.raises(UserError, match="rope_long_factors: need 2 numbers each"):
        GPTConfig(**sizes)
