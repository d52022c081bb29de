"""What a run logs about its speed."""

import itertools
from types import SimpleNamespace

import pytest

import jaxgpt.runs.log
from jaxgpt.parallel.device import PEAKS
from jaxgpt.runs.log import Clock, RunLog
from jaxgpt.runs.metrics import read_metrics
from tests.helpers import tiny_experiment


def test_the_rate_and_the_mfu(text_file, tmp_path, monkeypatch):
    """Tokens since the last line over its seconds; of what 8 devices of 1 TFLOP/s could do. Callbacks get each line."""
    monkeypatch.setattr(jaxgpt.runs.log, "device_kind", lambda: "a device")
    monkeypatch.setitem(PEAKS, "a device", SimpleNamespace(flops=1e12))
    monkeypatch.setattr(jaxgpt.runs.log, "train_flops_per_token", lambda *_: 1e6)
    trainer = SimpleNamespace(parameters=(), strategy=SimpleNamespace(devices=range(8)))
    training = SimpleNamespace(
        metrics=tmp_path / "metrics.jsonl",
        experiment=tiny_experiment(text_file, batch_size=16, log_every=2),
        trainer=trainer,
    )
    seen = []
    log = RunLog(training, 3, [seen.append], show=False)
    log.clock = SimpleNamespace(working=itertools.count(0.0, 0.25).__next__, total=lambda: 7.0)
    log({"step": 4, "compiled": 60.0})
    for step in range(4, 9):
        log({"step": step, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == seen
    first, *rest = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["tokens_per_second"], first["mfu"]) == (4, None, None)  # compilation
    assert [(x["step"], x["tokens"], x["seconds"]) for x in rest] == [(n, n * 16 * 8, 7.0) for n in (6, 8)]
    for line in rest:
        assert line["tokens_per_second"] == 2 * 16 * 8 / 0.25
        assert line["mfu"] == pytest.approx(1024 * 1e6 / 8e12)


def test_a_clock_goes_on_from_the_sessions_before_and_leaves_out_pauses(monkeypatch):
    now = iter([10.0, 12.0, 15.0, 16.0, 16.0])  # made; a pause from 12 to 15; asked twice
    monkeypatch.setattr(jaxgpt.runs.log.time, "monotonic", now.__next__)
    clock = Clock(100.0)
    with clock.paused():
        pass
    assert (clock.total(), clock.working()) == (106.0, 103.0)
