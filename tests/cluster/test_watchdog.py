"""Who is to blame when several processes stand still; a process that is alone may."""

import os
import time

import pytest

import jaxgpt
from jaxgpt import session
from jaxgpt.cli import train
from jaxgpt.cluster import watchdog
from jaxgpt.cluster.heartbeat import Heartbeat, find_stuck
from jaxgpt.config import Experiment, ParallelConfig


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
def test_a_process_that_is_alone_is_never_ended(as_command, monkeypatch):
    """Whatever delays a step may pass: a disk, a laptop that sleeps, a debugger."""
    exits = []

    def stuck_train(*values, **_):
        (dog,) = (value for value in values if isinstance(value, watchdog.Watchdog))
        for step in range(1, 5):
            dog.beat(step)
        time.sleep(0.5)
        raise Over

    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(watchdog, "INTERVAL", 0.02)
    monkeypatch.setattr(session, "_train", stuck_train)
    stuck_soon = Experiment(name="stuck", parallel=ParallelConfig(watchdog=0.05))
    with pytest.raises(Over):
        if as_command:
            train.train(experiment=stuck_soon)
        else:
            jaxgpt.fit(stuck_soon)
    assert exits == []


def test_the_last_words_do_not_need_a_stderr(monkeypatch):
    def closed(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(os, "write", closed)
    watchdog._say("stuck")
