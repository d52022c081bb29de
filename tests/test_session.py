"""A run from end to end: what it writes, how it goes on, what it refuses."""

import dataclasses
import json
import shutil

import chex
import jax
import numpy as np
import optax
import pytest

import jaxgpt
from jaxgpt.config.serialize import differences
from jaxgpt.errors import CheckpointSaveError, UserError
from jaxgpt.run import load
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import read_metadata
from jaxgpt.runs.metrics import MetricsFile, read_metrics
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from jaxgpt.tools.replay import replay
from jaxgpt.train import TrainState
from jaxgpt.training import fit
from tests.helpers import logged, replace_fields, tiny_experiment


def losses(directory, name="loss"):
    return [(x["step"], x[name]) for x in logged(directory) if name in x]


@pytest.fixture(scope="module")
def experiment(text_file):
    e = tiny_experiment(text_file)
    return dataclasses.replace(e, model=dataclasses.replace(e.model, dropout=0.2))


TOLD = []  # what the callback of the run below was called with


@pytest.fixture(scope="module")
def run(experiment, tmp_path_factory):
    return fit(experiment, tmp_path_factory.mktemp("runs") / "whole", progress=False, callbacks=[TOLD.append])


def test_the_run_directory(run, experiment):
    names = {p.name for p in run.directory.iterdir()}
    files = {"experiment.json", "tokenizer.json", "metrics.jsonl", "loss.png"}
    assert names == files | {"checkpoints", ".lock"}
    record = json.loads((run.directory / "experiment.json").read_text())
    keys = "format sha256 experiment vocab_size data imported origin versions device command"
    assert list(record) == keys.split()
    assert record["versions"]["jax"] == jax.__version__
    assert not differences(read_metadata(run.directory).experiment, experiment)
    assert (run.directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = read_metrics(run.directory / "metrics.jsonl")
    keys = "step tokens loss grad_norm learning_rate tokens_per_second mfu seconds"
    assert [(x["step"], list(x)) for x in lines if "loss" in x] == [(n, keys.split()) for n in range(1, 7)]
    assert [x["step"] for x in lines if "val_loss" in x] == [3, 6] and lines[0]["tokens"] == 4 * 8
    seconds = [x["seconds"] for x in lines if "loss" in x]
    assert seconds == sorted(seconds)
    assert [x for x in TOLD if "saved" not in x] == lines and TOLD[-1] == {"step": 6, "saved": 6}


def test_kept_checkpoints_are_the_last_and_the_best_and_have_a_mean(run):
    steps = {int(p.name) for p in (run.directory / "checkpoints").iterdir()}
    best = min(losses(run.directory, "val_loss"), key=lambda x: x[1])[0]
    assert steps == {4, 6, best}
    assert run.step == best and run.val_loss == min(v for _, v in losses(run.directory, "val_loss"))
    last, mean = load(run.directory, which="last"), load(run.directory, average=2)
    assert last.step == mean.step == 6 and mean.val_loss is None
    earlier = Checkpoints(run.directory / "checkpoints").restore_params(4, last.params)
    expected = jax.tree.map(lambda a, b: (a + b) / 2, last.params, earlier)
    chex.assert_trees_all_close(mean.params, expected, rtol=1e-6, atol=1e-9)


def test_a_run_samples_streams_and_evaluates(run):
    how = dict(max_new_tokens=40, seed=3)
    text = run.sample("lance", **how)
    stop = text[6:8]
    before = text[: text.find(stop)]
    assert len(text) == 40 and run.sample("lance", **how, stop=[stop]) == before
    assert "".join(run.stream("lance", **how)) == text
    assert "".join(run.stream("lance", **how, stop=[stop])) == before
    with pytest.raises(UserError, match=r"unknown option temprature \(did you mean temperature\?\)"):
        run.sample("lance", temprature=0.5)
    found = evaluate_run(run)
    assert found["loss"] == pytest.approx(run.val_loss, rel=1e-6)
    assert found["bits_per_character"] == pytest.approx(found["loss"] / np.log(2))


class Killed(BaseException):
    """What a test raises in the loop, to leave it as a kill would: with no farewell save."""


def test_resumed_equals_uninterrupted_bit_for_bit(run, experiment, tmp_path, monkeypatch):
    """Losses, validation losses and parameters, dropout on, killed between two checkpoints."""
    directory = tmp_path / "resumed"
    write = MetricsFile.write

    def killed(self, **values):
        if values["step"] == 5:
            raise Killed
        write(self, **values)

    monkeypatch.setattr(MetricsFile, "write", killed)
    with pytest.raises(Killed):
        fit(experiment, directory, progress=False)
    monkeypatch.undo()
    resumed = fit(experiment, directory, progress=False)
    assert losses(directory) == losses(run.directory)
    assert losses(directory, "val_loss") == losses(run.directory, "val_loss")
    chex.assert_trees_all_equal(resumed.params, run.params)


def test_a_run_whose_directory_is_deleted_ends(experiment, tmp_path, monkeypatch):
    """Else it would go on for days, and leave checkpoints that nothing can read without experiment.json."""
    write = MetricsFile.write

    def then_deleted(self, **values):
        write(self, **values)
        if values["step"] == 1:
            shutil.rmtree(tmp_path / "r")

    monkeypatch.setattr(MetricsFile, "write", then_deleted)
    with pytest.raises(CheckpointSaveError, match="r was deleted or moved, so step 2 is not saved"):
        fit(experiment, tmp_path / "r", progress=False)
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_run_is_trained_longer(experiment, tmp_path):
    """As if its first schedule had been given from the start; where the rate rises again, it has to be confirmed."""

    def of(steps, **optim):
        optim = {"schedule": "cosine", "warmup_steps": None} | optim
        return replace_fields(experiment, optim=optim, train={"steps": steps})

    directory = tmp_path / "run"
    fit(of(4), directory, progress=False)
    before = (directory / "experiment.json").read_bytes()
    said = r"its learning rate would rise from .* to 0.000.* at step 4: .* add --extend"
    with pytest.raises(UserError, match=said):
        fit(of(6), directory, progress=False)
    assert (directory / "experiment.json").read_bytes() == before
    with pytest.raises(UserError, match="another configuration: train.steps 4 -> 6"):
        fit(of(6), directory, progress=False, extend=False)
    longer = fit(of(6), directory, progress=False, extend=True)
    assert longer.step == 6 and longer.experiment.train.steps == 6 and longer.experiment.optim.horizons == (4,)
    whole = fit(of(6, horizons=(4,)), tmp_path / "whole", progress=False)
    assert losses(directory) == losses(whole.directory) and len(losses(directory)) == 6
    one, other = (load(place, which="last").params for place in (directory, whole.directory))
    chex.assert_trees_all_equal(one, other)
    again = fit(of(6), directory, progress=False)  # nothing is left to do, and nothing has to be confirmed
    assert again.step == longer.step and replay(directory, 3).equal and replay(directory, 6).equal
    with pytest.raises(UserError, match="another configuration: .*train.steps 6 -> 4"):
        fit(of(4), directory, progress=False)


def test_other_data_is_refused_though_the_path_may_change(run, experiment, tmp_path, text_file):
    copy, other = tmp_path / "copy.txt", tmp_path / "other.txt"
    copy.write_text(text_file.read_text())
    other.write_text(text_file.read_text().replace("lance", "sword"))

    def at(path):
        return dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, path=str(path)))

    assert fit(at(copy), run.directory, progress=False).step == run.step
    with pytest.raises(UserError, match="trained on other data: .*train_sha256"):
        fit(at(other), run.directory, progress=False)


def test_fresh_moves_the_old_run_aside_and_the_newest_is_the_default(experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run = jaxgpt.fit(experiment, fresh=True, progress=False)
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"tiny", "tiny.old-1"}
    assert str(run.directory) == "runs/tiny" and load("runs/tiny.old-1").step == run.step
    assert jaxgpt.load().directory.name.startswith("tiny")


def test_a_save_is_of_its_step_though_the_state_moves_on(tmp_path):
    """Saving returns before the data is written, and the next step is given the same memory."""
    params = {"w": jax.numpy.zeros((512, 512))}
    state = TrainState(
        np.int32(1), params, optax.identity().init(params), skipped=np.int32(0), skipped_in_a_row=np.int32(0)
    )
    advance = jax.jit(lambda s: s.replace(params=jax.tree.map(lambda x: x + 1.0, s.params)), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path / "c")
    state = jax.tree.map(jax.numpy.asarray, state)
    checkpoints.save(state, 1, 0.5)
    for _ in range(20):
        state = advance(state)
    checkpoints.wait()
    assert float(checkpoints.restore_params(1, state.params)["w"].max()) == 0.0
    checkpoints.close()
