"""Bad numbers planted in real runs: they are skipped, found and reported, and `replay` sees them again."""

import dataclasses
import math

import chex
import jax
import numpy as np
import pytest

import jaxgpt.parallel.trainer
from jaxgpt import training
from jaxgpt.batch import Batch
from jaxgpt.errors import Diverged, UserError
from jaxgpt.parallel.trainer import gather_params, make_trainer
from jaxgpt.run import load
from jaxgpt.runs.autopsy import debug_step
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.metrics import MetricsFile, read_metrics
from jaxgpt.tools.replay import replay
from jaxgpt.train import init_state
from jaxgpt.training import fit
from tests.helpers import logged, plant_bad_targets, replace_fields, tiny_experiment
from tests.test_session import Killed, _raise_at


@pytest.fixture(scope="module")
def experiment(text_file):
    return replace_fields(tiny_experiment(text_file), model={"n_layer": 1, "dropout": 0.2}, optim={"max_skipped": 2})


# Scanned layers are unstacked, and micro-batches taken one after the other, as in the step itself.
SCANNED = {"model": {"scan_layers": True, "n_layer": 2, "remat": "full"}, "parallel": {"micro_batch_size": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
def test_a_corrupt_parameter_is_found(experiment, tmp_path, monkeypatch, capsys, layer):
    def planted(*args, **kwargs):
        state = init_state(*args, **kwargs)
        c_fc = (state.params["h"]["block"] if layer else state.params["h_0"])["mlp"]["c_fc"]
        c_fc["kernel"] = c_fc["kernel"].at[(1, 0, 0) if layer else (0, 0)].set(np.nan)
        return state

    monkeypatch.setattr(jaxgpt.parallel.trainer, "init_state", planted)
    with pytest.raises(Diverged, match="steps in a row were skipped, up to step .*: loss is nan"):
        fit(
            replace_fields(experiment, **SCANNED if layer else {"optim": {"max_skipped": 3}}), tmp_path / "r"
        )  # of no other test
    told = [line for line in capsys.readouterr().err.splitlines() if "step 1 skipped" in line]
    assert len(told) == 1 and f"loss is nan. To see where it began: jaxgpt replay {tmp_path / 'r'} --step 1" in told[0]
    assert all("skipped" in line for line in read_metrics(tmp_path / "r" / "metrics.jsonl"))
    assert not (tmp_path / "r" / "checkpoints").exists()

    found = replay(tmp_path / "r", 1).findings
    assert found.first == f"h_{layer}/mlp/c_fc (Dense)"
    assert [name for name, norm in found.parameter_norms.items() if math.isnan(norm)] == [f"h_{layer}"]


@pytest.mark.slow
def test_what_is_examined_is_the_step_that_was_taken(experiment):
    """Each micro-batch with its rows and its dropout: of a sound step, the gradient's norm is the same."""
    model = {"vocab_size": 11, "dropout": 0.5}
    small = replace_fields(experiment, model=model, parallel={"strategy": "pmap", "micro_batch_size": 2})
    trainer = make_trainer(small)
    text = np.random.default_rng(0).integers(0, 11, (4, 9)).astype(np.int32)
    batch, key = Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:]), jax.random.key(1)
    state = trainer.init_state(jax.random.key(0))
    state = dataclasses.replace(state, step=state.step + 2)
    found = debug_step(trainer, gather_params(trainer, state), batch, key, 3)
    _, metrics = trainer.train_step(state, trainer.strategy.shard_batch(batch), key)
    assert math.hypot(*found.gradient_norms.values()) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    assert found.first is None


BAD_STEPS = (5, 8)  # the second is one of those that are saved


@pytest.fixture(scope="module")
def bumpy(experiment):
    """A run in which two steps have a target outside the vocabulary."""
    return replace_fields(
        experiment,
        optim={"max_skipped": 20, "learning_rate": 1e-2},
        train={"steps": 30, "batch_size": 2, "eval_every": 15, "checkpoint_every": 4, "keep_last": 1},
    )


@pytest.fixture(scope="module")
def bad_batch():
    with pytest.MonkeyPatch.context() as patch:
        plant_bad_targets(patch, [2 * (step - 1) for step in BAD_STEPS])
        yield


@pytest.fixture(scope="module")
def whole(bumpy, bad_batch, tmp_path_factory):
    """(the run, the steps at which it saved); its first validation loss is NaN."""
    saved, losses = [], iter([float("nan")])
    save, mean_loss = Checkpoints.save, training.mean_loss

    def noted(self, state, step, val_loss, **more):
        saved.append((step, val_loss))
        save(self, state, step, val_loss, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", noted)
        patch.setattr(training, "mean_loss", lambda *a: (next(losses, mean_loss(*a)[0]), 0))
        run = fit(bumpy, tmp_path_factory.mktemp("bumpy") / "whole", progress=False)
    return run, saved


def test_two_bad_batches_do_not_stop_a_run(whole):
    run, saved = whole
    lines = {x["step"]: x for x in read_metrics(run.directory / "metrics.jsonl") if "val_loss" not in x}
    assert list(lines) == list(range(1, 31))
    assert [lines[step] for step in BAD_STEPS] == [{"step": step, "skipped": "loss is nan"} for step in BAD_STEPS]
    assert [step for step, x in lines.items() if "skipped" in x] == [*BAD_STEPS]
    assert [step for step, _ in saved][:2] == [4, 9]  # 8 is put off to the next step that is taken
    assert (run.step, [x for x in saved if x[1] is not None]) == (30, [(30, run.val_loss)])  # NaN was not the best


@pytest.mark.slow
def test_killed_and_resumed_it_skips_the_same_steps_bit_for_bit(whole, bumpy, tmp_path, monkeypatch):
    run, _ = whole
    monkeypatch.setattr(MetricsFile, "write", _raise_at(MetricsFile.write, step=28))
    with pytest.raises(Killed):
        fit(bumpy, tmp_path / "r", progress=False)
    monkeypatch.undo()
    kept = max(int(p.name) for p in (tmp_path / "r" / "checkpoints").iterdir())
    found = replay(tmp_path / "r", kept + 1)
    assert (found.origin, found.equal) == (f"the checkpoint, after step {kept}", True)
    resumed = fit(bumpy, tmp_path / "r", progress=False)
    lines, expected = ([x for x in logged(d) if "val_loss" not in x] for d in (tmp_path / "r", run.directory))
    assert lines == expected
    last = load(run.directory, which="last").params
    chex.assert_trees_all_equal(load(tmp_path / "r", which="last").params, last)
    assert resumed.step == run.step


def test_any_step_is_replayed_bit_for_bit_and_nothing_is_written(whole):
    run, _ = whole
    before = {p: p.stat().st_mtime_ns for p in run.directory.rglob("*")}
    for step in (*BAD_STEPS, 30):
        found = replay(run.directory, step)
        assert (found.equal, found.origin) == (True, "the seed")
        assert (found.findings and found.findings.first) == ("the loss, of finite logits" if step < 30 else None)
    assert {p: p.stat().st_mtime_ns for p in run.directory.rglob("*")} == before
    with pytest.raises(UserError, match=r"--step 31: needs one of the steps of .*, 1 to 30"):
        replay(run.directory, 31)
    with pytest.raises(UserError, match="step=1.5: needs a whole number"):
        replay(run.directory, 1.5)
