"""Connect several processes, let them agree, and end one that hangs. JAX ends the others when one dies."""

import contextlib
import faulthandler
import glob
import importlib.util
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxgpt.errors import UserError, first_line
from jaxgpt.experiment import ParallelConfig
from jaxgpt.parallel.jax_setup import TPU_DEVICES

HEARTBEAT = 30  # seconds of silence after which a process counts as lost and the others end
SHUTDOWN = 300  # seconds that a finished process waits for the others: process 0 still writes a sample
LINGER = 3  # seconds that process 0 waits before it ends, so that the others can read its last message
STUCK = 600  # seconds without progress after which a process is ended: to compile, to validate and to save take less
WEEK = 7 * 24 * 3600 * 1000  # in ms: the longest wait for another process. If that is lost, JAX ends this one


def initialize(config: ParallelConfig) -> None:
    """Connect to the other processes, if there are any. Call this before JAX starts a backend.

    JAX detects them on Cloud TPU, GKE, SLURM and Open MPI. Elsewhere, `config.coordinator` is the address of process 0.
    Raises `UserError` if they cannot connect. Ends the process if they do not all come within `config.connect_timeout`.
    """
    address, seconds = config.coordinator, config.connect_timeout
    if jax.distributed.is_initialized() or (address is None and cluster() is None):
        return
    host, _, port = (address or "HOST:0").rpartition(":")
    if not (host and port.isdecimal()):
        raise UserError(f"parallel.coordinator={address!r}: needs HOST:PORT of process 0, such as 10.0.0.2:8476")
    where = address or f"the coordinator that {cluster()} names"

    def give_up() -> None:
        os.write(2, f"jaxgpt: the processes did not all meet at {where} within {seconds:.0f} s\n".encode())
        os._exit(2)  # the call that waits for the others cannot be interrupted

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
            initialization_timeout=seconds + 60,  # then JAX aborts with a stack dump. The timer is earlier
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except Exception as e:  # whatever the cluster's own library raises
        raise UserError(f"the processes could not meet at {where}: {first_line(e)}") from None
    finally:
        timer.cancel()


def cluster() -> str | None:
    """Return the name of the environment that started this process with others, or None if there are no others."""
    env = os.environ
    if "OMPI_MCA_orte_hnp_uri" in env and int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return "Open MPI"
    # Variables of a SLURM step, set by srun: sbatch without it, or an interactive shell, runs one process.
    if "SLURM_STEP_NODELIST" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        return "SLURM"
    if "," in env.get("TPU_WORKER_HOSTNAMES", ""):
        return "GKE"
    if any(map(glob.glob, TPU_DEVICES)) and importlib.util.find_spec("libtpu") and "TPU_SKIP_MDS_QUERY" not in env:
        return "Cloud TPU"  # a slice of one or more hosts, listed by the metadata server
    return None


def is_multiprocess() -> bool:
    """Return whether the run has more than one process."""
    return jax.process_count() > 1


def is_process_0() -> bool:
    """Return whether this process is the one that logs and writes files."""
    return jax.process_index() == 0


_asked = itertools.count()  # equal in all processes, which make the same calls in the same order


def _store() -> Any:
    """Return the client of JAX's key-value store, which is in process 0's memory, and has no public name.

    `jax.experimental.multihost_utils` communicates through devices, which may hang.
    """
    from jax._src import distributed

    return distributed.global_state.client


def _exchange(words: str) -> list[str]:
    """Return the words of all processes, in their order. They must make these calls in the same order."""
    key, store = f"jaxgpt/exchanged/{next(_asked)}", _store()
    store.key_value_set(f"{key}/{jax.process_index()}", words)
    return [store.blocking_key_value_get(f"{key}/{process}", WEEK) for process in range(jax.process_count())]


def exit_now(status: int) -> NoReturn:
    """End this process at once: a normal exit would wait for the others."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed stream must not keep the process from ending
            stream.flush()
    if is_multiprocess() and is_process_0():
        time.sleep(LINGER)
    os._exit(status)


@contextlib.contextmanager
def raise_on_all() -> Iterator[None]:
    """Raise the `UserError` of any process in all of them, once each has come to the end of the context."""
    if not is_multiprocess():
        yield
        return
    words = ""
    try:
        yield
    except UserError as e:
        words = str(e)
    others = _exchange(words)
    if said := words or next(filter(None, others), ""):
        # Each waits until all have read it. One that does not come hangs, or has ended.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _store().wait_at_barrier(f"jaxgpt/read/{next(_asked)}", HEARTBEAT * 1000)
        raise UserError(said)


def on_process_0(function: Callable[[], int]) -> int:
    """Call `function` in process 0 and return its result, an integer, in all processes, or raise its `UserError`.

    All processes must make these calls, in the same order.
    """
    found = 0
    with raise_on_all():
        if is_process_0():
            found = function()
    return int(_exchange(str(found))[0]) if is_multiprocess() else found


@contextlib.contextmanager
def watch_progress() -> Iterator[Callable[[], None]]:
    """Yield a function that, once it is called, ends the process unless it is called again within STUCK seconds.

    The stacks of all threads are printed, and the others end as if the process had died. A single process is never ended.
    """
    if not is_multiprocess():
        yield lambda: None
        return
    try:
        yield lambda: faulthandler.dump_traceback_later(STUCK, exit=True, file=2)
    finally:
        faulthandler.cancel_dump_traceback_later()


def whole_everywhere() -> jax.sharding.Sharding:
    """Return the sharding of an array of which each process holds a full copy."""
    if is_multiprocess():
        return NamedSharding(Mesh(np.asarray(jax.devices()), "devices"), PartitionSpec())
    return SingleDeviceSharding(jax.local_devices()[0])


def one_copy(tree: Any) -> Any:
    """Return the first of this process's copies of each array. Nothing is moved."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)
