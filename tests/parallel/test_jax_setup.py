"""The one function that sets up a process: what it changes, when it is too late, and how it is switched off."""

import json
import os
import platform
import statistics
import warnings

import jax
import jaxlib
import pytest

from jaxgpt.parallel import jax_setup
from tests.helpers import check_command

REPORT = """
import gc, json, resource
import jaxgpt
jaxgpt.configure_jax()
found = {"collector": gc.get_threshold()[0]}
import jax, jax.numpy as jnp
found["cache"], found["devices"] = jax.config.jax_compilation_cache_dir, jax.config.jax_num_cpu_devices
step = jax.jit(lambda x: jnp.tanh(x @ x.T) @ x)  # a temporary of 100 MB
x = jax.block_until_ready(jnp.ones((5_000, 16)))
found["faults"] = []
for _ in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(step(x))
    found["faults"].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps(found))
"""

REDUCTIONS = jax_setup.REDUCTIONS_FLAG
OURS = f"{jax_setup.NO_FUSED_REDUCTIONS} {jax_setup.NO_MERGED_PRODUCTS}"


def test_a_process_is_set_up(tmp_path):
    env = {"JAX_NUM_CPU_DEVICES": "1", "JAXGPT_CACHE": str(tmp_path / "cache"), "XLA_FLAGS": ""}
    done = check_command("-c", REPORT, cwd=tmp_path, **env)
    found = json.loads(done.stdout)
    assert found["collector"] == jax_setup.GC_THRESHOLD
    assert found["cache"] == str(tmp_path / "cache" / "xla" / jaxlib.__version__) and found["devices"] == 1
    if platform.libc_ver()[0] == "glibc":
        # Only the first thread's heap holds a block above 64 MB; mapped again, it has 24,000 pages. On a busy machine
        # a small piece may still take its place now and then, and the heap settles after one to seven steps.
        assert statistics.median(found["faults"]) < 1_000


@pytest.fixture
def unset(monkeypatch):
    """This process, before it was set up: the rest of the set-up does nothing."""
    monkeypatch.setattr(jax_setup, "_is_set_up", False)
    for name in ("_tune_malloc", "enable_compilation_cache"):
        monkeypatch.setattr(jax_setup, name, lambda *_, **__: None)
    return monkeypatch


@pytest.mark.parametrize(
    ("setup", "given", "expected"),
    [
        (None, "", OURS),
        (None, "--xla_dump_to=x", f"--xla_dump_to=x {OURS}"),
        (None, f"{REDUCTIONS}=dot", f"{REDUCTIONS}=dot {jax_setup.NO_MERGED_PRODUCTS}"),
        ("0", "", ""),
    ],
)
def test_the_users_flags_and_switch_win(unset, setup, given, expected):
    unset.setattr(jax_setup, "_has_started", lambda: False)
    unset.setenv("XLA_FLAGS", given)
    unset.setenv("JAXGPT_SETUP", setup) if setup else unset.delenv("JAXGPT_SETUP", raising=False)
    for _ in range(2):  # the second call does nothing
        jax_setup.configure_jax()
        assert os.environ["XLA_FLAGS"] == expected


def test_a_backend_that_has_started_without_the_flag_is_named(unset):
    before = jax.config.jax_num_cpu_devices
    jax.devices()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax_setup.configure_jax()  # with the flag, there is no warning
    assert jax.config.jax_num_cpu_devices == before  # what is looked at is not changed
    unset.setenv("XLA_FLAGS", "")
    unset.setattr(jax_setup, "_is_set_up", False)
    with pytest.warns(UserWarning, match=r"has started without .*=-reduce in XLA_FLAGS.*: call jaxgpt.configure_jax"):
        jax_setup.configure_jax()
    assert os.environ["XLA_FLAGS"] == ""
