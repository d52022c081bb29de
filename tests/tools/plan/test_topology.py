"""TPU slices without a TPU. libtpu is loaded in a process of its own, since it stays for the life of one."""

import json

import pytest

from jaxgpt.errors import UserError
from jaxgpt.tools.plan import topology
from jaxgpt.tools.plan.topology import parse_slice, tpu_devices
from tests.helpers import check_command, needs

needs_libtpu = needs("libtpu", "tpu")

DESCRIBE = """
import json, sys, jax
from jaxgpt.tools.plan.topology import tpu_devices
for name in sys.argv[1:]:
    devices = tpu_devices(name)
    print(json.dumps([name, len(devices), devices[0].device_kind]))
print(json.dumps([jax.devices()[0].platform, float(jax.numpy.ones(3).sum())]))
"""

SLICES = [
    ["v5e:2x4", 8, "TPU v5 lite"],
    ["v4:2x2x1", 4, "TPU v4"],  # a device per chip, not per core
    ["3xv5p:2x2x4", 48, "TPU v5"],
]


@pytest.mark.slow
@needs_libtpu
def test_slices(tmp_path):
    # The tests hold no TPU, so that they need not wait for one another to let go of libtpu.
    env = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    result = check_command("-c", DESCRIBE, *(name for name, *_ in SLICES), cwd=tmp_path, **env)
    assert [json.loads(line) for line in result.stdout.splitlines()] == [*SLICES, ["cpu", 3.0]]


NO_TOPOLOGY = "needs v4, v5e, v5p or v6e and a shape, such as v5e:4x4"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("v5e:4,4|v3:2x2|v5e:4x4 |v5litepod4|0xv5e:4x4|100xv5e:4x4", NO_TOPOLOGY),
        ("v5e-12|v5p-4|v4-9|v4-1000000000", "has no slice of .* chips"),
    ],
    ids=["topology", "count"],
)
def test_what_is_no_slice(names, message):
    for name in names.split("|"):
        with pytest.raises(UserError, match=message):
            tpu_devices(name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("v5e-8", (1, "v5e", "2x4")),
        ("v5litepod-16", (1, "v5e", "4x4")),
        ("2xv6e-1", (2, "v6e", "1x1")),
        ("v4-32", (1, "v4", "2x2x4")),  # two TensorCores in each chip
        ("v5p-512", (1, "v5p", "4x8x8")),  # not 4x4x16, which exists
        ("v5p:4x4x16", (1, "v5p", "4x4x16")),
    ],
)
def test_the_names_of_google_cloud(name, found):
    assert parse_slice(name) == found


def test_the_count_of_gpus_may_stand_first(monkeypatch):
    monkeypatch.setattr(topology, "gpu_devices", lambda name: [name])
    monkeypatch.setattr(topology, "tpu_devices", lambda name: [f"slice {name}"])
    names = ["8xh100", "2x8xh100", "4xa100-80", "h200:8", "2xv5e-8", "8xh1000"]
    found = [topology.topology_devices(name)[0] for name in names]
    assert found == ["h100:8", "h100:2x8", "a100-80:4", "h200:8", "slice 2xv5e-8", "slice 8xh1000"]
