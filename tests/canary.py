"""Programs that XLA on CPU has computed wrongly: `python -m tests.canary` prints how far they are from float64."""

import jax
import jax.numpy as jnp
import numpy as np

ROUNDING = 2e-5  # of the largest magnitude: sums in another order. The compiler's errors were from 0.002 of it to NaN.


def deviations() -> dict[str, float]:
    """By program: the largest deviation from float64, as a part of the largest magnitude.

    jaxlib 0.10.2 to 0.12.0.1 computed them wrongly.
    """
    found = {}

    def compare(name, program, x, expected):
        largest = np.abs(expected).max() or 1.0
        found[name] = float(np.abs(jax.jit(program)(x) - expected).max() / largest)

    x_RST = np.random.default_rng(0).normal(size=(5, 60, 60)).astype(np.float32)
    for constant in (0.0, 0.5, 1.0):

        def weighted(x_RST, constant=constant):
            return jnp.sum((x_RST @ jnp.full_like(x_RST, constant)) * x_RST, axis=-1)

        expected_RS = constant * np.square(x_RST.sum(axis=-1, dtype=np.float64))
        compare(f"sum of a product of [5, 60, 60] by {constant}", weighted, x_RST, expected_RS)

    def squares(rows_UD):
        return jax.vmap(lambda row_D: jnp.sum((jnp.eye(3, dtype=row_D.dtype) @ row_D) ** 2))(rows_UD)

    rows_UD = np.pad(np.arange(32_769, dtype=np.float32)[:, None], ((0, 0), (0, 2)))
    compare("squares of 32,769 mapped products (jax#39103)", squares, rows_UD, np.arange(32_769.0) ** 2)
    return found


if __name__ == "__main__":
    for name, deviation in deviations().items():
        print(f"{deviation:.1e} {name}")
