"""A trace of some steps."""

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.parallel.profile import StepProfiler


@pytest.mark.parametrize("taken", [4, 9])
def test_the_steps_that_are_named_are_traced(tmp_path, taken):
    """Also of a run that ends before the last of them."""
    said, step = [], jax.jit(lambda x: x + 1)
    profiler = StepProfiler(range(3, 7), tmp_path / "run [1]", said.append)
    for number in range(1, taken + 1):
        assert profiler.take(number, step, jnp.zeros(3)).tolist() == [1.0] * 3
        assert len(said) == (number >= 6)
    profiler.close()
    assert len(said) == 1 and len(list(tmp_path.rglob("*.xplane.pb"))) == 1
