"""Slices: groups of devices with a fast network inside, joined by a slower one (TPU: the data-center network, DCN)."""

from collections import defaultdict
from collections.abc import Sequence

import jax

from jaxgpt.errors import UserError


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Return the number of TPU slices that devices belong to; 1 for other devices, which do not state a slice."""
    return len(_tpu_slices(devices)) or 1


def split_slices(devices: Sequence[jax.Device], slices: int) -> list[list[jax.Device]]:
    """Return the devices of each slice.

    TPUs state their slice. Elsewhere, a slice is a block of consecutive devices, and `jax.devices()` sorts them by
    process: 4 hosts of 8 GPUs are 4 slices of a host each, or 2 of two hosts. `jax.experimental.mesh_utils` would take
    each process as a slice, but SLURM starts one process per GPU.

    Raises `UserError` if TPUs belong to another number of slices. For other devices, the number must divide theirs.
    """
    found = _tpu_slices(devices)
    if found and len(found) != slices:
        n = len(found)
        are = f"are {n} slice" + "s" * (n > 1)
        raise UserError(
            f"parallel.slices={slices}, but the TPU's {len(devices)} devices {are}: take --parallel.slices {n}"
        )
    if found:
        return [found[index] for index in sorted(found)]
    size = len(devices) // slices
    return [list(devices[start : start + size]) for start in range(0, len(devices), size)]


def _tpu_slices(devices: Sequence[jax.Device]) -> dict[int, list[jax.Device]]:
    """Return TPUs by the index of their slice, which the compiler's description of a single slice does not have."""
    found = defaultdict(list)
    for device in devices:
        if device.platform == "tpu":
            found[getattr(device, "slice_index", 0)].append(device)
    return found
