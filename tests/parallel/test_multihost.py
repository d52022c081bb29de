"""Several processes on one machine, with real jax.distributed: the same curve, and an end in bounded time."""

import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax._src import distributed
from jaxlib import _jax

from jaxgpt.errors import UserError
from jaxgpt.experiment import ParallelConfig
from jaxgpt.parallel import multihost
from jaxgpt.run import load
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import read_metadata
from jaxgpt.runs.metrics import read_metrics
from tests.conftest import REPOSITORY
from tests.helpers import check_command, run_command
from tests.parallel.eight_devices import CURVES_EQUAL

OPTIONS = """--model.n-layer 1 --model.n-head 4 --model.n-embd 16 --model.block-size 16 --model.vocab-size 48
    --optim.warmup-steps 2 --train.batch-size 16 --train.log-every 1 --train.eval-every 10 --train.sample-tokens 5""".split()
DEADLINE = 240  # seconds, after which a process is killed


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def start(tmp_path, text_file):
    """Starts the processes of one run; whatever is left of them at the end is killed."""
    started = []

    def start(processes, devices, *options, planted=""):
        """planted: Python that each process runs first."""
        port = free_port()
        program = f"{planted}\nfrom jaxgpt.__main__ import main; main()"
        for i in range(processes):
            who = ["--parallel.coordinator", f"127.0.0.1:{port}", "--parallel.processes", str(processes)]
            who += ["--parallel.process-id", str(i), "--run-dir", "run"]
            env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(REPOSITORY)}
            argv = [sys.executable, "-c", program, "train", "--data.path", str(text_file), *OPTIONS, *who, *options]
            with (tmp_path / f"{i}.err").open("w") as err:
                started.append(
                    subprocess.Popen(argv, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=err, stderr=err)
                )
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait(processes, tmp_path):
    """Exit codes and what each said."""
    deadline = time.monotonic() + DEADLINE
    codes = [p.wait(max(1, deadline - time.monotonic())) for p in processes]
    return codes, [(tmp_path / f"{i}.err").read_text() for i in range(len(processes))]


def curve(directory):
    lines = read_metrics(directory / "metrics.jsonl")
    return [x["loss"] for x in lines if "loss" in x], [x["val_loss"] for x in lines if "val_loss" in x]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, text_file):
    directory = tmp_path_factory.mktemp("alone")
    check_command(
        *["-m", "jaxgpt", "train", "--data.path", str(text_file), *OPTIONS, "--train.steps", "20", "--run-dir", "run"],
        cwd=directory,
    )
    return directory / "run"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pmap", "mesh --parallel.fsdp 4 --parallel.tensor 2"])
def test_two_processes_of_four_devices_are_one_run(start, alone, tmp_path, strategy):
    codes, said = wait(start(2, 4, "--train.steps", "20", "--parallel.strategy", *strategy.split()), tmp_path)
    assert codes == [0, 0], said
    for expected, found in zip(curve(alone), curve(tmp_path / "run"), strict=True):
        np.testing.assert_allclose(found, expected, **CURVES_EQUAL)
    assert "next: jaxgpt sample run" in said[0]
    assert read_metadata(tmp_path / "run").experiment.parallel.coordinator is None  # it may go on alone
    assert not any(word in said[1] for word in ("parameters", "val", "done in", "next:"))  # only the first one speaks
    ours, theirs = (load(d).params["h_0"]["mlp"]["c_fc"]["kernel"] for d in (tmp_path / "run", alone))
    np.testing.assert_allclose(ours, theirs, **CURVES_EQUAL)


FOREVER = ["--train.steps", "100000", "--train.eval-every", "100000", "--train.checkpoint-every", "5"]


def until_step(number, processes, tmp_path):
    """And until something is saved."""
    deadline, saved = time.monotonic() + DEADLINE, Checkpoints(tmp_path / "run" / "checkpoints").steps
    while len(read_metrics(tmp_path / "run" / "metrics.jsonl")) < number or not saved():
        assert time.monotonic() < deadline and processes[0].poll() is None, (tmp_path / "0.err").read_text()
        time.sleep(0.2)


BOUND = multihost.HEARTBEAT + 30  # seconds: JAX looks now and then, and a busy machine is slow


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_one_that_is_killed_ends_the_other(start, tmp_path, lost):
    """Process 0 holds the store that all read."""
    processes = start(2, 1, *FOREVER)
    until_step(7, processes, tmp_path)
    processes[lost].kill()
    assert processes[1 - lost].wait(BOUND) != 0 and processes[lost].wait() == -signal.SIGKILL


