"""What a run logs about its speed."""

import itertools
from types import SimpleNamespace

import pytest

import jaxgpt.runs.log
from jaxgpt.parallel.limits import PEAKS
from jaxgpt.runs.log import Clock, RunLog
from jaxgpt.runs.metrics import read_metrics
from tests.helpers import tiny_experiment


@pytest.mark.parametrize("quiet", [-1.0, 1e9])
def test_the_rate_and_the_mfu(text_file, tmp_path, monkeypatch, capsys, quiet):
    """Tokens since the last line over its seconds; of what 8 devices of 1 TFLOP/s could do. Callbacks get each line.

    Without a terminal a line is displayed where none was for QUIET seconds, also at a step that is not logged.
    """
    monkeypatch.setattr(jaxgpt.runs.log, "QUIET", quiet)
    monkeypatch.setitem(PEAKS, "a device", SimpleNamespace(flops=1e12))
    monkeypatch.setattr(jaxgpt.runs.log, "train_flops_per_token", lambda *_: 1e6)
    trainer = SimpleNamespace(
        parameters=(), strategy=SimpleNamespace(devices=8 * [SimpleNamespace(device_kind="a device")])
    )
    seen = []
    experiment = tiny_experiment(text_file, batch_size=16, log_every=2)
    log = RunLog(tmp_path, experiment, trainer, 3, [seen.append], show=True)
    log.clock = SimpleNamespace(working=itertools.count(0.0, 0.25).__next__, total=lambda: 7.0)
    log.log_first_step(4, 60.0)
    for step in range(4, 9):
        log.log_step(step, dict.fromkeys(("loss", "grad_norm", "learning_rate", "skipped_in_a_row"), 1.0))
    log.close()
    _, *said = capsys.readouterr().err.splitlines()
    assert [line.split(" · ")[:2] for line in said] == [[f"step {n}/6", "loss 1.000"] for n in range(4, 9)] * (
        quiet < 0
    )
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
