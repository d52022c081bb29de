"""Give tasks to processes of this machine, or to a Ray cluster: only this module knows which.

A task is a function that can be imported, with arguments that can be pickled. It runs again if its process or node is
lost. All compute with as many threads as this process would, because XLA's sums depend on their number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import logging
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxgpt.config.serialize import Checked
from jaxgpt.config.validate import NonNegativeInt, PositiveInt
from jaxgpt.errors import UserError, first_line
from jaxgpt.runs.bucket import address_of

RETRIES = 5  # how often a task is run again whose process or node was lost
PATIENCE = 60  # seconds for a run to save when it is stopped, and for a node to answer
# Environment variables that a cluster's workers get: they decide what is computed, and where it is looked for.
CARRIED = re.compile("(JAX|JAXGPT|XLA|HF)_.*|AWS_ENDPOINT_URL|STORAGE_EMULATOR_HOST")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workers(Checked):
    """Where tasks run, and what each of them takes."""

    # local:N is N processes of this machine, ray a cluster (RAY_ADDRESS, or one that is started here), ray://HOST:10001
    # another one. None means here
    on: str | None = None
    cpus: PositiveInt = 1  # cores of a cluster for each task
    gpus: NonNegativeInt | None = None  # GPUs for each task. None means one with local:N, where there are any
    tpus: NonNegativeInt = 0  # TPU chips of a cluster for each task

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on is not None and not re.fullmatch(r"local:[1-9]\d{0,3}|ray|ray://\S+:\d+", self.on):
            raise UserError(f"--on {self.on}: needs local:N with a number of processes, ray, or ray://HOST:PORT")


@contextlib.contextmanager
def open_executor(workers: Workers, place: Path) -> Iterator[Executor | None]:
    """Open the executor that `workers.on` names, None for this process. Ctrl-C and SIGTERM stop its tasks.

    place: a folder of results, which all machines must see.
    """
    if workers.on is None:
        yield None
        return
    before = None
    with contextlib.suppress(ValueError):  # in another thread than the first, which alone handles signals
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    executor = LocalProcesses(workers) if workers.on.startswith("local:") else RayCluster(workers, place)
    try:
        yield executor
    except KeyboardInterrupt:
        executor.stop()
        raise KeyboardInterrupt("interrupted: what was running has saved. Run the same command to resume.") from None
    finally:
        executor.stop()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def count_threads() -> int:
    """Return the number of threads that XLA uses in this process: as many as it has cores, unless NPROC is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(os.environ.get("NPROC") or cores)


class LocalProcesses:
    """Processes of this machine. A thread for each starts another one if it is lost."""

    def __init__(self, workers: Workers) -> None:
        """Start no process yet. Raises `UserError` if there are too few GPUs."""
        self.size = int(str(workers.on).removeprefix("local:"))
        found = ",".join(str(n) for n, _ in enumerate(glob.glob("/dev/nvidia[0-9]*")))
        named = "" if os.environ.get("JAX_PLATFORMS") == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", found)
        gpus = [name for name in named.split(",") if name]
        each = min(1, len(gpus)) if workers.gpus is None else workers.gpus
        if each * self.size > len(gpus):
            raise UserError(f"--on {workers.on} needs {each * self.size} GPUs, and this machine has {len(gpus)}")
        self._gpus = [",".join(gpus[n * each : (n + 1) * each]) for n in range(self.size)]
        self._numbers, self._own, self._is_stopped = itertools.count(), threading.local(), False
        self._threads, self._others = ThreadPoolExecutor(self.size), multiprocessing.active_children()

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        """Run a task in the next free process."""
        return self._threads.submit(self._run, function, *args)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        own, lost = self._own, 0
        if not hasattr(own, "number"):
            own.number, own.pool = next(self._numbers), None
        while lost <= RETRIES and not self._is_stopped:
            if own.pool is None:
                context = multiprocessing.get_context("spawn")  # a fork copies locks that other threads hold
                share = own.number, self.size, self._gpus[own.number], count_threads()
                own.pool = ProcessPoolExecutor(1, context, _begin_process, share)
            try:
                return own.pool.submit(function, *args).result()
            except BrokenProcessPool:
                lost, own.pool = lost + 1, None
        raise UserError(f"its process was ended {lost} times, for lack of memory? Give fewer processes")

    def stop(self) -> None:
        """Drop the tasks that wait, and end the processes by SIGTERM, at which a run saves."""
        self._is_stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        processes = [process for process in multiprocessing.active_children() if process not in self._others]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(PATIENCE)
            process.kill()
        self._threads.shutdown()


