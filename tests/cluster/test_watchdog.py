"""A run that stands still ends, and is told why; one that is suspended, or compiles, does not."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

import jaxgpt
from jaxgpt import session
from jaxgpt.cli import train
from jaxgpt.cluster import watchdog
from jaxgpt.cluster.heartbeat import Heartbeat, find_stuck
from jaxgpt.config import Experiment, ParallelConfig
from tests.conftest import REPOSITORY

LIMIT = 1.0  # seconds

# What a process of its own does: it beats, is suspended, compiles for longer than the limit, and hangs in the end.
PROGRAM = f"""
import os, signal, time
from pathlib import Path
import jax, jax.numpy as jnp
from jaxgpt.cluster import watchdog
watchdog.INTERVAL = 0.1
watchdog.ASLEEP = 5

def slow_to_compile(x):
    time.sleep(2 * {LIMIT})  # while it is traced
    return jnp.sin(x)

with watchdog.watch({LIMIT}) as dog:
    dog.directory, dog.last_step = Path("."), lambda: 12
    for step in range(1, 6):
        dog.beat(step)
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3 * {LIMIT})  # what is left of the step: the thread looks before the next beat
    dog.beat(6)
    began = time.monotonic()
    jax.jit(slow_to_compile).lower(jnp.ones((4, 4))).compile()
    print(time.monotonic() - began, flush=True)
    dog.beat(7, slow=True)
    time.sleep(2.5 * {LIMIT})
    dog.beat(8)
    print("still there", flush=True)
    def hangs():
        time.sleep(1000)
    hangs()
"""


@pytest.mark.slow
def test_only_a_run_that_stands_still_is_ended(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(3 * LIMIT)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, err
    compiled, *rest = out.split("\n")
    assert float(compiled) > 1.5 * LIMIT and rest[0] == "still there", err
    said = r"jaxgpt: this process is stuck: no progress for [12] s, since step 8\. The last checkpoint is step 12\. To "
    assert re.search(said + r"continue: jaxgpt train --run-dir \.\n", err)
    assert " in hangs" in err  # where it stood
    assert " in hangs" in (tmp_path / "stacks.0.txt").read_text()


def beat(process, turn, idle, limit=60.0, **rest):
    return Heartbeat(process=process, host="h", pid=process, turn=turn, idle=idle, limit=limit, **rest)


@pytest.mark.parametrize(
    ("heartbeats", "expected"),
    [
        ([beat(0, 9, 59)], []),
        ([beat(0, 9, 61)], [0]),
        ([beat(0, 1, 1e6, None)], []),  # the first step, which is compilation
        ([beat(0, 9, 61), beat(1, 9, 61)], [0, 1]),  # all in the same exchange
        ([beat(0, 9, 61), beat(1, 7, 61), beat(2, 9, 61)], [1]),
        ([beat(0, 7, 61), beat(1, 9, 61)], [0]),
        ([beat(0, 9, 600), beat(1, 7, 5)], []),  # the other one compiles: waiting for it is no fault
        ([beat(0, 9, 61), beat(1, 7, 61), beat(2, 7, 5)], []),
        ([beat(0, 9, 600), beat(1, 7, 100, 600)], []),  # or saves
        ([beat(0, 9, 61), beat(1, 3, 1e6, ended="")], [0]),  # who is done holds up nobody
    ],
)
def test_who_is_furthest_behind_is_to_blame(heartbeats, expected):
    assert [n.process for n in find_stuck(heartbeats)] == expected


class Over(Exception):
    """What the stuck training of a test raises in the end."""


@pytest.mark.parametrize("as_command", [False, True])
def test_only_the_process_of_a_command_is_ended_by_a_stuck_step(as_command, tmp_path, monkeypatch):
    """A program that calls `jaxgpt.fit` may be a notebook, or stand in a debugger."""
    exits = []

    def stuck_train(*values, **_):
        (dog,) = (value for value in values if isinstance(value, watchdog.Watchdog))
        dog.directory = tmp_path
        for step in range(1, 5):
            dog.beat(step)
        deadline = time.monotonic() + (10 if as_command else 0.3)
        while not exits and time.monotonic() < deadline:
            time.sleep(0.01)
        raise Over

    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(watchdog, "INTERVAL", 0.02)
    monkeypatch.setattr(session, "_train", stuck_train)
    monkeypatch.setattr(train, "configure_jax", lambda: None)
    stuck_soon = Experiment(name="stuck", parallel=ParallelConfig(watchdog=0.05))
    with pytest.raises(Over):
        if as_command:
            train.train(experiment=stuck_soon)
        else:
            jaxgpt.fit(stuck_soon)
    assert set(exits) == ({1} if as_command else set())
    assert (tmp_path / "stacks.0.txt").exists() == as_command


def test_the_last_words_do_not_need_a_stderr(monkeypatch):
    def closed(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(os, "write", closed)
    watchdog._say("stuck")
