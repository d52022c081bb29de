"""Describe TPU slices without a TPU, as devices to lower and compile for; GPUs are described in `gpu`."""

import importlib.util
import itertools
import math
import re
from typing import Any

import jax

from jaxgpt.errors import UserError
from jaxgpt.parallel.jax_setup import quiet_libtpu
from jaxgpt.tools.plan.gpu import TARGETS, gpu_devices

# Slices of Google Cloud (cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e); libtpu itself accepts any shape that can be
# tiled by hosts of 2x2x1 chips.
_SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # and every AxBxC of multiples of 4
_LARGEST = {"v4": 4096, "v5p": 6144}  # chips


def topology_devices(topology: str) -> list[jax.Device]:
    """Return the devices to compile for: GPUs, as "h200:8", or a TPU slice, as "v5e:4x4"."""
    return gpu_devices(topology) if topology.partition(":")[0] in TARGETS else tpu_devices(topology)


def tpu_devices(topology: str) -> list[jax.Device]:
    """Return the devices of a slice such as "v5e:4x4", "v6e:16x16", "v4:2x2x2" or "v5p:8x8x8", to compile for.

    "2xv5e:16x16" is two such slices, joined by the data-center network. The names of Google Cloud are understood too.

    The devices come from libtpu; they cannot hold arrays or run programs. On a machine with a TPU, set
    `JAX_PLATFORMS=cpu` before jax is imported, or jax starts the TPU too. Settings of libtpu in the environment
    (`TPU_WORKER_ID` and the like) are kept. The two cores of a v4 or v5p chip count as one device.

    Raises `UserError` if the family or the shape does not exist, if libtpu is not installed, or if another process
    has loaded it, because it allows one process at a time.
    """
    slices, family, shape = parse_slice(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('a TPU topology needs libtpu, which is not installed: pip install "jaxgpt[tpu]"')

    quiet_libtpu(only_compiles=True)
    from jax.experimental import topologies

    # By default a v4 chip is two devices.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if family in _LARGEST else {}
    if shape == "1x1":
        options["chips_per_host_bounds"] = (1, 1, 1)
    options["num_slices"] = slices
    name = f"{family}:{shape}"
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" not in str(error):
            raise
        raise UserError(
            "another process has loaded libtpu, which allows one at a time: wait until it ends. If neither uses a TPU, "
            "set ALLOW_MULTIPLE_LIBTPU_LOAD=1 in the environment to allow several."
        ) from error


def parse_slice(topology: str) -> tuple[int, str, str]:
    """Return the number of slices, the family and the shape of a topology such as "2xv5e:16x16".

    Google Cloud's names count chips, v5e-8 or v5litepod-8, but TensorCores for v4 and v5p: v5p-8 has four chips.
    """
    match = re.fullmatch(r"(?:([1-9][0-9]?)x)?(v4|v5e|v5litepod|v5p|v6e)(?::([0-9]+(?:x[0-9]+)*)|-([0-9]+))", topology)
    if not match:
        raise UserError(
            f"topology {topology!r}: needs v4, v5e, v5p or v6e and a shape, such as v5e:4x4, or 2xv5e:4x4 for two "
            f"slices (at most 99), or {', '.join(TARGETS)} and a number of GPUs, such as h200:8"
        )
    slices, family, shape, count = match.groups()
    family = family.replace("litepod", "e")
    if family in _LARGEST:
        shapes = {*_SHAPES_3D, *_cubes(_LARGEST[family])}
        choices = f"{', '.join(_SHAPES_3D)}, or AxBxC of multiples of 4, A <= B <= C, up to {_LARGEST[family]} chips"
    else:
        shapes, choices = set(_SHAPES_2D), ", ".join(_SHAPES_2D)
    if count is not None:
        sides = {name: [int(side) for side in name.split("x")] for name in shapes}
        chips = int(count) / (2 if family in _LARGEST else 1)
        as_many = [name for name in shapes if math.prod(sides[name]) == chips]
        shape = min(as_many, key=lambda name: sum(sides[name]), default=f"of {chips:g} chips")  # the most compact one
    if shape not in shapes:
        raise UserError(f"topology {topology}: {family} has no slice {shape}. It has {choices}.")
    return int(slices or 1), family, shape


def _cubes(largest: int) -> set[str]:
    sides = range(4, largest // 16 + 1, 4)
    return {
        f"{a}x{b}x{c}"
        for a, b, c in itertools.combinations_with_replacement(sides, 3)
        if math.prod((a, b, c)) <= largest
    }