def _begin_process(number: int, of: int, gpus: str, threads: int) -> None:
    """Give a new process its share of the machine, keep the terminal's Ctrl-C from it, and end it with its parent."""
    os.setsid()
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number::of] or cores)
    os.environ |= {"NPROC": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus

    def leave() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()  # returns even if it was killed
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


class RayCluster:
    """A Ray cluster. It places the tasks, and runs them again if a process or a node is lost."""

    def __init__(self, workers: Workers, place: Path) -> None:
        """Connect. Raises `UserError` if there is no cluster, or if a node of it cannot run the tasks."""
        try:
            import ray
            import ray.exceptions
            import ray.util.scheduling_strategies
        except ImportError:
            raise UserError(f"--on {workers.on} needs Ray: python -m pip install 'jaxgpt[ray]'") from None
        self._ray, self._running = ray, set[Any]()
        carried = {name: value for name, value in os.environ.items() if CARRIED.fullmatch(name)}
        carried |= {"NPROC": str(count_threads()), "TOKENIZERS_PARALLELISM": "false"}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here reports to nobody
        try:
            address = None if workers.on == "ray" else workers.on
            ray.init(address, runtime_env={"env_vars": carried}, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as e:  # no such address, no token, or another version of Ray or Python
            raise UserError(f"--on {workers.on} finds no Ray cluster to connect to: {first_line(e)}") from None
        needs = {"CPU": workers.cpus, "GPU": workers.gpus or 0, "TPU": workers.tpus}
        needs = {name: count for name, count in needs.items() if count}
        chips = {"TPU": workers.tpus} if workers.tpus else {}
        how: dict[str, Any] = {"num_cpus": workers.cpus, "num_gpus": workers.gpus, "resources": chips}
        self._task, self._here = ray.remote(**how, max_retries=RETRIES)(_run_there), (os.getcwd(), _versions())
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self.size = sum(min(int(node["Resources"].get(x, 0) // n) for x, n in needs.items()) for node in nodes)
        try:
            if not self.size:
                said = ", ".join(f"{n} {name}" for name, n in needs.items())
                raise UserError(f"a run needs {said} of one node, and no node has them: it could never start")
            if address_of(place) is None:
                self._check_nodes(nodes, place.absolute())
        except UserError:
            ray.shutdown()
            raise

    def _check_nodes(self, nodes: list[dict[str, Any]], place: Path) -> None:
        """Raise `UserError` for a node without the packages, with other versions, or without a view of the place."""
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".seen-") as sign:
            for node in nodes:
                at = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = self._task.options(num_cpus=0, num_gpus=0, resources={}, max_retries=1, scheduling_strategy=at)
                try:
                    is_seen = self._ray.get(task.remote(*self._here, os.path.exists, (sign.name,)), timeout=PATIENCE)
                except self._ray.exceptions.TaskUnschedulableError:  # it has just gone
                    continue
                except Exception as e:
                    raise UserError(f"node {node['NodeManagerHostname']} cannot run a task: {_reason(e)}") from None
                if not is_seen:
                    remedy = "several machines need a folder that all of them see, or a bucket"
                    raise UserError(f"node {node['NodeManagerHostname']} does not see {place}: {remedy}")

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        """Run a task on some node."""
        found, ref = Future[Any](), self._task.remote(*self._here, function, args)
        found.set_running_or_notify_cancel()
        self._running.add(ref)

        def settle(done: Future) -> None:
            self._running.discard(ref)
            error = done.exception()
            if error is None:
                found.set_result(done.result())
            else:
                found.set_exception(UserError(_reason(error)))

        ref.future().add_done_callback(settle)
        return found

    def stop(self) -> None:
        """Interrupt the tasks that run, at which a run saves, drop the others, and disconnect."""
        running = list(self._running)
        for ref in running:
            self._ray.cancel(ref)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=PATIENCE)
        self._ray.shutdown()


Executor = LocalProcesses | RayCluster


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("jaxgpt", "jax", "jaxlib")}


def _run_there(folder: str, versions: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a task on a node, in the first process's working directory, if the node has its versions."""
    wrong = [f"{name} {has}, here {versions[name]}" for name, has in _versions().items() if has != versions[name]]
    if wrong:
        raise UserError(f"{socket.gethostname()} has another version ({'; '.join(wrong)}): install the same")
    os.chdir(folder)
    return function(*args)


def _reason(error: BaseException) -> str:
    """Return the last line of an error of a task, the original one if Ray wraps it."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]


def train_on_ray(workers: Workers, hosts: int, tpu_slice: str | None) -> None:
    """Repeat this process's `jaxgpt train` on each of several hosts, in this folder, which all see. Raises `UserError`.

    workers: the cluster, and the cores and GPUs of each host. tpu_slice: TPU-V6E:4x4, for example, whose hosts they are.
    """
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # with it, what a worker says comes twice
    try:
        import ray
        from ray.train.v2.api.config import RunConfig, ScalingConfig
        from ray.train.v2.jax import JaxConfig, JaxTrainer
    except ImportError:
        raise UserError("--on ray needs Ray: python -m pip install 'jaxgpt[ray]'") from None
    folder, words = os.getcwd(), sys.argv[1:] if sys.argv[1:2] == ["train"] else ["train", *sys.argv]

    def repeat() -> None:
        os.chdir(folder)
        sys.argv = ["jaxgpt", *words, "--on", "None", "--hosts", "None"]
        runpy.run_module("jaxgpt", run_name="__main__")

    gpus = workers.gpus or 0
    if tpu_slice:
        kind, _, topology = tpu_slice.partition(":")
        scale = ScalingConfig(num_workers=hosts, use_tpu=True, accelerator_type=kind, topology=topology)
    else:
        each = {"CPU": workers.cpus, "GPU": gpus}
        scale = ScalingConfig(num_workers=hosts, use_gpu=gpus > 0, resources_per_worker=each)
        scale.placement_strategy = "SPREAD"
    meet = JaxConfig(use_tpu=bool(tpu_slice), use_gpu=not tpu_slice)  # which goes by the platform's name, a CPU's too
    platform = {} if gpus or tpu_slice else {"JAX_PLATFORMS": "cpu"}
    how = RunConfig(storage_path="/tmp/ray", worker_runtime_env={"env_vars": platform})
    try:
        ray.init(None if workers.on == "ray" else workers.on)
        JaxTrainer(repeat, jax_config=meet, scaling_config=scale, run_config=how).fit()
    except Exception as e:
        raise UserError(f"training on Ray failed: {first_line(e)}") from e
