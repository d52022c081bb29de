"""What devices can do at best: arithmetic, memory, links. And the least time that a communication takes."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """One device's limits, as its vendor states them."""

    flops: float  # dense bfloat16 FLOP/s
    memory: int  # bytes of HBM
    memory_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s in one direction: of one link of a TPU, of all NVLinks of a GPU
    torus: int  # dimensions of the torus of links; 0: all devices of a host on one switch


_GB, _GiB = 10**9, 2**30

# TPU: FLOP/s from cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e; bandwidths from jax-ml.github.io/scaling-book/tpus,
# whose links are a tenth below the data sheets' (v5e: 1600 Gbit/s over 4 ports). Of this memory the compiler leaves a
# program 30.75, 15.75, 95.74 and 31.25 GiB on v4, v5e, v5p and v6e (libtpu 0.0.42; its out-of-memory message).
_V4 = Peaks(flops=275e12, memory=32 * _GiB, memory_bandwidth=1.2e12, link_bandwidth=4.5e10, torus=3)
_V5E = Peaks(flops=197e12, memory=16 * _GiB, memory_bandwidth=8.1e11, link_bandwidth=4.5e10, torus=2)
_V5P = Peaks(flops=459e12, memory=96 * _GiB, memory_bandwidth=2.8e12, link_bandwidth=9e10, torus=3)
_V6E = Peaks(flops=918e12, memory=32 * _GiB, memory_bandwidth=1.6e12, link_bandwidth=9e10, torus=2)

# GPU: nvidia.com's data sheets of A100, H100, H100 NVL, H200 and H200 NVL: FLOP/s without sparsity, half of a link's
# total of both directions. PCIe cards have PCIe here, for an NVLink bridge joins but two of them, of the H200 NVL four.
_A100 = Peaks(flops=312e12, memory=40 * _GB, memory_bandwidth=1.555e12, link_bandwidth=300e9, torus=0)
_H100 = Peaks(flops=989e12, memory=80 * _GB, memory_bandwidth=3.35e12, link_bandwidth=450e9, torus=0)

# By what JAX calls the device, whole: of "NVIDIA A100-SXM4-40GB MIG 1g.5gb" or "TPU v4 lite" nothing is known. A "TPU
# v5" is a v5p.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": replace(_A100, memory=80 * _GB, memory_bandwidth=2.039e12),
    "NVIDIA A100-PCIE-40GB": replace(_A100, link_bandwidth=32e9),
    "NVIDIA A100 80GB PCIe": replace(_A100, memory=80 * _GB, memory_bandwidth=1.935e12, link_bandwidth=32e9),
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H100 PCIe": replace(_H100, flops=756e12, memory_bandwidth=2.0e12, link_bandwidth=64e9),
    "NVIDIA H100 NVL": replace(_H100, flops=835e12, memory=94 * _GB, memory_bandwidth=3.9e12, link_bandwidth=64e9),
    "NVIDIA H200": replace(_H100, memory=141 * _GB, memory_bandwidth=4.8e12),
    "NVIDIA H200 NVL": replace(_H100, flops=835e12, memory=141 * _GB, memory_bandwidth=4.8e12, link_bandwidth=64e9),
    "TPU v4": _V4,
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
}


def ring_bandwidth(devices: Sequence[jax.Device], group: Sequence[int]) -> float | None:
    """Return the bytes/s that one device of a group can send to the others, all of them sending; None: unknown.

    group: positions in `devices`, which are a whole slice. On a TPU every dimension in which the group extends adds
    a link, or two where it closes to a ring and the group runs all the way round: on v5e and v6e only 16 chips close;
    on v4 and v5p every dimension of a slice that consists of cubes of 4x4x4, whose faces the optical switches join.
    On GPUs it is NVLink's, within one host.
    """
    members = [devices[i] for i in group]
    limits = PEAKS.get(members[0].device_kind)
    if limits is None:
        return None
    if limits.torus == 0:
        return limits.link_bandwidth if len({d.process_index for d in members}) == 1 else None
    sizes = [len({d.coords[axis] for d in devices}) for axis in range(limits.torus)]
    cubes = limits.torus == 3 and all(size % 4 == 0 for size in sizes)
    links = 0
    for axis, size in enumerate(sizes):
        reached = len({d.coords[axis] for d in members})
        closes = cubes or (limits.torus == 2 and size == 16)
        if reached > 1:
            links += 2 if closes and reached == size else 1
    return links * limits.link_bandwidth or None  # alone, or the cores of one chip: no links


def collective_seconds(kind: str, size: int, n: int, bandwidth: float, *, switched: bool = False) -> float:
    """Return the least seconds of one communication, if nothing but bandwidth (bytes/s, of `ring_bandwidth`) limits it.

    size: bytes as `jaxgpt.tools.plan.program.Collective` has them; n: devices in the group; switched: every device reaches every
    other directly, as GPUs do. Each device passes on n - 1 parts of n; an all-reduce is a reduce-scatter and an
    all-gather (jax-ml.github.io/scaling-book/sharding). In an all-to-all, half of what half of the devices hold
    crosses the middle: n size / 4 bytes, over the one link of a line or the two of a ring, and on a torus of more
    dimensions this is an upper bound. A permutation is taken to use all links; between neighbours it uses one.
    Latency, of the order of a microsecond per link, comes on top.
    """
    if n == 1:
        return 0.0
    share = (n - 1) / n
    parts = {
        "all-gather": share,
        "reduce-scatter": share,
        "all-reduce": 2 * share,
        "all-to-all": share if switched else max(share, n / 4),
        "collective-permute": 1.0,
    }
    return parts[kind] * size / bandwidth
