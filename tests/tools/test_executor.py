"""Tasks elsewhere: the same bytes as here, whoever is killed, and one line where none can run."""

import os
import random
import signal
import time

import pytest

from jaxgpt.errors import UserError
from jaxgpt.runs.directory import CLAIM, STALE, lock_run
from jaxgpt.tools import executor as chapter
from jaxgpt.tools import grid
from jaxgpt.tools.executor import LocalProcesses, Workers, open_executor
from jaxgpt.tools.study import run_study
from jaxgpt.training import fit
from tests.faults.grid_kills import STUDY, read_results, run, two_nodes
from tests.helpers import needs, tiny_experiment

TWO = Workers(on="local:2")


def kill_self_once(sign):
    """A task whose first process is lost."""
    if not sign.exists():
        sign.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["NPROC"], len(os.sched_getaffinity(0))


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.numbers
def test_a_task_is_run_again_and_shares_the_machine_with_the_threads_of_the_first_process(tmp_path, monkeypatch):
    monkeypatch.setattr(chapter, "RETRIES", 1)
    with open_executor(TWO, tmp_path) as executor:
        found = executor.submit(kill_self_once, tmp_path / "sign").result()
        lost = executor.submit(kill_self)
        assert found == (str(chapter.count_threads()), max(1, len(os.sched_getaffinity(0)) // 2))
        with pytest.raises(UserError, match="its process was ended 2 times, for lack of memory"):
            lost.result()


@pytest.mark.slow
@pytest.mark.numbers
def test_ctrl_c_ends_the_tasks(tmp_path):
    began = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt, match="Run the same command to resume"),
        open_executor(TWO, tmp_path) as executor,
    ):
        slow = executor.submit(time.sleep, 60)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        slow.result()
    assert time.monotonic() - began < 30 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("on", ["lcoal:2", "local", "local:0", "ray:HOST"])
def test_what_is_no_place_for_tasks(on):
    with pytest.raises(UserError, match=f"--on {on}: needs local:N"):
        Workers(on=on)


def test_too_few_gpus(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert LocalProcesses(TWO)._gpus == ["3", "4"]
    with pytest.raises(UserError, match="--on local:2 needs 4 GPUs, and this machine has 2"):
        LocalProcesses(Workers(on="local:2", gpus=2))


@pytest.mark.slow
@pytest.mark.numbers
def test_what_another_process_trains_is_passed_over_and_a_stale_lock_is_named(tmp_path, text_file):
    variants, said = {name: tiny_experiment(text_file, steps=2) for name in ("a", "b")}, []
    lock = lock_run(tmp_path / "b/seed-0", fresh=False, name=CLAIM)
    assert run_study(variants, tmp_path, seeds=1, say=said.append) is None
    assert f"passed over, {tmp_path}/b/seed-0 is being trained by another process (process {os.getpid()} on" in said[1]
    assert said[2] == "other processes train 1 of 2 runs: the last one to end has the result"
    then = time.time() - 2 * STALE
    os.utime(tmp_path / "b/seed-0" / CLAIM, (then, then))
    run_study(variants, tmp_path, seeds=1, say=said.append)
    assert f"it has written nothing for 2.0 hours: if it is gone, delete {tmp_path}/b/seed-0/.claim" in said[-2]
    lock.release()
    assert run_study(variants, tmp_path, seeds=1).seeds == 1 and (tmp_path / "study.json").exists()


def test_a_run_that_fails_does_not_end_the_others_and_is_in_the_table(tmp_path, text_file, monkeypatch):
    variants, said = {name: tiny_experiment(text_file, steps=2) for name in ("a", "b")}, []

    def fail(experiment, directory, **how):
        if directory.parent.name == "b":
            raise RuntimeError("out of memory\nand more")
        return fit(experiment, directory, **how)

    monkeypatch.setattr(grid, "fit", fail)
    found = run_study(variants, tmp_path, seeds=1, say=said.append)
    assert found.tokens.rows[1].verdict == "1 of 1 failed"
    assert said[1].startswith("seed 0, b: out of memory [####################] 2 of 2 done, 0 running, 1 failed")
    with pytest.raises(RuntimeError):  # the first one: a mistake in all of them
        run_study(dict(reversed(variants.items())), tmp_path, seeds=1)


@pytest.fixture(scope="module")
def studied(tmp_path_factory, text_file):
    """A folder with a study of an experiment of its own, and what one process finds."""
    folder = tmp_path_factory.mktemp("grid")
    (folder / "own.py").write_text(STUDY.format(text=str(text_file)))
    assert run("study own.py --seeds 1 --run-dir alone", folder, None, 0, random.Random(0)) == (0, "")
    return folder, read_results(folder / "alone")


@pytest.mark.slow
@pytest.mark.numbers
def test_two_processes_that_are_killed_find_the_same_bytes(studied):
    folder, expected = studied
    kills, said = run("study own.py --seeds 1 --run-dir two", folder, "local:2", 2, random.Random(1))
    assert said == "" and read_results(folder / "two") == expected and kills


@pytest.mark.slow
@pytest.mark.numbers
@needs("ray", "ray")
def test_a_ray_cluster_that_loses_a_node_finds_the_same_bytes(studied):
    folder, expected = studied
    how = random.Random(2)
    with two_nodes(12) as address:
        kills, said = run("study own.py --seeds 1 --run-dir ray", folder, "ray", 1, how, RAY_ADDRESS=address)
        assert said == "" and read_results(folder / "ray") == expected and kills
        _, said = run("study own.py --seeds 1 --run-dir no --gpus 1", folder, "ray", 0, how, RAY_ADDRESS=address)
    assert "a run needs 1 CPU, 1 GPU of one node, and no node has them" in said


def test_a_node_of_another_version_is_refused_by_name(monkeypatch):
    with pytest.raises(UserError, match=r"has another version \(jax .*, here 0.1\): install the same"):
        chapter._run_there("/", chapter._versions() | {"jax": "0.1"}, os.getpid, ())
