"""State what a device can compute and hold, and count what a model asks of it."""

import math
import os
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax

from jaxgpt.config.validate import Interval
from jaxgpt.errors import UserError
from jaxgpt.model import GPTConfig
from jaxgpt.train import Params


class Peaks(NamedTuple):
    """One device's limits, as its vendor states them."""

    flops: float  # dense bfloat16 FLOP/s
    memory: int  # bytes of HBM
    memory_bandwidth: float  # bytes/s


#: `Peaks` by JAX's full name of the device. "NVIDIA A100-SXM4-40GB MIG 1g.5gb" and "TPU v4 lite" are unknown.
PEAKS = {
    # GPU: nvidia.com's data sheets of A100, H100, H100 NVL, H200 and H200 NVL. B200 (HGX) is from
    # glennklockwood.com/garden/processors/B200, RTX PRO 6000 Blackwell is from no page of Nvidia, RTX 4090 from
    # "Ada GPU Architecture" v2.1 (float32 sums). FLOP/s without sparsity. Memory is what the driver reports, by the
    # target files that tools/plan/topology.py names, or else what the data sheet says.
    "NVIDIA A100-SXM4-40GB": Peaks(312e12, 40_000_000_000, 1.555e12),
    "NVIDIA A100-SXM4-80GB": Peaks(312e12, 85_100_068_864, 2.039e12),
    "NVIDIA A100-PCIE-40GB": Peaks(312e12, 40_000_000_000, 1.555e12),
    "NVIDIA A100 80GB PCIe": Peaks(312e12, 80_000_000_000, 1.935e12),
    "NVIDIA H100 80GB HBM3": Peaks(989e12, 84_942_979_072, 3.35e12),
    "NVIDIA H100 PCIe": Peaks(756e12, 80_000_000_000, 2.0e12),
    "NVIDIA H100 NVL": Peaks(835e12, 94_000_000_000, 3.9e12),
    "NVIDIA H200": Peaks(989e12, 151_397_597_184, 4.8e12),
    "NVIDIA H200 NVL": Peaks(835e12, 141_000_000_000, 4.8e12),
    "NVIDIA B200": Peaks(2250e12, 191_514_411_008, 8e12),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": Peaks(503.8e12, 103_079_215_104, 1.597e12),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": Peaks(503.8e12, 103_079_215_104, 1.792e12),
    "NVIDIA GeForce RTX 4090": Peaks(165.2e12, 24_000_000_000, 1.008e12),
    # TPU: FLOP/s from cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e, bandwidths from jax-ml.github.io/scaling-book/tpus.
    # Programs can use 30.75, 15.75, 95.74 and 31.25 GiB of them on v4, v5e, v5p and v6e, by libtpu 0.0.42's own message.
    "TPU v4": Peaks(275e12, 32 * 2**30, 1.2e12),
    "TPU v5 lite": Peaks(197e12, 16 * 2**30, 8.1e11),
    "TPU v5": Peaks(459e12, 96 * 2**30, 2.8e12),
    "TPU v6 lite": Peaks(918e12, 32 * 2**30, 1.6e12),
}
PEAKS |= {"TPU v5e": PEAKS["TPU v5 lite"], "TPU v5p": PEAKS["TPU v5"], "TPU v6e": PEAKS["TPU v6 lite"]}


def memory_of(device: jax.Device) -> int | None:
    """Return the bytes that programs can use on this device, None if unknown. CPU devices have equal shares of RAM."""
    if device.platform == "cpu":
        if not hasattr(os, "sysconf"):  # Windows
            return None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    stated = PEAKS[device.device_kind].memory if device.device_kind in PEAKS else None
    try:
        return (device.memory_stats() or {}).get("bytes_limit", stated)
    except jax.errors.JaxRuntimeError:  # a device of a topology, which is not attached
        return stated if stated is None or device.platform == "tpu" else int(stated * gpu_memory_share())


def gpu_memory_share() -> float:
    """Return the part of a GPU's memory that XLA allocates at its start: three quarters, or what a variable says."""
    from jaxgpt.config.words import parse_value  # which training does not need

    name = "XLA_CLIENT_MEM_FRACTION"
    return parse_value(name, os.environ.get(name, "0.75"), Annotated[float, Interval(gt=0, le=1)])


def bytes_per_device(state: Any) -> int:
    """Count the bytes that a state's arrays, or their shards, take on each of its devices."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))


def check_memory(state: Any, activations: int, devices: Sequence[jax.Device]) -> None:
    """Raise `UserError` if a training state cannot fit in memory: otherwise the system would kill the process.

    `state` holds shapes and shardings. `activations` is a lower bound of the other bytes per device that a step needs.
    """
    needed, memory = bytes_per_device(state) + activations, memory_of(devices[0])
    if memory is not None and needed > memory:
        has = f"{len(devices)} devices, which have {memory / 2**30:,.1f}: lower --parallel.micro-batch-size"
        raise UserError(f"this model and batch need at least {needed / 2**30:,.1f} GiB on each of {has}")


def count_parameters(params: Params) -> int:
    """Count the elements of all arrays in a tree."""
    return sum(x.size for x in jax.tree.leaves(params))


def train_flops_per_token(config: GPTConfig, n_params: int, in_adapters: int = 0) -> float | None:
    """Return the FLOPs per token of both passes: 6 per weight in matrix products, 12 L N H T for attention's products.

    Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B. Embedding lookups count as 0, but a tied table counts as
    the output matrix. The masked half of attention, which kernels skip, counts too, as is usual.

    in_adapters: number of parameters in adapters, not counted in `n_params`, if only these are trained. The others then
    need no gradient, which is 2 of their 6 FLOPs. Returns None for a configuration of a user's own: its products are unknown.
    """
    if config.is_foreign:
        return None
    rows = config.block_size if config.position == "learned" else 0
    if not config.tie_embeddings and config.vocab_size is not None:
        rows += config.vocab_size
    each = 4.0 if in_adapters else 6.0
    return each * (n_params - rows * config.n_embd) + 6.0 * in_adapters + 6.0 * attention_flops(config)


def attention_flops(config: GPTConfig) -> float:
    """Return the FLOPs per token of one of the two products in attention, over all layers and masked scores: 2 L N H T.

    In a layer with a sliding window, T is its size.
    """
    read = sum(min(config.window(layer) or config.block_size, config.block_size) for layer in range(config.n_layer))
    return 2.0 * config.n_head * config.shape.head_dim * read
