"""Who is to blame when several processes stand still; a process that is alone may."""

import json
import os
import time

import pytest

from jaxgpt.parallel import multihost, watchdog


@pytest.mark.parametrize(
    ("turns", "processes", "expected"),
    [
        ({0: 9, 1: 9}, 2, (None, "all 2 processes are stuck in the same collective")),
        ({0: 9, 1: 7}, 2, (None, "process 1 is stuck")),
        ({0: 7, 1: 9, 2: 7}, 3, (None, "process 0, process 2 are stuck")),
        ({0: 9}, 2, ("process 1 of 2 is gone", None)),
        ({0: 9, 3: 9}, 4, ("process 1, 2 of 4 are gone", None)),
    ],
)
def test_who_is_silent_or_furthest_behind_is_to_blame(turns, processes, expected, monkeypatch):
    monkeypatch.setattr(watchdog, "INTERVAL", 0.0)
    monkeypatch.setattr(multihost, "publish", lambda key, value: None)
    said = [json.dumps([process, f"process {process}", turn]) for process, turn in turns.items()]
    monkeypatch.setattr(multihost, "read_published", lambda folder: said)
    dog = watchdog.Watchdog(60.0)
    dog.processes = processes
    assert dog.find_culprit() == expected


def test_a_process_that_is_alone_is_never_ended(monkeypatch):
    """Whatever delays a step may pass: a disk, a laptop that sleeps, a debugger."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(watchdog, "INTERVAL", 0.02)
    with watchdog.watch(0.05) as dog:
        for step in range(1, 5):
            dog.beat(step)
        time.sleep(0.3)
    assert exits == []


def test_the_last_words_do_not_need_a_stderr(monkeypatch):
    def closed(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(os, "write", closed)
    watchdog.Watchdog(60.0).say("stuck")
