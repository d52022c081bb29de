"""The machine that is measured."""

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import jax

from jaxgpt.parallel.jax_setup import all_devices


def describe() -> str:
    """Return devices, driver, versions, processor and date in one line."""
    devices = all_devices()
    names = ("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
    return "; ".join(
        [
            f"{len(devices)} x {devices[0].device_kind}",
            driver(),
            ", ".join(f"{name} {version}" for name in names if (version := installed(name))),
            f"Python {platform.python_version()}",
            f"{os.cpu_count()} cores of {processor()}",
            datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        ]
    )


def driver() -> str:
    """Return the version of the driver, by nvidia-smi, or of the platform that JAX names."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()
        if said:
            return f"driver {said[0]}"
    return " ".join(jax.devices()[0].client.platform_version.split())


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Return the name of the processor."""
    path = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", path.read_text()) if path.exists() else None
    return named[1] if named else platform.processor() or platform.machine()
