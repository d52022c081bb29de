"""Connect and watch several processes, and compare the copies of a state.

If a collective fails or hangs, all processes are in the same call. Each then says in process 0's key-value store how far
it has come: those that say nothing are gone, and those furthest behind are stuck. A run in one process is never ended:
whatever delays its step may pass, and nobody else waits for it.
"""

import contextlib
import ctypes
import faulthandler
import importlib.util
import itertools
import json
import math
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxgpt.config import ParallelConfig
from jaxgpt.errors import RaisedOnAllProcesses, UserError, first_line, shell_line

HEARTBEAT = 30  # seconds of silence after which a process counts as lost and the others end
SHUTDOWN = 300  # seconds that a finished process waits for the others: process 0 still writes a sample
LINGER = 3  # seconds that process 0 waits before it ends, so that the others can read its last message
STEPS = 20  # durations of a median step without progress after which a run is stuck
SLOW = 10  # factor of the limit during a slow operation, such as a save or a first validation, which compiles
INTERVAL = 1.0  # seconds between two looks of the watchdog
GRACE = 5  # intervals in which every process that is not gone says how far it has come


class ProcessLost(RuntimeError):
    """Another process has ended or hangs: the progress since the last checkpoint is lost."""

    def __init__(self, words: str, status: int = 1):
        """Take the message and the exit status: 2 if the other process raised `UserError`."""
        super().__init__(words)
        self.status = status


def initialize(config: ParallelConfig) -> None:
    """Connect to the other processes, if there are any. Call this before JAX starts a backend.

    JAX detects them on Cloud TPU, GKE, SLURM and Open MPI. Elsewhere, `config.coordinator` is the address of process 0.
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
        remedy = "start each with the same --parallel.processes, where it can reach that address"
        os.write(2, f"jaxgpt: the processes did not all meet at {where} within {seconds:.0f} s: {remedy}\n".encode())
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
            initialization_timeout=seconds + 60,  # then JAX aborts with a stack dump. The timer is earlier
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except Exception as e:  # whatever the cluster's own library raises
        remedy = "Start each of them. For a single process, unset the variables that name the others."
        raise UserError(f"the processes could not meet at {where}: {first_line(e)}. {remedy}") from None
    finally:
        timer.cancel()


def cluster() -> str | None:
    """Return the name of the environment that started this process with others, or None if there are no others."""
    env = os.environ

    def count(name: str) -> int:
        value = env.get(name, "1")
        if not value.isdecimal():
            raise UserError(f"{name}={value!r}: set a whole number of processes, or unset it if this process is alone")
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


_asked = itertools.count()  # equal in all processes, which make the same calls in the same order


def _store() -> Any:
    """Return the client of JAX's key-value store, in process 0's memory. Its calls raise `JaxRuntimeError` without it.

    JAX has no public name for it, and `jax.experimental.multihost_utils` communicates through devices, which may hang.
    """
    from jax._src import distributed

    return distributed.global_state.client


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
        key = f"jaxgpt/leader/{next(_asked)}"
        if is_process_0():
            _store().key_value_set(key, words)
        else:  # A week: process 0 may take long. If it is lost, JAX ends this process.
            words = _store().blocking_key_value_get(key, 7 * 24 * 3600 * 1000)
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


class Watchdog:
    """End the process if `beat` is not called in time, or if another process has ended."""

    def __init__(self, seconds: float | None):
        """Set the minimum of `seconds` without progress after which a run is stuck. With None or 0 it never is."""
        self.directory: Path | None = None  # the run's, for the message on how to continue
        self.last_step: Callable[[], int | None] = lambda: None  # returns the step of the last checkpoint, if any
        self._least = seconds
        self.process, self.processes = jax.process_index(), jax.process_count()
        self.name = f"process {self.process} of {self.processes} (host {socket.gethostname()}, pid {os.getpid()})"
        self._turn = self._step = 0
        self._since = self._stepped = time.monotonic()
        self._durations: deque[float] = deque(maxlen=101)  # seconds of steps, from one beat to the next
        self._patience = 1
        self._over = threading.Event()

    def beat(self, step: int, *, slow: bool = False) -> None:
        """Record progress of the main thread. `slow`: what follows, such as a save, may take far longer than a step."""
        now = time.monotonic()
        if step != self._step:
            if self._turn:
                self._durations.append(now - self._stepped)
            self._stepped = now
        self._patience = SLOW if slow else 1
        self._since, self._step = now, step
        self._turn += 1

    def _publish(self, what: str, *value: Any) -> None:
        _store().key_value_set(f"jaxgpt/{what}/{self.process}", json.dumps(value), allow_overwrite=True)

    def _published(self, what: str) -> list[Any]:
        return [json.loads(value) for _, value in _store().key_value_dir_get(f"jaxgpt/{what}")]

    def _watch(self) -> None:
        asked = 0  # processes that look for a culprit
        while not self._over.wait(INTERVAL):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone: JAX ends this one
                for words, status in self._published("ended"):
                    self._end(words, status, stacks=words.startswith(self.name))
                # There is no limit before the first step is done, which includes compilation and connecting.
                typical = statistics.median([*self._durations] or [math.inf])
                idle = time.monotonic() - self._since
                if self._least and idle > self._patience * max(self._least, STEPS * typical):
                    gone, stuck = self.find_culprit()
                    self._end(f"{gone or stuck}: no progress for {idle:.0f} s, since step {self._step}", 1, stacks=True)
                if asked < (asked := len(self._published("turns"))):
                    self._publish("turns", self.process, self.name, self._turn)

    def find_culprit(self) -> tuple[str | None, str | None]:
        """Ask all processes how far they have come. Return messages on those that are gone, and on those that are stuck."""
        try:
            self._publish("turns", self.process, self.name, self._turn)
            time.sleep(GRACE * INTERVAL)
            turns = {process: (name, turn) for process, name, turn in self._published("turns")}
        except jax.errors.JaxRuntimeError:
            return f"process 0 of {self.processes} is gone: it does not answer", None
        if gone := [str(process) for process in range(self.processes) if process not in turns]:
            return f"process {', '.join(gone)} of {self.processes} {'are' if len(gone) > 1 else 'is'} gone", None
        least = min(turn for _, turn in turns.values())
        stuck = [name for name, turn in turns.values() if turn == least]
        if len(stuck) == len(turns):
            return None, f"all {self.processes} processes are stuck in the same collective"
        return None, f"{', '.join(stuck)} {'are' if len(stuck) > 1 else 'is'} stuck"

    def stop(self, words: str = "", status: int = 0) -> None:
        """Stop watching. The others end with `words` and `status`. If `words` is empty, they continue."""
        self._over.set()
        if words:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._publish("ended", words, status)

    def explain(self) -> tuple[str, int] | None:
        """Return (message, exit status) if a collective failed because another process has ended or is gone."""
        gone, _ = self.find_culprit()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for words, status in self._published("ended"):
                return words, status
        return None if gone is None else (gone, 1)

    def say(self, what: str) -> None:
        """Write a message to stderr, past Python's buffers: the main thread may hold their locks."""
        cursor = b"\x1b[?25h" if os.isatty(2) else b""  # show it again: a progress bar hides it
        with contextlib.suppress(OSError):  # stderr may be closed, or its disk full. The process must end anyway
            os.write(2, cursor + f"\njaxgpt: {self.words(what)}\n".encode())

    def words(self, what: str) -> str:
        """Return a message with the last checkpoint and how to continue."""
        saved = None
        with contextlib.suppress(Exception):
            saved = self.last_step()
        last = "There is no checkpoint" if saved is None else f"The last checkpoint is step {saved}"
        command = shell_line("jaxgpt", "train", "--run-dir", self.directory) if self.directory else ""
        return f"{what}. {last}." + (f" To continue, on every process: {command}" if command else "")

    def _end(self, what: str, status: int, *, stacks: bool) -> None:
        if stacks:
            faulthandler.dump_traceback(2, all_threads=True)
        self.say(what)
        self.stop(what, status)
        exit_now(status)


