"""Describe TPU slices and GPUs without having them, as devices to lower and compile for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import math
import re
from typing import Any

import jax
from jax.experimental import topologies

from jaxgpt.errors import UserError
from jaxgpt.parallel.jax_setup import quiet_libtpu, skip_cuda_check
from jaxgpt.parallel.limits import gpu_memory_share
from jaxgpt.tools.html_page import read_asset

INSTALL = 'pip install "jaxgpt[plan-gpu]"'


# GPUs with a file in targets/, a `stream_executor.GpuTargetConfigProto` in text form: what XLA asks the driver for. They are
# by github.com/openxla/xla, xla/backends/gpu/target_config/specs (at 4336d12 of 2026), for the RTX 4090 by NVIDIA's
# "Ada GPU Architecture" v2.1 and its Ada Tuning Guide. ACCELERATED_FEATURES: compile for sm_90a, not for sm_90.
TARGETS = ("h100", "h200", "a100-80", "b200", "rtx6000pro", "rtx4090")
GPUS = f"{', '.join(TARGETS)} and GPUs or hosts and GPUs, such as 8xh200 or h200:8, 4x8xh200 or h200:4x8"


def topology_devices(topology: str) -> list[jax.Device]:
    """Return the devices of a topology, to compile for. They cannot hold arrays or run programs.

    topology: GPUs, as "h200:8", "8xh200" or, on several hosts, "h200:4x8" or "4x8xh200". Or a TPU slice, as "v5e:4x4" or
    "v5e-16", or several, as "2xv5e:16x16".
    """
    if (counted := re.fullmatch(r"([0-9x]+)x(\D.*)", topology)) and counted[2] in TARGETS:
        topology = f"{counted[2]}:{counted[1]}"
    return gpu_devices(topology) if topology.partition(":")[0] in TARGETS else tpu_devices(topology)


def gpu_devices(topology: str) -> list[jax.Device]:
    """Return the devices of "h200:8" (one host of 8 GPUs) or "h200:4x8" (4 hosts of 8).

    They come from JAX's CUDA plugin. Neither a GPU nor CUDA is needed, but cuDNN, if the program calls it. Raises
    `UserError` also if the plugin is missing or of another version than jaxlib, which JAX does not use.
    """
    match = re.fullmatch(r"([a-z0-9-]+):(?:([1-9][0-9]{0,3})x)?([1-8])", topology)
    if match is None or match[1] not in TARGETS:
        raise UserError(f"topology {topology!r}: needs {GPUS}")
    plugins = ("jax-cuda13-plugin", "jax-cuda12-plugin")
    versions = [d.version for name in plugins for d in importlib.metadata.distributions(name=name)]
    jaxlib = importlib.metadata.version("jaxlib")
    if jaxlib not in versions:
        raise UserError(f"a GPU topology needs JAX's CUDA plugin of version {jaxlib}, as jaxlib is: {INSTALL}")
    skip_cuda_check()
    gpu_memory_share()  # JAX would log a traceback of what is wrong with it
    shape = f"1x{match[2] or 1}x{match[3]}"  # slices x hosts x GPUs
    text = read_asset(f"plan/targets/{match[1]}.txtpb")
    found = topologies.get_topology_desc(platform="cuda", topology_name="", topology=shape, target_config=text)
    return list(found.devices)


def tpu_devices(topology: str) -> list[jax.Device]:
    """Return the devices of a slice such as "v5e:4x4" or "v5p:8x8x8", or of several, such as "2xv5e:16x16".

    They come from libtpu, whose settings in the environment (`TPU_WORKER_ID` and the like) are kept. The two cores of a
    v4 or v5p chip count as one device. On a machine with a TPU, set `JAX_PLATFORMS=cpu` before jax is imported, or jax
    starts the TPU too. Raises `UserError` also if libtpu is missing or in use: it allows one process at a time.
    """
    slices, family, shape = parse_slice(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('a TPU topology needs libtpu, which is not installed: pip install "jaxgpt[tpu]"')

    quiet_libtpu(only_compiles=True)
    # By default a v4 chip is two devices.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if family in WITH_CORES else {}
    if shape == "1x1":
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{family}:{shape}"
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices, **options)
    except jax.errors.JaxRuntimeError as e:  # of a shape, or because libtpu allows one process at a time
        said = str(e).partition("\n")[0]
        remedy = "ALLOW_MULTIPLE_LIBTPU_LOAD=1 lets several processes load it"
        raise UserError(f"libtpu does not describe {name} ({said}): {remedy}") from None
    return list(found.devices)


WITH_CORES = ("v4", "v5p")  # Google Cloud counts their TensorCores, two to a chip
MOST_CHIPS = 6144  # of the largest slice, which is of v5p


def parse_slice(topology: str) -> tuple[int, str, str]:
    """Return the number of slices, the family and the shape of a topology such as "2xv5e:16x16".

    Google Cloud's names count chips, v5e-8 or v5litepod-8, but TensorCores for v4 and v5p: v5p-64 has 32 chips
    (cloud.google.com/tpu/docs/v5p, "AcceleratorType", read in November 2026). They stand for the most compact shape.
    """
    match = re.fullmatch(r"(?:([1-9][0-9]?)x)?(v4|v5e|v5litepod|v5p|v6e)(?::([0-9]+(?:x[0-9]+)*)|-([0-9]+))", topology)
    if not match:
        tpus = "v4, v5e, v5p or v6e and a shape, such as v5e:4x4, or 2xv5e:4x4 for two slices"
        raise UserError(f"topology {topology!r}: needs {tpus}, or {GPUS}")
    slices, family, shape, count = match.groups()
    family = family.replace("litepod", "e")
    if count is not None:
        chips = int(count) / (2 if family in WITH_CORES else 1)
        # (cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e)
        shapes: list[tuple[int, ...]] = [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
        if family in WITH_CORES:
            sides = range(4, min(int(chips), MOST_CHIPS) // 16 + 1, 4)
            shapes = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), *itertools.combinations_with_replacement(sides, 3)]
        as_many = [sides for sides in shapes if math.prod(sides) == chips]
        if not as_many:
            raise UserError(f"topology {topology}: {family} has no slice of {chips:g} chips")
        shape = "x".join(map(str, min(as_many, key=sum)))
    return int(slices or 1), family, shape
