"""Set up JAX for a command, and check environment variables whose bad values would make XLA end the process."""

from __future__ import annotations

import gc
import glob
import logging
import os
import re
import warnings

from jaxgpt.errors import UserError

NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # the last one: Windows Subsystem for Linux
TPU_DEVICES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
# libtpu reads these when it is loaded. Without them and without a TPU it prints five lines of errors.
LIBTPU = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}

# Objects between two runs of Python's garbage collector. Importing JAX and tracing a step create a million objects and
# leave few cycles; at Python's own 700 the collector takes 0.2 s of the quickstart's start.
GC_THRESHOLD = 50_000


def configure_jax(*, computes: bool = True) -> None:
    """Import JAX and configure it for a command, without starting a backend: several processes must connect first.

    With `computes=False`, arrays are only read and written, in host memory, where models fit that no device can hold.
    Raises `UserError` for environment variables with unusable values.
    """
    count = os.environ.get("JAX_NUM_CPU_DEVICES")
    if count is not None and not re.fullmatch(r"[1-9][0-9]{0,3}", count, re.ASCII):
        raise UserError(
            f"JAX_NUM_CPU_DEVICES={count!r}: needs a whole number of devices from 1 to 9999, or to be unset"
        )
    if not computes:
        os.environ["JAX_PLATFORMS"] = "cpu"
    gc.set_threshold(GC_THRESHOLD)
    skip_cuda_check()
    quiet_libtpu()
    try:
        from jaxgpt.parallel.device import enable_compilation_cache
        from jaxgpt.parallel.heap import keep_freed_memory, return_freed_memory
    except ValueError as e:  # JAX cannot parse one of its environment variables
        raise UserError(f"jax cannot be imported: {e}. Check the environment variables that begin with JAX_") from None
    _try_flags()
    for name in ("absl", "asyncio"):  # Orbax logs a dozen lines per save, a hundred if it fails
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if computes:
        keep_freed_memory()
    else:
        return_freed_memory()
    enable_compilation_cache()


def skip_cuda_check() -> None:
    """Keep JAX's CUDA plugin from looking for CUDA's libraries where there is no GPU.

    The plugin may be there for its compiler alone, by the extra `plan-gpu`. JAX then logs a traceback at its first use.
    """
    if not any(os.path.exists(path) for path in NVIDIA_DEVICES):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def quiet_libtpu(*, only_compiles: bool = False) -> None:
    """Keep libtpu, which may be there for its compiler alone, from reporting that this machine has no TPU.

    only_compiles: no TPU is wanted, even if there is one.
    """
    if only_compiles or not any(map(glob.glob, TPU_DEVICES)):
        for name, value in LIBTPU.items():
            os.environ.setdefault(name, value)


def _try_flags() -> None:
    """Raise `UserError` for XLA flags that XLA does not know. A fork tries them, since XLA would end the process."""
    flags = os.environ.get("XLA_FLAGS")
    if not flags or not hasattr(os, "fork"):
        return
    from jaxlib import _jax

    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads, which the fork does not use
        child = os.fork()
    if not child:
        os.dup2(write, 2)
        _jax.CompileOptions()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stderr:
        output = stderr.read().decode("utf-8", "replace")
    if os.waitpid(child, 0)[1]:
        first = re.sub(r"^.*?\] ", "", output.splitlines()[0]) if output else "XLA ended"
        raise UserError(f"XLA cannot use XLA_FLAGS={flags!r}: {first}. Correct it, or unset it.")
