"""Tune glibc's heaps for a command. Without glibc, nothing happens."""

import ctypes
import os
import platform

# from malloc.h
OPTIONS = {"M_TRIM_THRESHOLD": -1, "M_TOP_PAD": -2, "M_MMAP_THRESHOLD": -3, "M_MMAP_MAX": -4, "M_ARENA_MAX": -8}


def keep_freed_memory() -> None:
    """Let the C library keep the memory that a step frees for the next step, instead of returning it to the kernel.

    XLA on CPU allocates its temporaries in every step, in pieces that glibc maps and unmaps: 13,000 page faults and
    40 ms of kernel time per step of nanoGPT's CPU configuration (110 ms -> 62 ms with this setting). The process then
    stays as large as its largest step.

    Each thread has a heap of its own. In one heap for all, the threads of the compiler wait for each other, and the
    holes that they leave slow down each product of each step. But only the first thread's heap keeps blocks above
    64 MB, so steps run in the thread that calls them: call this before a device is first used.
    """
    is_tuned = _tune_malloc(
        M_MMAP_MAX=0,  # allocate all sizes from the heaps
        M_TRIM_THRESHOLD=2**31 - 1,  # never shrink a heap
        M_TOP_PAD=2**26,  # nor give an empty one back
    )
    if is_tuned and "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        import jax

        jax.config.update("jax_cpu_enable_async_dispatch", False)


def return_freed_memory() -> None:
    """Let the C library return an array's memory as soon as it is freed, for commands that only read and write.

    By default glibc allocates arrays of up to 32 MB on the heap after it has freed one; a tenth of a model's size then
    stays behind in holes. Call this early, like `keep_freed_memory`.
    """
    _tune_malloc(
        M_MMAP_THRESHOLD=2**17,  # glibc's initial value, which it no longer raises once it is set
        M_ARENA_MAX=1,
    )


def _tune_malloc(**options: int) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    for name, value in options.items():
        ctypes.CDLL(None).mallopt(OPTIONS[name], value)
    return True
