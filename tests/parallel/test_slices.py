"""Slices: which devices belong to which, how a mesh is laid over them, and that it changes only the order of devices."""

import importlib.util
import json
import types

import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.parallel.mesh import count_slices, split_slices
from tests.helpers import run_command
from tests.parallel.test_strategies import CURVES_EQUAL, on_eight_devices

MESHES = """
import json
import numpy as np
from jax.experimental import mesh_utils
from jaxgpt.parallel.mesh import MeshStrategy
from jaxgpt.tools.plan.topology import tpu_devices

found = []
for name, slices, data in (("2xv5e:4x4", 2, 4), ("4xv5p:2x2x2", 4, 4), ("v6e:4x4", 1, 2)):
    devices = tpu_devices(name)
    inside = (data // slices, len(devices) // data // 2, 2)
    grid = MeshStrategy(devices, data=data, fsdp=-1, tensor=2, slices=slices).mesh.devices
    indices = np.vectorize(lambda d: getattr(d, "slice_index", 0))(grid)
    ours = [d.id for d in grid.flat]
    if slices == 1:
        jaxs = mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)
    else:
        jaxs = mesh_utils.create_hybrid_device_mesh(inside, (slices, 1, 1), devices, allow_split_physical_axes=True)
    found.append([indices.reshape(data, -1).tolist(), ours == [d.id for d in jaxs.flat]])
print(json.dumps(found))
"""


def tpus(*slices: int):
    return [types.SimpleNamespace(platform="tpu", slice_index=index) for index in slices]


def test_tpus_state_their_slice():
    mixed = tpus(1, 0, 1, 0)
    assert count_slices(mixed) == 2
    assert split_slices(mixed, 2) == [[mixed[1], mixed[3]], [mixed[0], mixed[2]]]
    described = [types.SimpleNamespace(platform="tpu")] * 4  # by the compiler, without a TPU
    assert count_slices(described) == 1 and split_slices(described, 1) == [described]


def test_other_devices_are_in_blocks():
    gpus = [types.SimpleNamespace(platform="gpu", slice_index=0, process_index=i // 2) for i in range(8)]
    assert count_slices(gpus) == 1
    assert split_slices(gpus, 4) == [gpus[0:2], gpus[2:4], gpus[4:6], gpus[6:8]]


@pytest.mark.parametrize(
    ("devices", "slices", "message"),
    [
        (tpus(0, 0, 1, 1), 1, "slices=1, but the TPU's 4 devices are 2 slices: take --parallel.slices 2"),
        (tpus(0, 1, 2, 3), 2, "slices=2, but the TPU's 4 devices are 4 slices: take --parallel.slices 4"),
        (tpus(0, 0), 2, "slices=2, but the TPU's 2 devices are 1 slice: take --parallel.slices 1"),
    ],
)
def test_the_number_of_slices_is_the_tpus(devices, slices, message):
    with pytest.raises(UserError, match=message):
        split_slices(devices, slices)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='libtpu is not here: pip install ".[tpu]"')
def test_inner_axes_stay_within_a_slice(tmp_path):
    """Each row of `data` is of one slice, the slices follow one another, and the order is that of JAX's hybrid mesh."""
    env = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = run_command("-c", MESHES, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    two, four, one = json.loads(done.stdout.splitlines()[-1])
    assert two == [[[0] * 8, [0] * 8, [1] * 8, [1] * 8], True]
    assert four == [[[index] * 8 for index in range(4)], True]
    assert one == [[[0] * 8] * 2, True]


@pytest.mark.slow
def test_a_run_goes_on_with_other_slices(tmp_path_factory):
    """Two slices of 4 CPU devices take the steps of one of 8, bit for bit; saved, they go on as one slice of 4."""
    found = on_eight_devices("sliced", tmp_path_factory, str(tmp_path_factory.mktemp("slices")))
    assert found["two"] == found["one"] and len(found["one"]) == 4
    np.testing.assert_allclose(found["resumed"], found["one"][2:], **CURVES_EQUAL)
    assert found["fallback"].startswith(
        "mesh of data=1 x fsdp=4 x tensor=1 instead of the recorded strategy, which does not fit here: "
    )
