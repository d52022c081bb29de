"""Compare checksums of the copies of a state on several devices, which must stay equal bit for bit.

A faulty device rarely reports an error: about one silent corruption in a hundred gives a NaN (arXiv:2605.04213). If
each device updates its own copy, the others show as differences between copies.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import RaisedOnAllProcesses


class ReplicasDiffer(RaisedOnAllProcesses, RuntimeError):
    """The copies of the state on different devices are no longer equal."""


def checksum(tree: Any) -> jax.Array:
    """Return a uint32 checksum of all arrays: every change of one bit changes it, and nearly every larger change.

    Word i is multiplied by 2 i + 1, modulo 2^32. Odd factors are invertible, so every change of a single word changes
    the sum; equal factors would miss swapped words.
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = (
            leaf if leaf.dtype == bool else jax.lax.bitcast_convert_type(leaf, f"uint{8 * min(leaf.dtype.itemsize, 4)}")
        )
        words = bits.astype(jnp.uint32).ravel()
        places = jax.lax.iota(jnp.uint32, words.size) * 2 + 1
        total = total * 3 + jnp.sum(words * places, dtype=jnp.uint32)
    return total


def check_replicas(sums_RG: jax.Array, devices: Sequence[jax.Device], since: int, step: int) -> None:
    """Raise `ReplicasDiffer` unless the R copies of each of the G parts have equal checksums.

    Args:
        sums_RG: checksums, uint32.
        devices: the R * G devices, in the order of `sums_RG`.
        since: step of the last check, which passed.
        step: step of this check.

    Raises:
        ReplicasDiffer: the message names the devices that may be faulty.
    """
    sums = np.asarray(sums_RG)
    if (sums == sums[0]).all():
        return
    odd = []
    for g in range(sums.shape[1]):
        (most, count), *others = Counter(sums[:, g].tolist()).most_common()
        if others:
            majority = count > sum(n for _, n in others)
            odd += [devices[r * sums.shape[1] + g] for r in range(len(sums)) if not majority or sums[r, g] != most]
    names = ", ".join(f"{d} of process {d.process_index}" for d in odd)
    whose = f"{names} differs from the others" if len(odd) == 1 else f"at least one of {names} is wrong"
    raise ReplicasDiffer(
        f"the copies of the state on the devices are not equal: {whose}. They were equal at step {since}. The steps "
        f"from then to step {step} cannot be trusted and were not saved: train again to continue from the last "
        "checkpoint. The device, its memory or its link may be broken."
    )
