"""Copies of one state on several devices must stay equal, bit for bit: a checksum of each finds one that does not.

A device that computes wrongly rarely says so: about one silent corruption in a hundred gives a NaN
(arXiv:2605.04213). Where each device updates a copy of its own, any other shows as a difference between them.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import RaisedOnAllProcesses


class ReplicasDiffer(RaisedOnAllProcesses, RuntimeError):
    """Copies of the state on different devices are no longer equal."""


def checksum(tree: Any) -> jax.Array:
    """Return a uint32 over all bits of all arrays: any one bit changes it, and so does nearly every change of more.

    Each word counts as often as its odd place says, modulo 2^32, in which odd numbers divide: a sum alone would
    miss words that change places.
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
    """Raise `ReplicasDiffer` unless the R copies of each of G parts have one checksum.

    devices: R * G, in the order of the sums. since, step: of the last check, and of this one.
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
    whose = f"{names} has another one than the rest" if len(odd) == 1 else f"{names} do not all have the same one"
    raise ReplicasDiffer(
        f"the copies of the state on the devices differ: {whose}, and did not yet at step {since}. What was computed "
        f"from then to step {step} is not to be trusted, and was not saved: training again goes on from the last "
        "checkpoint. The device, its memory or its link may be broken."
    )
