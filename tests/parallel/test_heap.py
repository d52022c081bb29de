"""The C library's heap, in a process of its own."""

import platform

import pytest

from tests.helpers import run_command

HOLES = """
import ctypes, resource
from jaxgpt.parallel.heap import retire_holes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallopt(-4, 0)  # M_MMAP_MAX: all blocks from the heap
def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * resource.getpagesize() / 2**20
blocks = [libc.malloc(100_000) for _ in range(1_000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[::2]:
    libc.free(block)
before, in_hole = resident(), libc.malloc(90_000) < max(blocks)
retire_holes()
print(in_hole, resident() < before - 40, all(libc.malloc(size) > max(blocks) for size in (90_000, 20_000, 2_000)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is not glibc's")
def test_retired_holes_are_neither_resident_nor_used_again(tmp_path):
    done = run_command("-c", HOLES, cwd=tmp_path)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr
