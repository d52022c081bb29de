"""Devices: their peak rates, memory, dtype and attention kernel, and the FLOPs that a model asks of them."""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.errors import UserError
from jaxgpt.experiment import TrainConfig
from jaxgpt.layers.kernels.fused import cudnn_attention, xla_attention
from jaxgpt.layers.kernels.native.attention import native_attention
from jaxgpt.layers.kernels.native.build import why_not_native
from jaxgpt.layers.kernels.plain import DEFAULT_SCORES, AttentionFn, plain_attention
from jaxgpt.layers.kernels.splash import splash_attention, why_not_splash
from jaxgpt.model import GPTConfig
from jaxgpt.train import Params


@dataclasses.dataclass(frozen=True)
class Peaks:
    """One device's limits, as its vendor states them."""

    flops: float  # dense bfloat16 FLOP/s
    memory: int  # bytes of HBM
    memory_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s in one direction, of one TPU link or all NVLinks of a GPU
    # bytes/s in one direction, of a GPU's network card between hosts, or of a TPU chip's share of its host's cards
    network_bandwidth: float | None = None
    torus: int = 0  # dimensions of the torus of links, 0 if one switch connects all devices of a host


#: `Peaks` by JAX's full name of the device. "NVIDIA A100-SXM4-40GB MIG 1g.5gb" and "TPU v4 lite" are unknown.
PEAKS = {
    # GPU: nvidia.com's data sheets of A100, H100, H100 NVL, H200 and H200 NVL. B200 (HGX) is from
    # glennklockwood.com/garden/processors/B200, RTX PRO 6000 Blackwell without a page of Nvidia's at hand. FLOP/s without
    # sparsity, and half of the sum of a link's two directions. PCIe cards have PCIe here: an NVLink bridge connects only
    # two of them (four H200 NVL). Between hosts, the SXM boards have a network card each, by docs.nvidia.com/dgx: eight
    # of 200 Gbit/s in a DGX A100, of 400 Gbit/s in a DGX H100, H200 or B200. Memory is what the driver reports, by the
    # target files that tools/plan/topology.py names, or else the data sheet's.
    "NVIDIA A100-SXM4-40GB": Peaks(312e12, 40 * 10**9, 1.555e12, 300e9, 25e9),
    "NVIDIA A100-SXM4-80GB": Peaks(312e12, 85_100_068_864, 2.039e12, 300e9, 25e9),
    "NVIDIA A100-PCIE-40GB": Peaks(312e12, 40 * 10**9, 1.555e12, 32e9),
    "NVIDIA A100 80GB PCIe": Peaks(312e12, 80 * 10**9, 1.935e12, 32e9),
    "NVIDIA H100 80GB HBM3": Peaks(989e12, 84_942_979_072, 3.35e12, 450e9, 50e9),
    "NVIDIA H100 PCIe": Peaks(756e12, 80 * 10**9, 2.0e12, 64e9),
    "NVIDIA H100 NVL": Peaks(835e12, 94 * 10**9, 3.9e12, 64e9),
    "NVIDIA H200": Peaks(989e12, 151_397_597_184, 4.8e12, 450e9, 50e9),
    "NVIDIA H200 NVL": Peaks(835e12, 141 * 10**9, 4.8e12, 64e9),
    "NVIDIA B200": Peaks(2250e12, 191_514_411_008, 8e12, 900e9, 50e9),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": Peaks(503.8e12, 103_079_215_104, 1.597e12, 64e9),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": Peaks(503.8e12, 103_079_215_104, 1.792e12, 64e9),
    "NVIDIA GeForce RTX 4090": Peaks(165.2e12, 24 * 10**9, 1.008e12, 32e9),  # "Ada GPU Architecture" v2.1, float32 sums
    # TPU: FLOP/s from cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e. Bandwidths are from
    # jax-ml.github.io/scaling-book/tpus, where links are a tenth slower than in the data sheets (v5e: 1600 Gbit/s over 4
    # ports). Of the memory, programs can use 30.75, 15.75, 95.74 and 31.25 GiB on v4, v5e, v5p and v6e, by the
    # out-of-memory message of libtpu 0.0.42. Network between slices, by cloud.google.com/tpu/docs: 2 cards of 100 Gbit/s
    # for 8 chips of v5e, 50 Gbit/s for a chip of v5p, 4 cards of 200 Gbit/s for 8 chips of v6e. scaling-book/tpus has
    # 2.5e10 bytes/s for a host. For v4: unknown.
    "TPU v4": Peaks(275e12, 32 * 2**30, 1.2e12, 4.5e10, None, torus=3),
    "TPU v5 lite": Peaks(197e12, 16 * 2**30, 8.1e11, 4.5e10, 3.125e9, torus=2),
    "TPU v5": Peaks(459e12, 96 * 2**30, 2.8e12, 9e10, 6.25e9, torus=3),
    "TPU v6 lite": Peaks(918e12, 32 * 2**30, 1.6e12, 9e10, 12.5e9, torus=2),
}
PEAKS |= {"TPU v5e": PEAKS["TPU v5 lite"], "TPU v5p": PEAKS["TPU v5"], "TPU v6e": PEAKS["TPU v6 lite"]}


def with_dropout(kernel: AttentionFn) -> AttentionFn:
    """Return a kernel whose place `plain_attention` takes where weights are dropped, which `kernel` cannot do."""

    @functools.wraps(kernel)
    def attend(q_BTNH, k_BSKH, v_BSKH, scores=DEFAULT_SCORES, *, segments_BT=None, key=None):
        if key is not None:
            return plain_attention(q_BTNH, k_BSKH, v_BSKH, scores, segments_BT=segments_BT, key=key)
        return kernel(q_BTNH, k_BSKH, v_BSKH, scores, segments_BT=segments_BT)

    return attend


KERNELS: dict[str, AttentionFn] = {
    "plain": plain_attention,
    "native": with_dropout(native_attention),
    "xla": with_dropout(xla_attention),
    "cudnn": with_dropout(cudnn_attention),
    "splash": with_dropout(splash_attention),
}
CAPPED = "it cannot cap scores (model.attention_softcap)"
PACKED = "it cannot separate the conversations that are packed into a row"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """The dtype and attention kernel that a model computes with on this machine."""

    dtype: DTypeLike  # dtype of activations and matrix products
    attention: str  # name of the kernel: a key of `KERNELS`
    reason: str  # dtype and kernel, and why the kernel was chosen

    @property
    def attention_fn(self) -> AttentionFn:
        """Return the attention kernel."""
        return KERNELS[self.attention]


def all_devices() -> list[jax.Device]:
    """Return the devices of all processes. Raises `UserError` if JAX finds none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as e:  # unknown platform, or no driver. For cuda JAX fails an assertion
        found = f"JAX finds no device (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')!r})"
        said = str(e).partition("\n")[0] or "no such platform is installed"
        raise UserError(f"{found}: {said}. Set JAX_PLATFORMS=cpu to compute on the CPU") from None


def first_device() -> jax.Device:
    """Return the device that programs run on by default. Raises `UserError` if JAX finds none."""
    return all_devices()[0]


def device_kind() -> str:
    """Return JAX's name of the first device: "cpu", "NVIDIA H200", "TPU v5 lite", ..."""
    return first_device().device_kind


def compute_options(
    model: GPTConfig,
    train: TrainConfig,
    device: jax.Device | None = None,
    *,
    is_packed: bool = False,
    required: bool = True,
) -> ComputeOptions:
    """Choose float32 and plain attention on CPU, bfloat16 elsewhere, splash attention on TPU, cuDNN's on Nvidia GPUs.

    On CPU XLA converts a bfloat16 product to float32 first. On GPU and TPU it is several times faster.

    device: the first by default. is_packed: rows hold several documents, between which there must be no attention.
    required: raise `UserError` if the device cannot run the named kernel. False means that the kernel was named for
    another device: if this one cannot run it, choose as for "auto".
    """
    device, model = device or first_device(), model.explicit()
    assert model.head_dim
    dtype = train.dtype
    if dtype == "auto":
        dtype = "float32" if device.platform == "cpu" else "bfloat16"
    elsewhere = f"the device is {device.device_kind}"
    why_not = {
        "native": elsewhere if device.platform != "cpu" else why_not_native() if train.attention == "native" else None,
        "xla": CAPPED if model.attention_softcap is not None else None,
        "cudnn": _why_not_cudnn(device, dtype, model) or (PACKED if is_packed else None),
        "splash": why_not_splash(model.block_size, model.head_dim, dtype) if device.platform == "tpu" else elsewhere,
    }
    attention, refused = train.attention, why_not.get(train.attention)
    if refused and required:
        raise UserError(f"train.attention={attention} is not available here: {refused}. Use auto or plain.")
    fused = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(device.platform)
    if attention == "auto" or refused:
        attention = "plain" if fused is None or why_not[fused] else fused
    said = f" instead of {train.attention} ({refused})" if refused else ""
    if attention not in ("plain", "xla") and model.dropout:
        said += " (plain in training: it cannot drop weights)"
    elif fused and attention == "plain" and why_not[fused] and not refused:
        said += f" ({fused}: {why_not[fused]})"
    reason = f"{dtype}, {attention} attention{said}"
    return ComputeOptions(dtype=jnp.dtype(dtype), attention=attention, reason=reason)


