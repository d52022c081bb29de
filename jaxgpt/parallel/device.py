"""What the device at hand is, and how to compute on it."""

import ctypes
import dataclasses
import os
import platform

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.config import GPTConfig, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.paths import cache_directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a model computes on this machine; `GPT(config, **options.for_model())`."""

    dtype: DTypeLike
    attention: str
    reason: str  # in words, for the first line a run prints

    def for_model(self) -> dict:
        return {"dtype": self.dtype, "attention": self.attention}


def device_kind() -> str:
    """JAX's name of the first device: "cpu", "NVIDIA H200", "TPU v5 lite", ..."""
    return jax.devices()[0].device_kind


def compute_options(model: GPTConfig, train: TrainConfig) -> ComputeOptions:
    """float32 and the plain kernel on CPU, bfloat16 elsewhere, cuDNN's attention on Nvidia GPUs that have it.

    On CPU a bfloat16 product is slower than a float32 one; on GPU and TPU it is several times faster.
    Raises `UserError` if a named kernel cannot do what is asked.
    """
    device = jax.devices()[0]
    on_gpu = device.platform in ("gpu", "cuda")
    dtype = train.dtype
    if dtype == "auto":
        dtype = "float32" if device.platform == "cpu" else "bfloat16"

    capability = float(getattr(device, "compute_capability", 0) or 0)
    largest_head = 256 if capability >= 9.0 else 128
    why_not = None
    if not on_gpu:
        why_not = f"the device is {device.device_kind}"
    elif capability < 8.0:
        why_not = f"compute capability {capability} is below 8.0"
    elif dtype != "bfloat16":
        why_not = f"it needs 16-bit numbers and dtype is {dtype}"
    elif model.head_size % 8 or model.head_size > largest_head:
        why_not = f"head size {model.head_size} is not a multiple of 8 up to {largest_head}"

    attention = train.attention
    if attention == "cudnn" and why_not:
        raise UserError(f"train.attention=cudnn is not to be had here: {why_not}. Take auto, plain or xla.")
    if attention == "auto":
        attention = "plain" if why_not else "cudnn"
    return ComputeOptions(
        dtype=jnp.dtype(dtype),
        attention=attention,
        reason=f"{jax.device_count()} x {device.device_kind}, {dtype}, {attention} attention",
    )


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next step, instead of giving it back to the kernel.

    XLA on CPU allocates its temporaries anew each step, in pieces that glibc maps and unmaps: 13,000 page faults and
    40 ms of kernel time per step of nanoGPT's CPU configuration (110 ms -> 62 ms with this). The process then stays
    as large as its largest step. Best called before the first use of a device, whose threads would otherwise have
    heaps of their own. Does nothing where there is no glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # from malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)  # from the heap, whatever the size,
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # whose top stays,
    libc.mallopt(M_ARENA_MAX, 1)  # and which all threads share


def enable_compilation_cache() -> None:
    """Keep compiled programs in the user's cache directory, so that the second start skips most compilation.

    JAX runs what it finds there, so the directory is the user's alone (mode 0700), never a shared /tmp.
    `JAX_COMPILATION_CACHE_DIR` names another one; empty, it turns the cache off.
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
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_compilation_cache_max_size", 2 * 1024**3)  # bytes; the oldest go first
