"""What a trace of some steps lists."""

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.parallel.profile import StepProfiler


@pytest.mark.parametrize("taken", [4, 9])
def test_the_longest_operations_of_the_steps_that_are_named(tmp_path, taken):
    """Also of a run that ends before the last of them, in a directory whose name is a pattern."""
    said, x = [], jnp.ones((300, 300))
    step = jax.jit(lambda x: jnp.tanh(x @ x) @ x)
    step(x)
    profiler = StepProfiler(lambda: step.lower(x), range(3, 7), tmp_path / "run [1]", said.append)
    for number in range(1, taken + 1):
        profiler.take(number, step, x)
    profiler.close()
    head, *listed = said
    assert f"the mean of {min(taken, 6) - 2}, " in head and len(list(tmp_path.rglob("*.xplane.pb"))) == 1
    assert 1 < len(listed) <= 10 and "dot_general" in listed[0] and "%" in listed[0]
