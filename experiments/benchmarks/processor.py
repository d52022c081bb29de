"""Describe this machine's processor: XLA compiles for it, so that another one may round sums differently."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Linux's names of vector instructions, widest first, and of matrix instructions.
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE", "asimd": "NEON"}
MATRICES = {"amx_tile": "AMX", "sme": "SME"}


def describe_processor() -> str:
    """Return family, vector width and usable cores: "GenuineIntel family 6 model 167, AVX-512 and AMX, 2 cores"."""
    fields = _read_cpuinfo()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    model = fields.get("model") or fields.get("CPU part")
    maker = fields.get("vendor_id") or fields.get("CPU implementer") or platform.processor() or "unknown"
    family = fields.get("cpu family") or platform.machine()
    name = f"{maker} family {family}" + (f" model {model}" if model else "")
    width = next((name for flag, name in VECTORS.items() if flag in flags), None)
    units = [*([width] if width else []), *(name for flag, name in MATRICES.items() if flag in flags)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ", ".join([name, *([" and ".join(units)] if units else []), f"{cores} core{'s' * (cores > 1)}"])


def _read_cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor. Without Linux's file, none."""
    try:
        first = CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
