"""The devices at hand: their memory, and the dtype and attention kernel to compute with."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.layers.kernels.fused import cudnn_attention, xla_attention
from jaxgpt.layers.kernels.plain import AttentionFn, plain_attention
from jaxgpt.layers.kernels.splash import splash_attention, why_not_splash
from jaxgpt.parallel.peaks import PEAKS

KERNELS: dict[str, AttentionFn] = {
    "plain": plain_attention,
    "xla": xla_attention,
    "cudnn": cudnn_attention,
    "splash": splash_attention,
}
CAPPED = "it cannot cap scores (model.attention_softcap)"
PACKED = "it cannot separate the conversations that are packed into a row"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """The dtype and attention kernel that a model computes with on this machine."""

    dtype: DTypeLike
    attention: str  # a key of `KERNELS`
    reason: str  # dtype and kernel, and why the kernel was chosen

    @property
    def attention_fn(self) -> AttentionFn:
        """Return the attention kernel."""
        return KERNELS[self.attention]


def all_devices() -> list[jax.Device]:
    """Return the devices of all processes. Raises `UserError` if JAX finds none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as e:  # unknown platform, or no driver; for cuda JAX fails an assertion
        named, said = os.environ.get("JAX_PLATFORMS"), str(e) or "no such platform is installed"
        raise UserError(
            f"JAX finds no device (JAX_PLATFORMS={named!r}): {said.splitlines()[0]}. "
            "Set JAX_PLATFORMS=cpu to compute on the CPU"
        ) from None


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

    On CPU a bfloat16 product is slower than a float32 one; on GPU and TPU it is several times faster.

    Args:
        model: the model's configuration.
        train: the dtype and kernel that are asked for, or "auto".
        device: the device to compute on. None: the first.
        is_packed: rows hold several documents, between which there must be no attention.
        required: raise `UserError` if the device cannot run the named kernel. False: the kernel was named for another
            device; choose as for "auto" if this one cannot run it.
    """
    device = first_device() if device is None else device
    model = model.explicit()
    assert model.head_dim
    dtype = train.dtype
    if dtype == "auto":
        dtype = "float32" if device.platform == "cpu" else "bfloat16"

    elsewhere = f"the device is {device.device_kind}"
    why_not = {
        "xla": CAPPED if model.attention_softcap is not None else None,
        "cudnn": _why_not_cudnn(device, dtype, model) or (PACKED if is_packed else None),
        "splash": why_not_splash(model.block_size, model.head_dim, dtype) if device.platform == "tpu" else elsewhere,
    }
    refused = why_not.get(train.attention)
    if refused and required:
        raise UserError(f"train.attention={train.attention} is not available here: {refused}. Use auto or plain.")
    fused = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(device.platform)
    attention = train.attention
    if attention == "auto" or refused:
        attention = "plain" if fused is None or why_not[fused] else fused
    said = f"{attention} attention"
    if refused:
        said += f" instead of {train.attention} ({refused})"
    if attention not in ("plain", "xla") and model.dropout:
        said += " (plain in training: it cannot drop weights)"
    elif fused and attention == "plain" and why_not[fused] and not refused:
        said += f" ({fused}: {why_not[fused]})"
    return ComputeOptions(dtype=jnp.dtype(dtype), attention=attention, reason=f"{dtype}, {said}")


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
    """Return the bytes that programs can use on this device; None: unknown. CPU devices have equal shares of RAM."""
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
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    given = [(name, value) for name in names if (value := os.environ.get(name))]
    if len(given) > 1:
        raise UserError(f"{' and '.join(names)} are set, but JAX takes one of them: unset the second, its old name")
    for name, value in given:
        try:
            share = float(value)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise UserError(f"{name}={value!r}: needs a number above 0, at most 1")
        return share
    return 0.75


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
        raise UserError(
            f"this model and batch need at least {needed / 2**30:,.1f} GiB on each of {len(devices)} devices, which have "
            f"{memory / 2**30:,.1f}: lower --model.n-embd, --model.n-layer, --train.batch-size or --parallel.micro-batch-size"
        )
