"""Ctrl-C and SIGTERM: the first saves, the second ends the process, and a resumed run catches up on what was left out."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time

import chex
import pytest

from jaxgpt import training
from jaxgpt.errors import Preempted
from jaxgpt.run import load
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.training import fit
from tests.conftest import REPOSITORY
from tests.helpers import tiny_experiment

DEADLINE = 120  # seconds, after which a process is killed
GRACE = 10  # seconds between a signal and the end, with a step and a save of milliseconds


@pytest.fixture(scope="module")
def experiment(text_file):
    e = tiny_experiment(text_file, steps=4, eval_every=2)
    return dataclasses.replace(e, model=dataclasses.replace(e.model, n_layer=1, dropout=0.2))


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory):
    return fit(experiment, tmp_path_factory.mktemp("runs") / "whole", progress=False)


def lines(directory):
    return [{k: x.get(k) for k in ("step", "loss", "val_loss")} for x in read_metrics(directory / "metrics.jsonl")]


STOP = "SIGTERM"


def script(monkeypatch, *losses):
    """Validations find these losses in turn, and then what they are. STOP sends the signal on the way."""
    plain, found = training.mean_loss, iter(losses)

    def scripted(*arguments):
        loss = next(found, None)
        if loss == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        return (loss, 1) if isinstance(loss, float) else plain(*arguments)

    monkeypatch.setattr(training, "mean_loss", scripted)


def test_a_signal_during_validation_saves_first_and_validates_on_return(experiment, whole, tmp_path, monkeypatch):
    directory = tmp_path / "r"
    script(monkeypatch, STOP, STOP)
    for said in ("saved step 2 of 4", "step 2 of 4 is saved"):  # and once more, on return
        with pytest.raises(Preempted, match=f"SIGTERM: {said}"):
            fit(experiment, directory, progress=False)
    assert not any(x["step"] == 2 and x["val_loss"] for x in lines(directory))
    run = fit(experiment, directory, progress=False)
    assert lines(directory) == lines(whole.directory)
    assert (run.step, run.val_loss) == (whole.step, whole.val_loss)
    assert load(directory, which="last").val_loss == load(whole.directory, which="last").val_loss
    chex.assert_trees_all_equal(run.params, whole.params)


def test_a_loss_on_return_that_is_no_number_leaves_the_checkpoint_good(experiment, tmp_path, monkeypatch):
    script(monkeypatch, STOP, math.nan)
    with pytest.raises(Preempted, match="SIGTERM: saved step 2 of 4"):
        fit(experiment, tmp_path / "r", progress=False)
    fit(experiment, tmp_path / "r", progress=False)
    assert [x["val_loss"] for x in lines(tmp_path / "r") if x["step"] == 2] == [None, None]
    assert load(tmp_path / "r", which=2).val_loss is None


def test_the_best_loss_so_far_is_that_of_the_checkpoints(experiment, tmp_path, monkeypatch):
    """Whatever metrics.jsonl says, which has no checksum. A loss that is worse, at step 3, is not saved."""
    train = dataclasses.replace(experiment.train, steps=5, eval_every=1, checkpoint_every=99, keep_last=9)
    e = dataclasses.replace(experiment, train=train)
    script(monkeypatch, 3.0, STOP, 5.0, 4.0, 2.0, 4.5)
    with pytest.raises(Preempted, match="saved step 2 of 5"):
        fit(e, tmp_path / "r", progress=False)
    metrics = tmp_path / "r" / "metrics.jsonl"
    assert '"val_loss": 3.0' in metrics.read_text()
    metrics.write_text(metrics.read_text().replace('"val_loss": 3.0', '"val_loss": 0.3'))
    fit(e, tmp_path / "r", progress=False)
    assert {p.name for p in (tmp_path / "r" / "checkpoints").iterdir()} == set("1245")


# A save that takes for ever, so that the second signal finds the first one's work unfinished.
SLOW = """
import sys, time
from jaxgpt import __main__
from jaxgpt.runs.checkpoint import Checkpoints
Checkpoints.save = lambda *arguments: time.sleep(1000)
__main__.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path, text_file):
    options = f"""train --run-dir r --data.path {text_file} --model.n-layer 1 --model.n-head 1 --model.n-embd 8
        --model.block-size 8 --train.batch-size 2 --train.steps 1000000 --train.checkpoint-every 1000000
        --train.eval-every 1000000 --optim.warmup-steps 1 --train.log-every 1""".split()
    told, env = tmp_path / "stderr", {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    how = dict(cwd=tmp_path, env=env, stdin=subprocess.DEVNULL)
    with told.open("w") as stderr:
        child = subprocess.Popen([sys.executable, "-c", SLOW, *options], stderr=stderr, **how)
    try:
        deadline = time.monotonic() + DEADLINE
        while len(lines(tmp_path / "r")) < 3:
            assert child.poll() is None and time.monotonic() < deadline, told.read_text()
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        while ": stop" not in told.read_text():  # acknowledged
            assert time.monotonic() < deadline, told.read_text()
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        assert child.wait(GRACE) == -signal.SIGINT, told.read_text()  # a shell says 130
    finally:
        child.kill()
        child.wait()
    assert "a second signal stops at once" in told.read_text().splitlines()[-1]
