"""The C++ kernels: they equal the plain ones, gradients included, whatever the mask, and are built once if they can be."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.experiment import TrainConfig
from jaxgpt.layers.kernels.native import attention, build
from jaxgpt.layers.kernels.native.attention import native_attention
from jaxgpt.layers.kernels.native.build import why_not_native
from jaxgpt.layers.kernels.plain import Scores, plain_attention
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.device import compute_options, find_kernel
from jaxgpt.sample.quantize import native_product
from tests.helpers import out_and_gradients

EQUAL = dict(rtol=1e-5, atol=1e-5)


def made(B, T, N, K, H, V):
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, V)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


@pytest.fixture(autouse=True, scope="module")
def kernel():
    if (why := why_not_native()) is not None:
        pytest.skip(f"no native attention here: {why}")


# (B, T, N, K, H, V): sizes that no vector and no block of queries divides.
@pytest.mark.parametrize(
    ("sizes", "documents", "scores"),
    [
        ((2, 37, 4, 2, 20, 12), 1, Scores(scale=0.3)),
        ((1, 101, 4, 1, 24, 40), 4, Scores(window=50, softcap=0.7)),
        ((3, 1, 2, 1, 5, 3), 1, Scores()),
    ],
)
def test_it_equals_the_plain_kernel(sizes, documents, scores):
    ids_BT = jnp.asarray(np.sort(np.random.default_rng(1).integers(documents, size=sizes[:2]), axis=1), jnp.int32)
    how = {"scores": scores, "segments_BT": None if documents == 1 else ids_BT}
    found, expected = (
        out_and_gradients(attend, *made(*sizes), **how) for attend in (native_attention, plain_attention)
    )
    chex.assert_trees_all_close(found, expected, **EQUAL)


def test_the_bits_are_the_same_each_time_and_in_any_company():
    q, k, v = made(6, 50, 4, 2, 16, 16)
    first = out_and_gradients(native_attention, q, k, v)
    for _ in range(2):
        chex.assert_trees_all_equal(out_and_gradients(native_attention, q, k, v), first)
    alone = out_and_gradients(native_attention, q[:1], k[:1], v[:1])
    chex.assert_trees_all_equal(alone, jax.tree.map(lambda x: x[:1], first))


def test_bfloat16_is_converted_and_dropout_is_the_plain_kernels():
    q, k, v = (x.astype(jnp.bfloat16) for x in made(1, 20, 2, 2, 8, 8))
    out = native_attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), plain_attention(q, k, v).astype(jnp.float32), atol=0.02)
    dropped = [find_kernel(name)(q, k, v, Scores(dropout=0.5), key=jax.random.key(0)) for name in ("native", "plain")]
    np.testing.assert_array_equal(*dropped)


@pytest.mark.parametrize(("F", "D", "U"), [(130, 768, 1), (64, 193, 17)])
def test_the_product_of_integers_is_exact(F, D, U):
    draw = np.random.default_rng(0)
    values_FD, x_UD = (draw.integers(-128, 128, size=(rows, D)).astype(np.int8) for rows in (F, U))
    values_FD[0], x_UD[0] = -128, -128  # the largest sum
    expected = values_FD.astype(np.int64) @ x_UD.T.astype(np.int64)
    np.testing.assert_array_equal(jax.jit(native_product)(values_FD, x_UD), expected)


@pytest.mark.slow
def test_it_is_built_once(monkeypatch, tmp_path):
    """And where it cannot be, one line says why, and only to whoever asks for it."""
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    compiler = build.shutil.which("c++") or build.shutil.which("g++") or build.shutil.which("clang++")
    built = build._build(compiler)
    assert [x.name for x in (tmp_path / "native").iterdir()] == [built.name]
    monkeypatch.setattr(build.subprocess, "run", None)
    assert build._build(compiler) == built


@pytest.mark.parametrize(
    ("cxx", "said"),
    [("no-such-compiler", "there is no C++ compiler (no-such-compiler)"), ("false", "does not build it: ")],
)
def test_where_it_cannot_be_built(cxx, said, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(attention, "why_not_native", why_not_native.__wrapped__)
    monkeypatch.setattr("jaxgpt.layers.kernels.native.build.why_not_native", why_not_native.__wrapped__)
    model = GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=8)
    assert compute_options(model, TrainConfig()).attention == "plain"
    with pytest.raises(UserError) as e:
        compute_options(model, TrainConfig(attention="native"))
    assert said in str(e.value) and "Use auto or plain." in str(e.value)
    assert compute_options(model, TrainConfig(attention="native"), required=False).attention == "plain"
    with pytest.raises(UserError, match="there is no native attention here"):
        native_attention(*made(1, 2, 1, 1, 4, 4))
