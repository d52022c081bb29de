"""What the device at hand is, and how to compute on it."""

import ctypes
import dataclasses
import math
import os
import platform
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.files import cache_directory
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
MALLOC = {"M_TRIM_THRESHOLD": -1, "M_MMAP_THRESHOLD": -3, "M_MMAP_MAX": -4, "M_ARENA_MAX": -8}  # from malloc.h
PACKED = "it cannot keep several conversations in a row apart"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a model computes on this machine."""

    dtype: DTypeLike
    attention: str  # the name of the kernel
    reason: str  # both in words, and why

    @property
    def attention_fn(self) -> AttentionFn:
        """Return the kernel."""
        return KERNELS[self.attention]


def all_devices() -> list[jax.Device]:
    """Return the devices of all processes. Raises `UserError` if JAX finds none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as e:  # no such platform, or no driver for it: for cuda JAX only asserts
        named, said = os.environ.get("JAX_PLATFORMS"), str(e) or "no such platform is installed"
        raise UserError(
            f"JAX finds no device (JAX_PLATFORMS={named!r}): {said.splitlines()[0]}. JAX_PLATFORMS=cpu computes on the CPU"
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
    """Choose float32 and the plain kernel on CPU, bfloat16 elsewhere, splash attention on TPU, cuDNN's on Nvidia GPUs.

    On CPU a bfloat16 product is slower than a float32 one; on GPU and TPU it is several times faster.
    device: None: the first one. is_packed: rows hold several documents, which are to be kept apart.
    required: a named kernel that cannot do what is asked raises `UserError`; False: it was named for another device,
        and where this one cannot run it, the kernel is chosen as by auto.
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
        raise UserError(f"train.attention={train.attention} is not to be had here: {refused}. Take auto or plain.")
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
    except ValueError:  # it has none, or is AMD's, where it is like "gfx942"
        return f"the device is {device.device_kind}"
    assert model.head_dim
    largest_head = 256 if capability >= 9.0 else 128
    if capability < 8.0:
        return f"compute capability {capability} is below 8.0"
    if dtype != "bfloat16":
        return f"it needs 16-bit numbers and dtype is {dtype}"
    if model.attention_softcap is not None:
        return CAPPED
    if model.head_dim % 8 or model.head_dim > largest_head:
        return f"head size {model.head_dim} is not a multiple of 8 up to {largest_head}"
    return None


def memory_of(device: jax.Device) -> int | None:
    """Return the bytes that programs on this device may use. Of the machine's memory, a CPU device has its share."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    limits = PEAKS.get(device.device_kind)
    stated = None if limits is None else limits.memory
    try:
        return (device.memory_stats() or {}).get("bytes_limit", stated)
    except jax.errors.JaxRuntimeError:  # a device of a topology, which is not there
        return stated


def bytes_per_device(state: Any) -> int:
    """Count the bytes of a state on each of its devices: all of an array or a part of it, as its sharding says."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))


def check_memory(state: Any, activations: int, devices: Sequence[jax.Device]) -> None:
    """Raise `UserError` if a training state cannot be in memory, whatever is compiled: the system would kill the process.

    state: shapes and shardings. activations: bytes per device that a step needs at the very least. What would fit,
    `plan` tells.
    """
    needed, memory = bytes_per_device(state) + activations, memory_of(devices[0])
    if memory is not None and needed > memory:
        raise UserError(
            f"this model and batch need at least {needed / 2**30:,.1f} GiB on each of {len(devices)} devices, which have "
            f"{memory / 2**30:,.1f}: lower --model.n-embd, --model.n-layer, --train.batch-size or --parallel.micro-batch-size"
        )


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next step, instead of giving it back to the kernel.

    XLA on CPU allocates its temporaries anew each step, in pieces that glibc maps and unmaps: 13,000 page faults and
    40 ms of kernel time per step of nanoGPT's CPU configuration (110 ms -> 62 ms with this). The process then stays
    as large as its largest step. Best called before the first use of a device, whose threads would otherwise have
    heaps of their own. Does nothing where there is no glibc.
    """
    _tune_malloc(
        M_MMAP_MAX=0,  # from the heap, whatever the size,
        M_TRIM_THRESHOLD=2**31 - 1,  # whose top stays,
        M_ARENA_MAX=1,  # and which all threads share
    )


def return_freed_memory() -> None:
    """Let the C library give an array's memory back as soon as it is freed, for who only reads and writes.

    By itself glibc takes arrays of up to 32 MB from the heap once it has seen one freed, and of a model's copies on
    the way, a tenth of it stays behind in holes. Like `keep_freed_memory`, best called early, and for glibc alone.
    """
    _tune_malloc(
        M_MMAP_THRESHOLD=2**17,  # glibc's own at first, which it no longer raises once it is told
        M_ARENA_MAX=1,
    )


def _tune_malloc(**options: int) -> None:
    if platform.libc_ver()[0] == "glibc":
        for name, value in options.items():
            ctypes.CDLL(None).mallopt(MALLOC[name], value)


def enable_compilation_cache() -> None:
    """Keep compiled programs in the user's cache directory, so that the second start skips most compilation.

    JAX runs what it finds there, so the directory is the user's alone (mode 0700), never a shared /tmp.
    `JAX_COMPILATION_CACHE_DIR` names another one; empty, it turns the cache off. JAX's variable for the shortest
    compilation that is worth keeping stands too.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    directory = cache_directory() / "xla"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
    except OSError:  # a read-only home, or a directory of somebody else's: compile anew then
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_compilation_cache_max_size", 2 * 1024**3)  # bytes; the oldest go first
