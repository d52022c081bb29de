"""Programs that XLA on CPU has computed wrongly, compared with float64: compiled, without jit, and without jit in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A compiled result may be this many times as far from float64 as the one without jit is, or as far as this part of the
# largest magnitude: sums in another order. What was seen of the compiler's errors was from 0.002 of it to NaN.
TIMES, PART = 100.0, 2e-5

Program = tuple[str, Callable[..., Any], tuple]  # name, function of arrays, float32 arguments


def known_programs() -> Iterator[Program]:
    """Programs that jaxlib 0.10.2 to 0.12.0.1 computed wrongly."""
    draw = np.random.default_rng(0)
    x_RST = draw.normal(size=(5, 60, 60)).astype(np.float32)
    for constant in (0.0, 0.5, 1.0):

        def weighted(x_RST, constant=constant):
            return jnp.sum((x_RST @ jnp.full_like(x_RST, constant)) * x_RST, axis=-1)

        yield f"sum of a product of [5, 60, 60] by {constant}", jax.jit(weighted), (x_RST,)
    rows_UD = np.stack([np.arange(32_769), np.zeros(32_769), np.zeros(32_769)], axis=1).astype(np.float32)
    squares = jax.jit(jax.vmap(lambda row_D: jnp.sum((jnp.eye(3, dtype=row_D.dtype) @ row_D) ** 2)))
    yield "squares of 32,769 mapped products (jax#39103)", squares, (rows_UD,)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Compute without jit, in float64, also where the code names float32."""
    float32 = jnp.float32
    try:
        with jax.enable_x64(True), jax.disable_jit():
            jnp.float32 = jnp.float64
            yield
    finally:
        jnp.float32 = float32


def leaves(tree: Any) -> list[np.ndarray]:
    found = [np.asarray(x) for x in jax.tree.leaves(tree) if not isinstance(x, str)]
    return [x.astype(np.float64) for x in found if x.dtype.kind == "f"]


def deviations(program: Program) -> tuple[list[dict[str, Any]], int]:
    """Return the leaves of a compiled result that rounding does not explain, and how many numbers were compared."""
    name, function, arguments = program
    compiled = leaves(function(*arguments))
    with jax.disable_jit():
        plain = leaves(function(*arguments))
    with in_float64():
        exact = leaves(function(*jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arguments)))
    assert len(compiled) == len(plain) == len(exact), name
    found, scale = [], max((float(np.nanmax(np.abs(x), initial=0.0)) for x in exact), default=0.0)
    for n, (x, y, z) in enumerate(zip(compiled, plain, exact, strict=True)):
        assert x.shape == y.shape == z.shape, (name, n)
        if np.array_equal(x, z, equal_nan=True):
            continue
        largest = max(float(np.nanmax(np.abs(z), initial=0.0)), 1e-3 * scale) or 1.0
        far, plainly = (float(np.max(np.abs(np.where(np.isnan(z), 0.0, v - z)))) / largest for v in (x, y))
        if not far <= max(PART, TIMES * plainly):  # NaN is not
            found.append({"program": name, "leaf": n, "shape": list(x.shape), "deviation": far, "without jit": plainly})
    return found, sum(x.size for x in compiled)
