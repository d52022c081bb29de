"""Repeated steps of a run: honest runs are accepted bit for bit, and what was changed in a run is named."""

import contextlib
import dataclasses
import json
import shutil

import jax
import pytest

from jaxgpt.config.words import replace_fields
from jaxgpt.errors import Preempted, UserError
from jaxgpt.parallel.jax_setup import device_name
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import read_metadata
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.tools.replay import audit, replay
from jaxgpt.training import fit, open_training
from tests.helpers import edit_manifest, edit_record, flip, plant_bad_targets, quick, tiny_experiment

STEPS, KEEP = 20, 4


@pytest.fixture(scope="module")
def experiment(text_file):
    train = {"steps": STEPS, "log_every": 1, "eval_every": KEEP, "checkpoint_every": KEEP, "keep_every": KEEP}
    made = tiny_experiment(text_file, eval_tokens=64, **train)
    return replace_fields(made, {"model.n_layer": 1, "optim.learning_rate": 2e-3})


@pytest.fixture(scope="module")
def honest(experiment, tmp_path_factory):
    return fit(experiment, tmp_path_factory.mktemp("audits") / "run", progress=False).directory


@pytest.fixture
def run(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "run")


def edit_log(run, change):
    path = run / "metrics.jsonl"
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in read_metrics(path)))


def test_random_steps_of_an_honest_run_are_right_and_nothing_is_written(honest):
    before = {path: path.stat().st_mtime_ns for path in honest.rglob("*")}
    found = audit(honest, steps=6)
    assert found.accepted and found.retaken < found.steps and 1 <= found.retaken <= 6 and not found.elsewhere
    assert "accepted" in str(found) and "bit for bit" in str(found)
    assert audit(honest, steps=6, seed=found.seed) == found
    assert {path: path.stat().st_mtime_ns for path in honest.rglob("*")} == before


def false_weights(run):
    """Save the last state with another parameter, whose SHA-256 is right."""
    metadata = read_metadata(run)
    training = open_training(metadata.experiment, run, metadata)
    state = training.restore_or_init(STEPS)
    state = dataclasses.replace(state, params=jax.tree.map(lambda x: x * (1 + 1e-4), state.params))
    checkpoints = Checkpoints(run / "checkpoints", keep_last=STEPS)
    val_loss = checkpoints.val_loss(STEPS)
    checkpoints.save(state, STEPS, val_loss)
    checkpoints.close()


def at(step, name, **values):
    """Return a function that changes the line of a step that has this field."""
    return lambda run: edit_log(
        run, lambda line: {"step": step} | values if line["step"] == step and name in line else line
    )


def lines_of(change):
    """Return a function that changes the list of the log's lines."""

    def edit(run):
        path = run / "metrics.jsonl"
        path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))

    return edit


def with_line(text):
    return lines_of(lambda lines: [*lines, text])


FALSE = {
    "step 8: val_loss is": at(8, "val_loss", val_loss=0.5),
    "checkpoint 8: its val_loss is 0.5": lambda run: edit_manifest(
        run / "checkpoints/8", lambda body: body.update(val_loss=0.5)
    ),
    "step 5: a second line of the log has loss": lines_of(
        lambda lines: [*lines, next(x for x in lines if '"step": 5,' in x)]
    ),
    "step 7: a line of the log has no loss": at(7, "loss", grad_norm=1.0),
    "step 7: grad_norm is not in the log": at(7, "loss", loss=1.0, learning_rate=1.0, tokens=224),
    "step 9: is not in the log": lines_of(lambda lines: [x for x in lines if '"step": 9,' not in x]),
    "step 21: is in the run, which has the steps 1 to 20": with_line('{"step": 21, "val_loss": 0.5}'),
    "1 of 26 lines are damaged": with_line('{"step": 5, "val_loss": "x"}'),
    "step 7: skipped is loss is nan in the run, None here": at(7, "loss", skipped="loss is nan"),
    f"checkpoint {STEPS}: params/": false_weights,
    "8/manifest.json is not what was written": lambda run: flip(run / "checkpoints/8/manifest.json", 2000),
}


