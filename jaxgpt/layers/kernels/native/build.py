"""Build the kernels in C++ for CPUs by this machine's own compiler, and register them with XLA."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import jax

from jaxgpt.errors import UserError, first_line
from jaxgpt.files import cache_directory, make_cache

SOURCE = Path(__file__).with_name("kernels.cc")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-DNDEBUG", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")  # unless the environment variable CXX names one
DEADLINE = 120  # seconds for the compiler, which takes 4
HANDLERS = ("attention_forward", "attention_backward", "product")


@functools.cache
def why_not_native() -> str | None:
    """Build the kernels, if the cache does not have them, and load them. Return why that fails, or None."""
    named = os.environ.get("CXX")
    compiler = next((found for name in ((named,) if named else COMPILERS) if (found := shutil.which(name))), None)
    if compiler is None:
        return f"there is no C++ compiler ({named or ', '.join(COMPILERS)})"
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, UserError, subprocess.TimeoutExpired) as e:
        return f"{compiler} does not build it: {first_line(e)}"
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(f"jaxgpt_{name}", handler, platform="cpu")
    return None


def _build(compiler: str) -> Path:
    """Compile the kernels into a file named by compiler, flags and CPU, since machines may share a home directory."""
    command = [compiler, *FLAGS, "-I", jax.ffi.include_dir(), str(SOURCE)]
    cpu = Path("/proc/cpuinfo")
    flags = {x for x in cpu.read_text().splitlines() if x.startswith(("flags", "model"))} if cpu.exists() else set()
    decides = [*command, os.stat(compiler).st_mtime_ns, jax.__version__, sysconfig.get_platform(), *sorted(flags)]
    digest = hashlib.sha256(SOURCE.read_bytes() + repr(decides).encode()).hexdigest()[:16]
    library = cache_directory() / "native" / f"kernels-{digest}.so"
    if not library.exists():
        make_cache(library.parent)
        made = library.with_name(f"{library.name}.{os.getpid()}")
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=DEADLINE)
        if done.returncode:
            raise OSError(done.stderr or f"exit status {done.returncode}")
        made.replace(library)
    return library
