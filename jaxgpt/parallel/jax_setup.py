"""Set the machine up for JAX, before it is imported: heap, flags, dispatch, collector, logging, cache and devices."""

from __future__ import annotations

import ctypes
import gc
import glob
import importlib
import logging
import os
import platform
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jaxgpt.errors import UserError
from jaxgpt.files import cache_directory

if TYPE_CHECKING:  # the process is set up before jax is imported
    import jax

_is_set_up = False  # by the first call of `configure_jax`
SWITCH = "JAXGPT_SETUP"  # environment variable: 0 leaves the process as it is
NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # the last one: Windows Subsystem for Linux
TPU_DEVICES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
# libtpu reads these when it is loaded. Without them and without a TPU it prints five lines of errors.
LIBTPU = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}

# XLA on CPU computes some programs wrongly when YNNPACK fuses a reduction into the product before it: jaxlib 0.10.2 to
# 0.12.0.1, github.com/jax-ml/jax/issues/39103. `tests/canary.py` has such programs.
REDUCTIONS_FLAG = "--xla_cpu_experimental_ynn_fusion_type"
NO_FUSED_REDUCTIONS = f"{REDUCTIONS_FLAG}=-reduce"
# XLA for GPUs would merge the products of q and k and copy both results out again: 2.4 GB in a step of GPT-2 124M.
NO_MERGED_PRODUCTS = "--xla_gpu_dot_merger_threshold_mb=0"

# Objects between two runs of Python's garbage collector. At Python's own 700 it takes 0.2 s of the quickstart's start.
GC_THRESHOLD = 50_000

# from glibc's malloc.h
MALLOC = {"M_TRIM_THRESHOLD": -1, "M_TOP_PAD": -2, "M_MMAP_THRESHOLD": -3, "M_MMAP_MAX": -4, "M_ARENA_MAX": -8}


def configure_jax(*, computes: bool = True) -> None:
    """Set up the process, once. Every command, `jaxgpt.fit` and `jaxgpt.load` call this first. A notebook may.

    No backend is started, since several processes must connect first. Environment variables that are set already win,
    and `JAXGPT_SETUP=0` leaves the process as it is. Warns if JAX has started on a CPU with fused reductions. Raises
    `UserError` for an environment variable that JAX cannot use.

    computes: False if arrays are only read and written, in host memory, where models fit that no device can hold.
    """
    global _is_set_up
    if _is_set_up or os.environ.get(SWITCH) == "0":
        return
    count = os.environ.get("JAX_NUM_CPU_DEVICES", "1")
    if not re.fullmatch(r"[1-9][0-9]{0,3}", count, re.ASCII):  # with others XLA ends the process
        raise UserError(f"JAX_NUM_CPU_DEVICES={count!r}: set a whole number from 1 to 9999, or unset it")
    skip_cuda_check()
    quiet_libtpu()
    jax = import_jax()
    flags = os.environ.get("XLA_FLAGS", "")
    if _has_started():
        if jax.default_backend() == "cpu" and REDUCTIONS_FLAG not in flags:
            flag = f"{NO_FUSED_REDUCTIONS} in XLA_FLAGS, and may sum wrongly"
            remedy = "call jaxgpt.configure_jax() before the first array"
            warnings.warn(f"JAX has started without {flag}: {remedy}", stacklevel=2)
    else:
        ours = [flag for flag in (NO_FUSED_REDUCTIONS, NO_MERGED_PRODUCTS) if flag.partition("=")[0] not in flags]
        os.environ["XLA_FLAGS"] = " ".join([flags, *ours]).strip()
    for name in ("absl", "asyncio"):  # Orbax logs a dozen lines per save, a hundred if it fails
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not computes:
        jax.config.update("jax_platforms", "cpu")
        return_freed_memory()
    elif keep_freed_memory() and "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # steps run in the first thread: see the heap
    enable_compilation_cache()
    _is_set_up = True


def import_jax() -> ModuleType:
    """Import jax. Raise `UserError` if it cannot parse one of its environment variables."""
    if os.environ.get(SWITCH) != "0":
        gc.set_threshold(GC_THRESHOLD)
    try:
        return importlib.import_module("jax")
    except ValueError as e:
        raise UserError(f"jax cannot be imported: {e}. Check the environment variables that begin with JAX_") from None


def _has_started() -> bool:
    """Return whether a backend has started."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def skip_cuda_check() -> None:
    """Keep JAX's CUDA plugin from looking for CUDA's libraries where there is no GPU.

    The plugin may be there only for its compiler, by the extra `plan-gpu`. JAX then logs a traceback at its first use.
    """
    if not any(os.path.exists(path) for path in NVIDIA_DEVICES):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def quiet_libtpu(*, only_compiles: bool = False) -> None:
    """Keep libtpu, which may be there only for its compiler, from reporting that this machine has no TPU.

    only_compiles: no TPU is wanted, even if there is one.
    """
    if only_compiles or not any(map(glob.glob, TPU_DEVICES)):
        for name, value in LIBTPU.items():
            os.environ.setdefault(name, value)


def keep_freed_memory() -> bool:
    """Let the C library keep the memory that a step frees for the next step. Return False without glibc.

    XLA on CPU allocates its temporaries in every step, and glibc maps and unmaps them: 48 of 110 ms in nanoGPT's CPU
    configuration. The process then stays as large as its largest step. Threads keep heaps of their own, since the
    compiler's would wait for each other. Only the first thread's holds blocks above 64 MB: steps run in that thread.
    """
    # All sizes come from the heaps, which are never shrunk, nor given back when they are empty.
    return _tune_malloc(M_MMAP_MAX=0, M_TRIM_THRESHOLD=2**31 - 1, M_TOP_PAD=2**26)


def return_freed_memory() -> None:
    """Let the C library return freed memory, for commands that only read and write: a tenth of a model stays in holes."""
    _tune_malloc(M_MMAP_THRESHOLD=2**17, M_ARENA_MAX=1)  # glibc's initial value, which it no longer raises once set


def _tune_malloc(**options: int) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    for name, value in options.items():
        ctypes.CDLL(None).mallopt(MALLOC[name], value)
    return True


def enable_compilation_cache() -> None:
    """Keep compiled programs in the user's cache directory, so that the second start skips most compilation.

    JAX runs the programs it finds there, so only the user can access the directory (mode 0700). It is never in /tmp.
    Each version of jaxlib has a folder: XLA leaves it to us not to read what another has found by tuning kernels of GPUs.
    `JAX_COMPILATION_CACHE_DIR` names another directory, or turns the cache off if it is empty.
    """
    jax = import_jax()
    from jaxlib.version import __version__

    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if named == "":  # for JAX it is the working directory, where XLA for GPUs makes a folder
        jax.config.update("jax_enable_compilation_cache", False)
    elif named and "://" not in named:  # a process may change its working directory
        jax.config.update("jax_compilation_cache_dir", os.path.abspath(named))
    if named is not None:
        return
    directory = cache_directory().absolute() / "xla" / __version__
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
    except OSError:  # a read-only home, or another user's directory: run without a cache
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_compilation_cache_max_size", 2 * 1024**3)  # bytes. The oldest programs go first


def all_devices() -> list[jax.Device]:
    """Return the devices of all processes. Raises `UserError` if JAX finds none."""
    jax = import_jax()
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as e:  # unknown platform, or no driver. For cuda JAX fails an assertion
        said = str(e).partition("\n")[0] or "no such platform is installed"
        found = f"JAX finds no device (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')!r})"
        raise UserError(f"{found}: {said}. Set JAX_PLATFORMS=cpu") from None


def first_device() -> jax.Device:
    """Return the device that programs run on by default. Raises `UserError` if JAX finds none."""
    return all_devices()[0]


def device_name() -> str:
    """Return the kind of the first device: for a CPU its maker, family and model, which decide how XLA rounds sums."""
    kind, facts = first_device().device_kind, Path("/proc/cpuinfo")
    if kind != "cpu" or not facts.exists():  # not Linux
        return kind
    first = facts.read_text(errors="replace").partition("\n\n")[0]
    found = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (.*)$", first, re.MULTILINE))
    if len(found) < 3:
        return kind
    return f"{kind} {found['vendor_id']} family {found['cpu family']} model {found['model']}"
