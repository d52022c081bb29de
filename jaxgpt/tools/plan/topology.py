"""Describe TPU slices without a TPU: devices to lower and compile for."""

import importlib.util
import itertools
import math
import os
import re
from typing import Any

import jax

from jaxgpt.errors import UserError

# Slices of Google Cloud (cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e); libtpu itself takes any shape that hosts of
# 2x2x1 chips tile.
_SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # and every AxBxC of multiples of 4
_LARGEST = {"v4": 4096, "v5p": 6144}  # chips


def tpu_devices(topology: str) -> list[jax.Device]:
    """Return the devices of a slice such as "v5e:4x4", "v6e:16x16", "v4:2x2x2" or "v5p:8x8x8", to compile for.

    They hold no arrays and run nothing. libtpu describes them; set `JAX_PLATFORMS=cpu` before jax is imported, or
    on a machine with a TPU jax starts that too. libtpu's own settings (`TPU_WORKER_ID` and the like) are left as
    they are where the environment has them. A v4 or v5p chip counts as one device, its two cores together.

    Raises `UserError` for a family or a shape that does not exist, without libtpu, and while another process has
    libtpu: it lets in one at a time.
    """
    match = re.fullmatch(r"(v4|v5e|v5p|v6e):([0-9]+(?:x[0-9]+)*)", topology)
    if not match:
        raise UserError(f"topology {topology!r}: needs v4, v5e, v5p or v6e and a shape, such as v5e:4x4")
    family, shape = match.groups()
    if family in _LARGEST:
        exists = shape in _SHAPES_3D or shape in _cubes(_LARGEST[family])
        choices = f"{', '.join(_SHAPES_3D)}, or AxBxC of multiples of 4, A <= B <= C, up to {_LARGEST[family]} chips"
    else:
        exists, choices = shape in _SHAPES_2D, ", ".join(_SHAPES_2D)
    if not exists:
        raise UserError(f"topology {topology}: {family} has no slice {shape}. It has {choices}.")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('a TPU topology needs libtpu, which is not installed: pip install "jaxgpt[tpu]"')

    # libtpu reads these when it is loaded, which is below, and prints complaints in their absence.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    from jax.experimental import topologies

    # By default a v4 chip is two devices.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if family in _LARGEST else {}
    if shape == "1x1":
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" not in str(error):
            raise
        raise UserError(
            "another process has libtpu, which lets in one at a time: wait until it ends. If none of them uses a TPU, ALLOW_MULTIPLE_LIBTPU_LOAD=1 in the environment lets in several."
        ) from error


def _cubes(largest: int) -> set[str]:
    sides = range(4, largest // 16 + 1, 4)
    return {
        f"{a}x{b}x{c}"
        for a, b, c in itertools.combinations_with_replacement(sides, 3)
        if math.prod((a, b, c)) <= largest
    }
