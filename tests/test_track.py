"""Tracking: what reaches a service, once each, from a log that is written, cut off and written again."""

import json

import pytest

from jaxgpt.runs.metrics import read_metrics
from tests.helpers import script
from tests.tools.written_run import STEPS, write_run

module = script("track")
track = module.track


def write(path, *lines):
    """Append lines, or text as it is."""
    with path.open("a") as f:
        f.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


def replace(path, *lines):
    """Write a log anew, as a run does that resumes."""
    write(path.with_name("new"), *lines)
    path.with_name("new").replace(path)


def loss(step):
    return {"step": step, "loss": 1.0 / step, "mfu": None, "tokens_per_second": 100.0, "seconds": 0.5 * step}


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", trained=0)
    write(tmp_path / "run/metrics.jsonl", loss(1), loss(2), {"step": 2, "val_loss": 3.0})
    return tmp_path / "run"


def expected(directory):
    lines = read_metrics(directory / "metrics.jsonl")
    return sorted((line["step"], x, line[x]) for line in lines for x in module.SCALARS if line.get(x) is not None)


@pytest.fixture
def kept(monkeypatch):
    """What W&B gets: (step, scalar, value), and None when it is closed."""
    values = []

    def send(step, scalars, time):
        values.extend((step, name, value) for name, value in scalars.items())

    service = send, lambda: None, lambda: values.append(None)
    monkeypatch.setitem(module.SERVICES, "wandb", lambda *_: service)
    return values


def follow(run, monkeypatch, *events):
    """Track a run while the events happen, one between two looks; the run is complete with the last."""
    left = list(events)

    def sleep(seconds):
        left.pop(0)()
        if not left:
            (run / f"checkpoints/{STEPS}").mkdir(parents=True)

    monkeypatch.setattr(module.time, "sleep", sleep)
    return track(run, "wandb", follow=True)


def test_following_a_run_that_is_killed_and_resumed_sends_each_value_once(run, kept, monkeypatch):
    path = run / "metrics.jsonl"
    events = (
        lambda: write(path, loss(3)),
        lambda: replace(path, loss(1), loss(2)),
        lambda: write(path, *map(loss, (3, 4))),
    )
    follow(run, monkeypatch, *events)
    write(path, {"step": 4, "val_loss": 2.0})
    assert track(run, "wandb") == 1 and kept.pop() is None
    assert sorted(filter(None, kept)) == sorted([*expected(run), (2, "val_loss", 3.0)])
