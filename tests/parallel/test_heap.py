"""The C library's heaps, in a process of its own."""

import platform

import pytest

from tests.helpers import run_command

FAULTS = """
import resource
from jaxgpt.parallel.heap import keep_freed_memory
keep_freed_memory()
import jax, jax.numpy as jnp
step = jax.jit(lambda x: jnp.tanh(x @ x.T) @ x)  # a temporary of 100 MB
x = jax.block_until_ready(jnp.ones((5_000, 16)))
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(step(x))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is not glibc's")
def test_large_temporaries_of_a_step_are_not_mapped_again(tmp_path):
    """Only the first thread's heap holds a block above 64 MB; mapped again, it has 24,000 pages."""
    assert int(run_command("-c", FAULTS, cwd=tmp_path, JAX_NUM_CPU_DEVICES="1").stdout) < 1_000
