"""Several processes and several copies of a state: connect the processes, exchange values, compare the copies."""

import contextlib
import importlib.util
import itertools
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxgpt.config import ParallelConfig
from jaxgpt.errors import RaisedOnAllProcesses, UserError, first_line

HEARTBEAT = 30  # seconds of silence after which a process counts as lost and the others end
SHUTDOWN = 300  # seconds that a finished process waits for the others: process 0 still writes a sample
LINGER = 3  # seconds that process 0 waits before it ends, so that the others can read its last message


class ProcessLost(RuntimeError):
    """Another process has ended or hangs: the progress since the last checkpoint is lost."""

    def __init__(self, words: str, status: int = 1):
        """Take the message and the exit status: 2 if the other process raised `UserError`."""
        super().__init__(words)
        self.status = status


def initialize(config: ParallelConfig) -> None:
    """Connect to the other processes, if there are any. Call this before JAX starts a backend.

    JAX detects them on Cloud TPU, GKE, SLURM and Open MPI; elsewhere, `config.coordinator` is the address of process 0.
    Raises `UserError` if they cannot connect. Ends the process if they do not all connect within
    `config.connect_timeout` seconds: the call that waits for the others cannot be interrupted.
    """
    address, seconds = config.coordinator, config.connect_timeout
    if jax.distributed.is_initialized() or (address is None and cluster() is None):
        return
    host, _, port = (address or "").rpartition(":")
    if address is not None and not (host and port.isdecimal()):
        raise UserError(f"parallel.coordinator={address!r}: needs HOST:PORT of process 0, such as 10.0.0.2:8476")
    where = address or f"the coordinator that {cluster()} names"

    def give_up() -> None:
        sys.stderr.write(
            f"jaxgpt: the processes did not all meet at {where} within {seconds:.0f} s: "
            "check that each of them is started with the same --parallel.processes and can reach that address\n"
        )
        os._exit(2)

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        # JAX's client tries ever more rarely, and would meet process 0 up to two minutes late.
        while address is not None and config.process_id:
            with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
                break
            time.sleep(0.2)
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=config.processes,
            process_id=config.process_id,
            cluster_detection_method=None if address is None else "deactivate",
            initialization_timeout=seconds + 60,  # then JAX aborts with a stack dump; the timer is earlier
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except Exception as e:  # whatever the cluster's own library raises
        raise UserError(
            f"the processes could not meet at {where}: {first_line(e)}. "
            "Check that each of them was started. For a single process, unset the variables that name the others."
        ) from None
    finally:
        timer.cancel()


def cluster() -> str | None:
    """Return the name of the environment that started this process with others. None: it is alone."""
    env = os.environ

    def count(name: str) -> int:
        value = env.get(name, "1")
        if not value.isdecimal():
            raise UserError(f"{name}={value!r}: needs a whole number of processes; unset it if this process is alone")
        return int(value)

    if "OMPI_MCA_orte_hnp_uri" in env and count("OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    # Variables of a SLURM step, set by srun: sbatch without it, or an interactive shell, runs one process.
    if "SLURM_STEP_NODELIST" in env and count("SLURM_NTASKS") > 1:
        return "SLURM"
    if "," in env.get("TPU_WORKER_HOSTNAMES", ""):
        return "GKE"
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    if chips and importlib.util.find_spec("libtpu") and "TPU_SKIP_MDS_QUERY" not in env:
        return "Cloud TPU"  # a slice of one or more hosts, listed by the metadata server
    return None


def is_multiprocess() -> bool:
    """Return whether the run has more than one process."""
    return jax.process_count() > 1


def is_process_0() -> bool:
    """Return whether this process is the one that logs and writes files."""
    return jax.process_index() == 0


def barrier(where: str) -> None:
    """Wait until all processes have reached the barrier named `where`."""
    if is_multiprocess():
        multihost_utils.sync_global_devices(where)


_asked = itertools.count()  # equal in all processes, which make the same calls in the same order


def _store() -> Any:
    """Return the client of JAX's key-value store, which is in the memory of process 0.

    JAX 0.10.2 has no public name for it: `jax.distributed` only connects and disconnects processes, and
    `jax.experimental.multihost_utils` communicates through the devices, which may hang.
    """
    from jax._src import distributed

    return distributed.global_state.client


def publish(key: str, value: str) -> None:
    """Store a value for the other processes in process 0. Raises `JaxRuntimeError` if that does not answer."""
    _store().key_value_set(f"jaxgpt/{key}", value, allow_overwrite=True)


def read_published(folder: str) -> list[str]:
    """Return the values of all keys in a folder. Raises `JaxRuntimeError` if process 0 does not answer."""
    return [value for _, value in _store().key_value_dir_get(f"jaxgpt/{folder}")]


def on_process_0(function: Callable[[], int]) -> int:
    """Call `function` in process 0 and return its result, an integer, in all processes.

    If it raises `UserError`, all processes raise one with the same message. All processes must make these calls, in
    the same order.
    """
    words = ""
    if is_process_0():
        try:
            found = function()
            assert type(found) is int, found
            words = str(found)
        except UserError as e:
            words = f"no: {e}"
    if is_multiprocess():
        key = f"leader/{next(_asked)}"
        if is_process_0():
            publish(key, words)
        else:  # A week: process 0 may take long. If it is lost, JAX ends this process.
            words = _store().blocking_key_value_get(f"jaxgpt/{key}", 7 * 24 * 3600 * 1000)
    if words.startswith("no: "):
        raise UserError(words.removeprefix("no: "))
    return int(words)


def exit_now(status: int) -> NoReturn:
    """End this process at once: a normal exit would wait for the others."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed stream must not keep the process from ending
            stream.flush()
    if is_multiprocess() and is_process_0():
        time.sleep(LINGER)
    os._exit(status)


def whole_everywhere() -> jax.sharding.Sharding:
    """Return the sharding of an array of which each process holds a full copy."""
    if is_multiprocess():
        return NamedSharding(Mesh(np.asarray(jax.devices()), "devices"), PartitionSpec())
    return SingleDeviceSharding(jax.local_devices()[0])


def one_copy(tree: Any) -> Any:
    """Return the first of this process's copies of each array; nothing is moved."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def on_one_device(tree: Any) -> Any:
    """Return the arrays on a single device of this process; None if the process holds only parts of them."""
    arrays = jax.tree.leaves(tree)
    if not all(x.is_fully_addressable or x.is_fully_replicated for x in arrays):
        return None
    device = jax.local_devices()[0]
    return jax.tree.map(lambda x: jax.device_put(x.addressable_data(0) if x.is_fully_replicated else x, device), tree)


class ReplicasDiffer(RaisedOnAllProcesses, RuntimeError):
    """The copies of the state on different devices are no longer equal, bit for bit.

    A faulty device rarely reports an error: about one silent corruption in a hundred gives a NaN (arXiv:2605.04213). If
    each device updates its own copy, the others show as differences between copies.
    """


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
