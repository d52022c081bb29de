"""single = accumulation = pmap = mesh, in losses, in checkpoints, and in what they exchange; on 8 CPU devices."""

import re

import jax
import pytest

from jaxgpt.parallel.mesh import GPU_OPTIONS
from tests.conftest import REPOSITORY
from tests.helpers import check_command

SLOW = "all_curves collectives crossings dropout imports bad_step adapters fit".split()


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


def test_xla_knows_every_flag_that_is_named():
    """XLA renames its flags, and one that it does not know ends the process. The log tells of older versions."""
    folders = [REPOSITORY / name for name in ("jaxgpt", "docs", "experiments")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".sh", ".yaml")]
    text = "".join(path.read_text() for path in [REPOSITORY / "README.md", *files] if path.name != "LOG.md")
    named = set(re.findall(r"\bxla_\w+", text)) - {"xla_bridge", "xla_cuda13"}
    assert GPU_OPTIONS.keys() < named and "xla_cpu_experimental_ynn_fusion_type" in named
    for flag in named:  # with a second one that is unknown, so that nothing is compiled
        with pytest.raises(jax.errors.JaxRuntimeError) as said:
            jax.jit(lambda: 0, compiler_options={flag: "?", "xla_": "?"}).lower().compile()
        assert f"No such compile option: '{flag}'" not in str(said.value)
