"""Bad numbers planted in real runs: they are skipped, found and reported, and `replay` sees them again."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import jaxgpt.parallel.trainer
from jaxgpt.batch import Batch
from jaxgpt.errors import Diverged, UserError
from jaxgpt.parallel.trainer import gather_params, make_trainer
from jaxgpt.runs.checks import debug_step
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.tools.replay import replay
from jaxgpt.train import init_state
from jaxgpt.training import fit
from tests.helpers import plant_bad_targets, replace_fields, tiny_experiment


@pytest.fixture(scope="module")
def experiment(text_file):
    return replace_fields(tiny_experiment(text_file), model={"n_layer": 1, "dropout": 0.2}, optim={"max_skipped": 2})


# Scanned layers are unstacked, and micro-batches taken one after the other, as in the step itself.
SCANNED = {"model": {"scan_layers": True, "n_layer": 2, "remat": "full"}, "parallel": {"micro_batch_size": 2}}


@pytest.mark.slow
def test_a_corrupt_parameter_is_found(experiment, tmp_path, monkeypatch, capsys):
    def planted(*args, **kwargs):
        state = init_state(*args, **kwargs)
        c_fc = state.params["h"]["block"]["mlp"]["c_fc"]
        c_fc["kernel"] = c_fc["kernel"].at[1, 0, 0].set(np.nan)
        return state

    monkeypatch.setattr(jaxgpt.parallel.trainer, "init_state", planted)
    with pytest.raises(Diverged, match="steps in a row were skipped, up to step .*: loss is nan"):
        fit(replace_fields(experiment, **SCANNED), tmp_path / "r")
    told = [line for line in capsys.readouterr().err.splitlines() if "step 1 skipped" in line]
    assert len(told) == 1 and f"loss is nan. To see where it began: jaxgpt replay {tmp_path / 'r'} --step 1" in told[0]
    assert all("skipped" in line for line in read_metrics(tmp_path / "r" / "metrics.jsonl"))
    assert not (tmp_path / "r" / "checkpoints").exists()

    found = replay(tmp_path / "r", 1).findings
    assert found.first == "h_1/mlp/c_fc (Dense)"
    assert [name for name, norm in found.parameter_norms.items() if math.isnan(norm)] == ["h_1"]


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


BAD_STEPS = (5, 8)


@pytest.fixture(scope="module")
def bumpy(experiment, tmp_path_factory):
    """A run in which two steps have a target outside the vocabulary."""
    skips = replace_fields(experiment, train={"steps": 10, "batch_size": 2, "keep_last": 1})
    with pytest.MonkeyPatch.context() as patch:
        plant_bad_targets(patch, [2 * (step - 1) for step in BAD_STEPS])
        yield fit(skips, tmp_path_factory.mktemp("bumpy") / "run", progress=False).directory


def test_any_step_is_replayed_bit_for_bit_and_nothing_is_written(bumpy):
    before = {p: p.stat().st_mtime_ns for p in bumpy.rglob("*")}
    for step in (*BAD_STEPS, 10):
        found = replay(bumpy, step)
        assert (found.equal, found.origin) == (True, "the seed")
        assert (found.findings and found.findings.first) == ("the loss, of finite logits" if step < 10 else None)
    assert {p: p.stat().st_mtime_ns for p in bumpy.rglob("*")} == before
    with pytest.raises(UserError, match=r"--step 11: give one of the steps of .*, 1 to 10"):
        replay(bumpy, 11)
    with pytest.raises(UserError, match="step=1.5: needs a whole number"):
        replay(bumpy, 1.5)