def _why_not_cudnn(device: jax.Device, dtype: str, model: GPTConfig) -> str | None:
    try:
        capability = float(getattr(device, "compute_capability", None) or "none")
    except ValueError:  # it has none, or is AMD's, with a capability such as "gfx942"
        return f"the device is {device.device_kind}"
    assert model.head_dim
    largest_head = 256 if capability >= 9.0 else 128
    if capability < 8.0:
        return f"compute capability {capability} is below 8.0"
    if dtype != "bfloat16":
        return f"it needs a 16-bit dtype, not {dtype}"
    if model.attention_softcap is not None:
        return CAPPED
    if model.head_dim % 8 or model.head_dim > largest_head:
        return f"head size {model.head_dim} is not a multiple of 8 up to {largest_head}"
    return None


def memory_of(device: jax.Device) -> int | None:
    """Return the bytes that programs can use on this device, None if unknown. CPU devices have equal shares of RAM."""
    if device.platform == "cpu":
        if not hasattr(os, "sysconf"):  # Windows
            return None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    limits = PEAKS.get(device.device_kind)
    stated = None if limits is None else limits.memory
    try:
        return (device.memory_stats() or {}).get("bytes_limit", stated)
    except jax.errors.JaxRuntimeError:  # a device of a topology, which is not attached
        return stated if stated is None or device.platform == "tpu" else int(stated * gpu_memory_share())


def gpu_memory_share() -> float:
    """Return the part of a GPU's memory that XLA allocates at its start: three quarters, or what a variable says."""
    name, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    given = os.environ.get(name) or os.environ.get(old) or "0.75"
    with contextlib.suppress(ValueError):
        if 0 < float(given) <= 1:
            return float(given)
    raise UserError(f"{name}={given!r}: needs a number above 0, at most 1")


def bytes_per_device(state: Any) -> int:
    """Count the bytes that a state's arrays, or their shards, take on each of its devices."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))


def check_memory(state: Any, activations: int, devices: Sequence[jax.Device]) -> None:
    """Raise `UserError` if a training state cannot fit in memory: otherwise the system would kill the process.

    `state` holds shapes and shardings. `activations` is a lower bound of the other bytes per device that a step needs.
    `jaxgpt plan` finds what fits.
    """
    needed, memory = bytes_per_device(state) + activations, memory_of(devices[0])
    if memory is not None and needed > memory:
        what = f"need at least {needed / 2**30:,.1f} GiB on each of {len(devices)} devices, which have {memory / 2**30:,.1f}"
        raise UserError(f"this model and batch {what}: lower --parallel.micro-batch-size or --model.n-embd")


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
    looked_up = config.block_size * config.n_embd if config.position == "learned" else 0
    if not config.tie_embeddings and config.vocab_size is not None:
        looked_up += config.vocab_size * config.n_embd
    each = 4.0 if in_adapters else 6.0
    return each * (n_params - looked_up) + 6.0 * in_adapters + 6.0 * attention_flops(config)


def attention_flops(config: GPTConfig) -> float:
    """Return the FLOPs per token of one of attention's two products over all layers, masked half included: 2 L N H T.

    In a layer with a sliding window, T is its size.
    """
    read = sum(min(config.window(layer) or config.block_size, config.block_size) for layer in range(config.n_layer))
    return 2.0 * config.n_head * config.shape.head_dim * read