@quick(FALSE, "step 8: val_loss is", "step 7: a line of the log has no loss", f"checkpoint {STEPS}: params/")
def test_what_was_changed_is_named_if_every_step_is_taken(run, name):
    FALSE[name](run)
    found = audit(run, steps=STEPS)
    assert not found.accepted and found.retaken == STEPS
    assert any(name in said for said in found.findings), found.findings
    assert name in str(found) and "not accepted" in str(found)


@pytest.mark.slow
def test_a_run_of_elsewhere_is_accepted_within_a_tolerance(run):
    edit_record(run, lambda record: record.update(device="NVIDIA H200"))
    # Another order of a sum makes such a difference.
    edit_log(run, lambda line: line | {"loss": line["loss"] * (1 + 1e-5)} if "loss" in line else line)
    found = audit(run, steps=STEPS)
    assert not found.accepted and found.elsewhere == [f"device NVIDIA H200, here {device_name()}"]
    assert "device NVIDIA H200, here cpu" in str(found) and "--tolerance" in str(found)
    found = audit(run, steps=STEPS, tolerance=1e-4)
    assert found.accepted and "20 of 20 steps repeated and compared within 0.0001" in str(found)


def test_what_cannot_be_audited_is_refused_in_one_line(honest, run):
    with pytest.raises(UserError, match="was trained on other data.*name that text with --data"):
        audit(honest, data=__file__)
    edit_record(run, lambda record: record.update(imported={"model_type": "gpt2"}))
    with pytest.raises(UserError, match="is an imported model: there is no training to audit"):
        audit(run)


def test_an_audit_takes_at_least_one_logged_step_again(honest, tmp_path):
    """Also of a run that logged little and kept one checkpoint. Fewer steps than that would accept whatever it says."""
    run = shutil.copytree(honest, tmp_path / "run")
    for step in range(KEEP, STEPS, KEEP):
        shutil.rmtree(run / "checkpoints" / str(step))
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] in (10, STEPS)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    edit_record(run, lambda record: record["experiment"]["train"].update(log_every=10, eval_every=STEPS))
    found = audit(run, steps=9)
    assert found.accepted and found.retaken == 10


# Honest runs of all kinds: other fields of the experiment.
KINDS = {
    "adapters, muon, dropout and accumulation": {
        "model.dropout": 0.2,
        "optim.name": "muon",
        "parallel.micro_batch_size": 2,
        "train.seed": 5,
        "lora.rank": 2,
    },
    "skipped steps in bfloat16, resumed": {"optim.learning_rate": 0.03, "train.dtype": "bfloat16"},
    "few checkpoints, resumed": {"train.keep_every": None, "train.log_every": 3, "train.checkpoint_every": 1000},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_honest_runs_of_all_kinds_are_accepted(experiment, honest, tmp_path, monkeypatch, kind):
    run = tmp_path / "run"
    if kind.startswith("skipped"):
        plant_bad_targets(monkeypatch, [4 * experiment.train.batch_size, 11 * experiment.train.batch_size + 1])
        experiment = replace_fields(experiment, KINDS[kind])
    if "resumed" in kind:  # with other intervals, if they are what is special
        with pytest.raises(Preempted), pytest.MonkeyPatch.context() as patch:
            stop = contextlib.nullcontext(lambda step: "SIGTERM" if step == STEPS // 2 else None)
            patch.setattr("jaxgpt.training.catch_signals", lambda: stop)
            fit(experiment, run, progress=False)
    if kind.startswith("adapters"):
        experiment = replace_fields(experiment, {"train.init_from": str(honest)})
    fit(replace_fields(experiment, KINDS[kind]), run, progress=False)
    found, lines = audit(run, steps=STEPS), read_metrics(run / "metrics.jsonl")
    assert found.findings == [] and found.retaken == found.steps
    assert any("skipped" in line for line in lines) == kind.startswith("skipped")
    assert replay(run, STEPS).equal
