"""Describe TPU slices and GPUs without having them, as devices to lower and compile for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import math
import re
from typing import Any, NamedTuple

import jax

from jaxgpt.errors import UserError
from jaxgpt.parallel.jax_setup import quiet_libtpu, skip_cuda_check
from jaxgpt.parallel.limits import PEAKS, gpu_memory_share

INSTALL = 'pip install "jaxgpt[plan-gpu]"'


class Target(NamedTuple):
    """The facts about a GPU that XLA's compiler asks for. `to_text` adds what is the same for all of them."""

    name: str  # JAX's name of the device, a key of PEAKS
    capability: tuple[int, int]  # CUDA compute capability
    features: str  # ACCELERATED_FEATURES: compile for sm_90a, with instructions of this generation only, not for sm_90
    cores: int  # streaming multiprocessors
    fpus_per_core: int
    clock_ghz: float
    threads_per_core: int
    shared_memory_per_core: int  # bytes
    shared_memory_per_block: int  # bytes, that a block can ask for
    l2_cache: int  # bytes
    memory_bandwidth: int  # bytes/s

    def to_text(self) -> str:
        """Return the target as a `stream_executor.GpuTargetConfigProto` in text form."""
        major, minor = self.capability
        return f"""
platform_name: "CUDA"
device_description_str: "{self.name}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {self.features} }}
  core_count: {self.cores} fpus_per_core: {self.fpus_per_core} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {PEAKS[self.name].memory} memory_bandwidth: {self.memory_bandwidth} l2_cache_size: {self.l2_cache}
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_memory_per_block}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_core_limit: {self.threads_per_core} threads_per_block_limit: 1024 threads_per_warp: 32
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
"""


# XLA asks the driver for these. Here by github.com/openxla/xla, xla/backends/gpu/target_config/specs (at 4336d12 of 2026):
# h100_sxm, h200, a100_sxm_80, b200 and rtx6000pro. _ADA: NVIDIA's "Ada GPU Architecture" v2.1 and its Ada Tuning Guide.
_A, _N = "ACCELERATED_FEATURES", "NONE"
_HOPPER = (9, 0), _A, 132, 128, 1.98, 2048, 233_472, 232_448, 52_428_800
_A100 = (8, 0), _N, 108, 64, 1.41, 2048, 167_936, 166_912, 41_943_040
_B200 = (10, 0), _A, 148, 128, 1.965, 2048, 233_472, 232_448, 132_644_864
_PRO = (12, 0), _N, 188, 128, 2.6, 1536, 131_072, 101_376, 134_217_728
_ADA = (8, 9), _N, 128, 128, 2.52, 1536, 102_400, 101_376, 75_497_472
TARGETS = {
    "h100": Target("NVIDIA H100 80GB HBM3", *_HOPPER, 3_352_320_000_000),
    "h200": Target("NVIDIA H200", *_HOPPER, 4_800_000_000_000),
    "a100-80": Target("NVIDIA A100-SXM4-80GB", *_A100, 2_039_040_000_000),
    "b200": Target("NVIDIA B200", *_B200, 7_672_320_000_000),
    "rtx6000pro": Target("NVIDIA RTX PRO 6000 Blackwell Server Edition", *_PRO, 1_792_000_000_000),
    "rtx4090": Target("NVIDIA GeForce RTX 4090", *_ADA, 1_008_000_000_000),
}


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
        example = "1 to 8 GPUs, such as 8xh200 or h200:8, or hosts and the GPUs of each, such as 4x8xh200 or h200:4x8"
        raise UserError(f"topology {topology!r}: needs {', '.join(TARGETS)} and {example}")
    plugins = ("jax-cuda13-plugin", "jax-cuda12-plugin")
    versions = {d.name: d.version for name in plugins for d in importlib.metadata.distributions(name=name)}
    jaxlib = importlib.metadata.version("jaxlib")
    if jaxlib not in versions.values():
        found = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
        remedy = f'{INSTALL} or pip install "jax-cuda13-plugin=={jaxlib}"'
        raise UserError(
            f"a GPU topology needs JAX's CUDA plugin of jaxlib's version, {jaxlib}, found {found}: {remedy}"
        )
    skip_cuda_check()
    gpu_memory_share()  # JAX would log a traceback of what is wrong with it
    from jax.experimental import topologies

    shape = f"1x{match[2] or 1}x{match[3]}"  # slices x hosts x GPUs
    text = TARGETS[match[1]].to_text()
    try:
        found = topologies.get_topology_desc(platform="cuda", topology_name="", topology=shape, target_config=text)
    except NotImplementedError:  # JAX has tried the plugin before, for a GPU of this machine, and refused it
        raise UserError("JAX has refused its CUDA plugin: set JAX_PLATFORMS=cpu before jax is imported") from None
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
    from jax.experimental import topologies

    # By default a v4 chip is two devices.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if family in _LARGEST else {}
    if shape == "1x1":
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{family}:{shape}"
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices, **options)
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" not in str(error):
            raise
        remedy = "wait until it ends or, if neither uses a TPU, set ALLOW_MULTIPLE_LIBTPU_LOAD=1"
        raise UserError(f"another process has loaded libtpu, which allows one at a time: {remedy}") from error
    return list(found.devices)


# Slices of Google Cloud (cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e). libtpu itself accepts any shape that can be
# tiled by hosts of 2x2x1 chips.
_SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # and every AxBxC of multiples of 4
_LARGEST = {"v4": 4096, "v5p": 6144}  # chips


def parse_slice(topology: str) -> tuple[int, str, str]:
    """Return the number of slices, the family and the shape of a topology such as "2xv5e:16x16".

    Google Cloud's names count chips, v5e-8 or v5litepod-8, but TensorCores, two to a chip, for v4 and v5p: v5p-64 has 32
    chips (cloud.google.com/tpu/docs/v5p, "AcceleratorType", read in November 2026).
    """
    match = re.fullmatch(r"(?:([1-9][0-9]?)x)?(v4|v5e|v5litepod|v5p|v6e)(?::([0-9]+(?:x[0-9]+)*)|-([0-9]+))", topology)
    if not match:
        tpus = "v4, v5e, v5p or v6e and a shape, such as v5e:4x4, or 2xv5e:4x4 for two slices"
        gpus = f"{', '.join(TARGETS)} and a number of GPUs, such as 8xh100 or h200:8"
        raise UserError(f"topology {topology!r}: needs {tpus}, or {gpus}")
    slices, family, shape, count = match.groups()
    family = family.replace("litepod", "e")
    shapes, choices = list(_SHAPES_2D), ", ".join(_SHAPES_2D)
    if largest := _LARGEST.get(family):
        cubes = itertools.combinations_with_replacement(range(4, largest // 16 + 1, 4), 3)
        shapes = [*_SHAPES_3D, *(f"{a}x{b}x{c}" for a, b, c in cubes if a * b * c <= largest)]
        choices = f"{', '.join(_SHAPES_3D)}, or AxBxC of multiples of 4, A <= B <= C, up to {largest} chips"
    if count is not None:
        sides = {name: [int(side) for side in name.split("x")] for name in shapes}
        chips = int(count) / (2 if largest else 1)
        as_many = [name for name in shapes if math.prod(sides[name]) == chips]
        shape = min(as_many, key=lambda name: sum(sides[name]), default=f"of {chips:g} chips")  # the most compact one
    if shape not in shapes:
        raise UserError(f"topology {topology}: {family} has no slice {shape}. It has {choices}.")
    return int(slices or 1), family, shape