@contextlib.contextmanager
def watch(seconds: float | None) -> Iterator[Watchdog]:
    """Watch the calling thread inside the context, if there are other processes. Raises `ProcessLost` if one is lost."""
    dog = Watchdog(seconds)
    if not is_multiprocess():
        yield dog
        return

    def end(_: int) -> None:
        dog.say("another process is gone, or did not hear of this one: see above")
        os._exit(1)

    # JAX aborts this process when another is lost, which no option of its client prevents. Python's signal handlers run
    # later, in the main thread. This one runs immediately, in the aborting thread.
    set_handler: Any = ctypes.CDLL(None).signal if os.name == "posix" else lambda *_: None
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    before = set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    threading.Thread(target=dog._watch, name="watchdog", daemon=True).start()
    try:
        yield dog
    except RaisedOnAllProcesses:
        raise
    except BaseException as e:
        if isinstance(e, UserError):
            dog.stop(f"{dog.name} has ended: {first_line(e)}", 2)
        # The type of the error of a failed collective depends on the backend.
        elif isinstance(e, Exception) and (cause := dog.explain()):
            dog.stop(*cause)
            raise ProcessLost(dog.words(cause[0]), cause[1]) from None
        else:
            dog.stop(f"{dog.name} has ended: {type(e).__name__}: {e}".splitlines()[0], 1)
        raise
    finally:
        dog.stop()
        set_handler(signal.SIGABRT, before)


def whole_everywhere() -> jax.sharding.Sharding:
    """Return the sharding of an array of which each process holds a full copy."""
    if is_multiprocess():
        return NamedSharding(Mesh(np.asarray(jax.devices()), "devices"), PartitionSpec())
    return SingleDeviceSharding(jax.local_devices()[0])


def one_copy(tree: Any) -> Any:
    """Return the first of this process's copies of each array. Nothing is moved."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)
