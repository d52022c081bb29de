"""Peak rates of devices (arithmetic, memory, links), and lower bounds for the time of collectives."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """One device's limits, as its vendor states them."""

    flops: float  # dense bfloat16 FLOP/s
    memory: int  # bytes of HBM
    memory_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s in one direction, of one TPU link or all NVLinks of a GPU
    torus: int  # dimensions of the torus of links; 0: one switch connects all devices of a host
    # bytes/s in one direction, of a GPU's network card between hosts, or of a TPU chip's share of its host's cards
    network_bandwidth: float | None = None


_GB, _GiB = 10**9, 2**30

# TPU: FLOP/s from cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e; bandwidths from jax-ml.github.io/scaling-book/tpus,
# where links are a tenth slower than in the data sheets (v5e: 1600 Gbit/s over 4 ports). Of the memory, programs can
# use 30.75, 15.75, 95.74 and 31.25 GiB on v4, v5e, v5p and v6e, by the out-of-memory message of libtpu 0.0.42.
# Network between slices, by cloud.google.com/tpu/docs: 2 cards of 100 Gbit/s for 8 chips of v5e, 50 Gbit/s for a chip of
# v5p, 4 cards of 200 Gbit/s for 8 chips of v6e; scaling-book/tpus has 2.5e10 bytes/s for a host. For v4: unknown.
_V4 = Peaks(flops=275e12, memory=32 * _GiB, memory_bandwidth=1.2e12, link_bandwidth=4.5e10, torus=3)
_V5E = Peaks(
    flops=197e12, memory=16 * _GiB, memory_bandwidth=8.1e11, link_bandwidth=4.5e10, torus=2, network_bandwidth=3.125e9
)
_V5P = Peaks(
    flops=459e12, memory=96 * _GiB, memory_bandwidth=2.8e12, link_bandwidth=9e10, torus=3, network_bandwidth=6.25e9
)
_V6E = Peaks(
    flops=918e12, memory=32 * _GiB, memory_bandwidth=1.6e12, link_bandwidth=9e10, torus=2, network_bandwidth=12.5e9
)

# GPU: nvidia.com's data sheets of A100, H100, H100 NVL, H200 and H200 NVL; for B200 (HGX)
# glennklockwood.com/garden/processors/B200; RTX PRO 6000 Blackwell without a page of Nvidia's at hand. FLOP/s
# without sparsity, and half of the sum of a link's two directions. PCIe cards have PCIe here: an NVLink bridge connects
# only two of them (four H200 NVL). Between hosts, the SXM boards have a network card each, by docs.nvidia.com/dgx: eight
# of 200 Gbit/s in a DGX A100, of 400 Gbit/s in a DGX H100, H200 or B200. Memory is what the driver reports, by the
# target files that tools/plan/gpu.py names, or else the data sheet's.
_A100 = Peaks(
    flops=312e12,
    memory=40 * _GB,
    memory_bandwidth=1.555e12,
    link_bandwidth=300e9,
    torus=0,
    network_bandwidth=25e9,
)
_A100_PCIE = replace(_A100, link_bandwidth=32e9, network_bandwidth=None)
_H100 = Peaks(
    flops=989e12,
    memory=84_942_979_072,
    memory_bandwidth=3.35e12,
    link_bandwidth=450e9,
    torus=0,
    network_bandwidth=50e9,
)
_H100_PCIE = replace(
    _H100,
    flops=756e12,
    memory=80 * _GB,
    memory_bandwidth=2.0e12,
    link_bandwidth=64e9,
    network_bandwidth=None,
)
_NVL = replace(_H100_PCIE, flops=835e12)
_B200 = replace(
    _H100,
    flops=2250e12,
    memory=191_514_411_008,
    memory_bandwidth=8e12,
    link_bandwidth=900e9,
)
_RTX_PRO_6000 = Peaks(
    flops=503.8e12,
    memory=103_079_215_104,
    memory_bandwidth=1.597e12,
    link_bandwidth=64e9,
    torus=0,
)

# By JAX's full name of the device: "NVIDIA A100-SXM4-40GB MIG 1g.5gb" and "TPU v4 lite" are unknown. "TPU v5" is v5p.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": replace(_A100, memory=85_100_068_864, memory_bandwidth=2.039e12),
    "NVIDIA A100-PCIE-40GB": _A100_PCIE,
    "NVIDIA A100 80GB PCIe": replace(_A100_PCIE, memory=80 * _GB, memory_bandwidth=1.935e12),
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": replace(_NVL, memory=94 * _GB, memory_bandwidth=3.9e12),
    "NVIDIA H200": replace(_H100, memory=151_397_597_184, memory_bandwidth=4.8e12),
    "NVIDIA H200 NVL": replace(_NVL, memory=141 * _GB, memory_bandwidth=4.8e12),
    "NVIDIA B200": _B200,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": _RTX_PRO_6000,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": replace(_RTX_PRO_6000, memory_bandwidth=1.792e12),
    "TPU v4": _V4,
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
}


def ring_bandwidth(devices: Sequence[jax.Device], group: Sequence[int]) -> float | None:
    """Return the bytes/s that each device of a group can send while all of them send. None: unknown.

    `group` holds indices into `devices`, which are full slices. In a TPU's slice, each dimension in which the group
    extends adds one link, or two if the dimension is a ring that the group fills. On v5e and v6e, a dimension of 16
    chips is a ring; on v4 and v5p, every dimension is one if the slice consists of cubes of 4x4x4, which optical
    switches connect. Between slices, each chip has its share of its host's network cards.
    On GPUs, the result is the link's bandwidth within one host. Between hosts, NCCL lays several rings through the group,
    each of which leaves a host by another network card: as many cards send as the host has members of the group.
    """
    members = [devices[i] for i in group]
    limits = PEAKS.get(members[0].device_kind)
    if limits is None:
        return None
    if limits.torus == 0:
        on_host = Counter(d.process_index for d in members)
        if len(on_host) == 1:
            return limits.link_bandwidth
        network = limits.network_bandwidth
        return None if network is None else min(limits.link_bandwidth, min(on_host.values()) * network)
    if len({getattr(d, "slice_index", 0) for d in members}) > 1:
        return limits.network_bandwidth
    sizes = [len({d.coords[axis] for d in devices}) for axis in range(limits.torus)]
    cubes = limits.torus == 3 and all(size % 4 == 0 for size in sizes)
    links = 0
    for axis, size in enumerate(sizes):
        reached = len({d.coords[axis] for d in members})
        closes = cubes or (limits.torus == 2 and size == 16)
        if reached > 1:
            links += 2 if closes and reached == size else 1
    return links * limits.link_bandwidth or None  # one device, or the cores of one chip: no links


def collective_seconds(kind: str, size: int, n: int, bandwidth: float, *, switched: bool = False) -> float:
    """Return the seconds that one collective takes if bandwidth is the only limit.

    Each device sends n - 1 of n parts; an all-reduce is a reduce-scatter and an all-gather
    (jax-ml.github.io/scaling-book/sharding). In an all-to-all, half of what half of the devices hold crosses the
    middle: n * size / 4 bytes, over the one link of a line or the two of a ring; on a torus of more dimensions this is
    an upper bound. A permutation is assumed to use all links; between neighbours it uses one. Latency, about a
    microsecond per link, is not included.

    Args:
        kind: name of the collective in HLO, such as "all-reduce".
        size: bytes, as in `jaxgpt.tools.plan.hlo.Collective`.
        n: number of devices in the group.
        bandwidth: bytes/s, from `ring_bandwidth`.
        switched: every device reaches every other directly, as GPUs do.
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
