"""single = accumulation = pmap = mesh, in losses, in checkpoints, and in what they exchange; on 8 CPU devices."""

import jax
import pytest

from jaxgpt.parallel.mesh import GPU_OPTIONS
from tests.helpers import check_command

SLOW = "all_curves collectives crossings dropout imports bad_step adapters".split()


@pytest.mark.parametrize("name", ["quick", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_on_several_devices(name, tmp_path_factory):
    """See `eight_devices.py`, in which each check says what is the same."""
    environment = {
        "JAX_NUM_CPU_DEVICES": "8",
        # Several of these compile the same steps: what one has compiled the next ones read.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.getbasetemp() / "compiled-for-eight"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    command = ("-m", "tests.parallel.eight_devices", f"check_{name}")
    done = check_command(*command, cwd=tmp_path_factory.mktemp("eight"), deadline=500, **environment)
    assert "Involuntary full rematerialization" not in done.stderr  # the compiler found no way but to copy everything


def test_xla_knows_the_options_for_gpus():
    """They are XLA's, which renames such options; unknown ones end the compilation on any device."""
    jax.jit(lambda: 0, compiler_options=GPU_OPTIONS).lower().compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda: 0, compiler_options={"xla_gpu_all_gather": 1}).lower().compile()