HANGS = """
import sys
from jaxgpt.parallel import multihost
from jaxgpt.parallel.profile import StepProfiler
take = StepProfiler.take
def hanging_take(self, step, *arguments):
    if step == 6:  # by now all is compiled
        multihost.STUCK = 8
    if step == 8 and "{process}" in sys.argv[sys.argv.index("--parallel.process-id") + 1]:
        {what}
    return take(self, step, *arguments)
StepProfiler.take = hanging_take
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_one_whose_main_thread_sleeps_ends_both_and_shows_where(start, tmp_path, lost):
    """JAX would wait for ever, and the other one hangs in the exchange."""
    processes = start(2, 1, *FOREVER, planted=HANGS.format(process=lost, what="import time; time.sleep(10000)"))
    until_step(5, processes, tmp_path)
    assert all(process.wait(BOUND) != 0 for process in processes)
    said = (tmp_path / f"{lost}.err").read_text()
    assert "Timeout (0:00:08)!" in said and "hanging_take" in said


@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), [("ValueError", 1), ("jaxgpt.UserError", 2)])
def test_an_error_of_one_process_in_a_step_ends_the_other(start, tmp_path, error, status):
    """The one that has it says what it is."""
    what = f'import jaxgpt; raise {error}("planted")'
    processes = start(2, 1, *FOREVER, planted=HANGS.format(process=1, what=what))
    codes, said = wait(processes, tmp_path)
    assert codes[1] == status and codes[0] != 0
    assert "planted" in said[1] and ("Traceback" in said[1]) == (status == 1)


REFUSES = """
import jax
import jaxgpt.training
from jaxgpt.errors import UserError
from jaxgpt.parallel import multihost

def taken():
    raise UserError("this run directory is taken")

def refuses(*_):
    assert multihost.on_process_0(lambda: 7 if multihost.is_process_0() else 0) == 7
    if {agreed}:
        multihost.on_process_0(taken)
    elif jax.process_index() == {who}:
        taken()

jaxgpt.training.is_resumable = refuses
"""


@pytest.mark.slow
@pytest.mark.parametrize(("who", "agreed"), [(0, True), (1, False)])
def test_what_one_refuses_ends_all_with_its_line(start, tmp_path, who, agreed):
    codes, said = wait(start(2, 1, *FOREVER, planted=REFUSES.format(who=who, agreed=agreed)), tmp_path)
    assert codes == [2, 2]
    for words in said:
        assert "this run directory is taken" in words and "Traceback" not in words
    assert not (tmp_path / "run").exists()


def test_nobody_there(tmp_path):
    told = f"--parallel.coordinator 127.0.0.1:{free_port()} --parallel.processes 2 --parallel.process-id 0".split()
    done = run_command("-m", "jaxgpt", "train", *told, "--parallel.connect-timeout", "1", cwd=tmp_path, deadline=60)
    assert done.returncode == 2 and f"did not all meet at {told[1]} within 1 s" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


def test_the_store_of_jax_is_where_it_was():
    """Private: seen with JAX 0.10.0 to 0.12.0.1. There is no public way to the store of `jax.distributed`."""
    client = distributed.global_state.client
    assert client is None, "one process has no store"
    for name in ("key_value_set", "blocking_key_value_get", "wait_at_barrier"):
        assert callable(getattr(_jax.DistributedRuntimeClient, name)), f"not in JAX {jax.__version__}"


def test_the_leader_tells_a_whole_number_or_what_is_wrong():
    def refuses():
        raise UserError("no: taken")

    assert multihost.on_process_0(lambda: 7) == 7
    with pytest.raises(UserError):
        multihost.on_process_0(refuses)
    with pytest.raises(UserError, match="needs HOST:PORT"):
        multihost.initialize(ParallelConfig(coordinator="nowhere", processes=2, process_id=1))


def test_what_started_us(monkeypatch):
    for env, expected in (
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, None),  # a job's shell, before srun
        ({"SLURM_STEP_NODELIST": "a[0-7]", "SLURM_NTASKS": "8"}, "SLURM"),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "1"}, None),
        ({"OMPI_MCA_orte_hnp_uri": "1;tcp://", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "GKE"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ):
        for name in [n for n in os.environ if n.startswith(("SLURM_", "OMPI_", "TPU_"))]:
            monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        assert multihost.cluster() == expected, env
