"""Honest runs are accepted and forged ones are not, at a small part of their training.

JAXGPT_TEST_AUDITS=50 makes as many forgeries and as many audits of honest runs, of 800 steps instead of 20, and re-takes
the default number of steps.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil

import numpy as np
import pytest

from jaxgpt.config import Experiment
from jaxgpt.errors import Preempted, UserError
from jaxgpt.fitting import fit
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.tools.audit.audit import audit, format_audit
from jaxgpt.tools.audit.consistency import Log
from jaxgpt.tools.audit.plan import largest_false_share, make_plan
from tests.helpers import edit_record, tiny_experiment
from tests.tools.audit.forger import FORGERIES, edit_log

AUDITS = int(os.environ.get("JAXGPT_TEST_AUDITS", "0"))
STEPS, KEEP = (800 if AUDITS else 20), 4
RETAKEN = None if AUDITS else 12  # steps


class Trained:
    """Real runs of one experiment, each trained once."""

    def __init__(self, experiment: Experiment, directory, other_text):
        self.experiment, self.directory, self.other_text, self.runs = experiment, directory, other_text, {}

    def __call__(self, **parts):
        key = json.dumps(parts, sort_keys=True)
        if key not in self.runs:
            self.runs[key] = fit(
                changed(self.experiment, **parts), self.directory / str(len(self.runs)), progress=False
            )
        return self.runs[key].directory


def changed(experiment, **parts):
    return dataclasses.replace(
        experiment, **{part: dataclasses.replace(getattr(experiment, part), **fields) for part, fields in parts.items()}
    )


def small(text, **train):
    train = {"log_every": 1, "eval_every": STEPS // 5, "checkpoint_every": KEEP, "keep_every": KEEP} | train
    train |= {"steps": STEPS, "eval_tokens": 64, "sample_tokens": 0}
    return changed(tiny_experiment(text, **train), model={"n_layer": 1}, optim={"learning_rate": 2e-3})


@pytest.fixture(scope="module")
def train(text_file, tmp_path_factory):
    directory = tmp_path_factory.mktemp("audits")
    (directory / "other.txt").write_text(text_file.read_text()[::-1])
    return Trained(small(text_file), directory, directory / "other.txt")


@pytest.fixture(scope="module")
def honest(train):
    return train()


QUICK = ("better_last_validation", "better_manifests", "disturbed_weights")


def numbered(names):
    """Return (number, name) for each audit; those that need a run of their own are slow."""
    chosen = list(itertools.islice(itertools.cycle(names), AUDITS)) or names
    return [
        pytest.param(n, name, id=f"{n}-{name}", marks=[] if name in QUICK else [pytest.mark.slow])
        for n, name in enumerate(chosen)
    ]


@pytest.mark.parametrize(("number", "name"), numbered(list(FORGERIES)))
def test_a_forgery_is_found(train, tmp_path, number, name):
    FORGERIES[name](tmp_path / "forged", train(), train, np.random.default_rng(number))
    found = audit(tmp_path / "forged", steps=RETAKEN, seed=number)
    assert not found.accepted and found.findings
    print(found.retaken, *found.findings[:2])


def test_an_honest_run_is_accepted_and_nothing_is_written(honest):
    before = {path: path.stat().st_mtime_ns for path in honest.rglob("*")}
    found = audit(honest, steps=12)
    assert found.accepted and found.is_final_retaken and found.retaken <= 12 and found.tolerance_because == []
    assert found.equal == found.compared_lines + found.compared_states + found.compared_validations
    assert "bit for bit: if more than" in format_audit(found)
    assert {path: path.stat().st_mtime_ns for path in honest.rglob("*")} == before


def test_few_steps_accept_a_run_only_in_part(honest):
    said = format_audit(audit(honest, steps=3))
    assert "accepted in part" in said and "were not re-taken from an earlier checkpoint: that takes 4 steps" in said


def test_one_changed_line_is_found_if_every_step_is_taken(honest, tmp_path):
    run = shutil.copytree(honest, tmp_path / "run")
    edit_log(run, lambda x: x | {"grad_norm": x["grad_norm"] * (1 + 1e-6)} if x["step"] == 15 and "loss" in x else x)
    found = audit(run, steps=STEPS)
    (finding,) = found.findings
    assert finding.startswith("step 15: grad_norm") and "logged, found" in finding
    assert found.is_whole and found.retaken == STEPS == found.compared_lines == found.drawn
    assert found.compared_validations == found.validations
    assert found.equal == found.compared_lines + found.compared_states + found.compared_validations - 1
    accepted = dataclasses.replace(found, accepted=True, equal=found.equal + 1)
    assert "Every step was re-taken and is right, bit for bit." in format_audit(accepted)


def test_on_another_processor_numbers_are_compared_to_a_tolerance(honest, tmp_path):
    run = shutil.copytree(honest, tmp_path / "run")
    path = run / "sessions.jsonl"
    path.write_text(path.read_text().replace('"processor": "', '"processor": "AuthenticAMD '))
    edit_log(run, lambda x: x | {"loss": x["loss"] * (1 + 1e-5)} if "loss" in x else x)  # as another rounding would
    edit_record(run, lambda record: record.update(device="NVIDIA H200"))
    found = audit(run, steps=6)
    assert found.accepted and "NVIDIA H200: equal bits have been tested on CPUs only" in found.tolerance_because
    assert "not bit for bit:\n" in format_audit(found) and "\n  processor: 'AuthenticAMD" in format_audit(found)
    edit_log(run, lambda x: x | {"loss": x["loss"] * 0.97} if "loss" in x else x)
    path.unlink()  # of an earlier version
    found = audit(run, steps=6)
    assert not found.accepted and "does not record" in found.tolerance_because[1]


def test_what_cannot_be_audited_is_refused_in_one_line(honest, tmp_path):
    run = shutil.copytree(honest, tmp_path / "run")
    edit_log(run, lambda x: x if x["step"] < STEPS else None)
    shutil.rmtree(run / "checkpoints" / str(STEPS))
    with pytest.raises(UserError, match=f"has {STEPS - 1} of {STEPS} steps: audit it when it is complete"):
        audit(run)
    with pytest.raises(UserError, match="was trained on other data.*name that text with --data"):
        audit(honest, data=__file__)
    with pytest.raises(UserError, match="no file or folder at nowhere.txt"):
        audit(honest, data="nowhere.txt")
    edit_record(run, lambda record: record.update(imported={"model_type": "gpt2"}))
    with pytest.raises(UserError, match="is an imported model: there is no training to audit"):
        audit(run)


def test_draws_are_spread_within_the_budget_and_unknown():
    kept, logged = list(range(10, 1001, 10)), list(range(1, 1001))
    drawn = set()
    for seed in range(50):
        plan = make_plan(logged, kept, budget=40, unusual=500, rng=np.random.default_rng(seed))
        assert plan.retaken <= 40 and plan.stops[0] == 2 and plan.stops[990] == 1000 and plan.stops[500] == 510
        starts = sorted(plan.stops)
        assert all(any(start < step <= plan.stops[start] for start in starts) for step in plan.drawn)
        drawn |= set(plan.drawn)
    assert len(drawn) > 100
    assert make_plan(logged, kept, budget=1, unusual=None, rng=np.random.default_rng(0)).stops == {0: 2}
    assert make_plan(logged, kept, budget=1000, unusual=None, rng=np.random.default_rng(0)).is_whole


def test_the_share_of_false_lines_is_seen_as_often_as_it_says():
    rng = np.random.default_rng(0)
    for draws in (1, 6, 40):
        false = rng.random((20_000, draws)) < largest_false_share(draws)
        assert false.any(1).mean() == pytest.approx(0.95, abs=0.01)


# Honest runs of all kinds: other fields of the experiment.
KINDS = {
    "muon, dropout, accumulation and pmap": {
        "model": {"dropout": 0.2},
        "optim": {"name": "muon", "schedule": "wsd", "min_lr_ratio": 0.0},
        "parallel": {"micro_batch_size": 2, "strategy": "pmap"},
    },
    "skipped steps in bfloat16": {
        "optim": {"skip_spikes": 1.05, "max_skipped": STEPS, "learning_rate": 0.03},
        "train": {"dtype": "bfloat16"},
    },
    "best before the last": {
        "optim": {"learning_rate": 0.3, "schedule": "constant"},
        "train": {"seed": 4, "keep_every": None, "log_every": 3, "checkpoint_every": 1000},
    },
}
HONEST = ["plain", *KINDS, "moved", "adapters", "resumed"]


@functools.cache
def make_honest(name, train):
    """Train a run of a kind. Returns its directory."""
    directory = train.directory / name
    if name == "plain":
        return train()
    if name == "moved":
        return shutil.copytree(train(), directory)
    if name == "resumed":
        with pytest.raises(Preempted), pytest.MonkeyPatch.context() as patch:
            stop = contextlib.nullcontext(lambda step: "SIGTERM" if step == STEPS // 2 else None)
            patch.setattr("jaxgpt.fitting.catch_signals", lambda: stop)
            fit(train.experiment, directory, progress=False)
    other = KINDS | {
        "adapters": {"train": {"init_from": str(train()), "seed": 5}, "lora": {"rank": 2}},
        "resumed": {"train": {"log_every": 2, "eval_every": 7}},
    }
    return fit(changed(train.experiment, **other[name]), directory, progress=False).directory


@pytest.mark.parametrize(("number", "name"), numbered(HONEST))
def test_honest_runs_of_all_kinds_are_accepted(train, number, name):
    run = make_honest(name, train)
    found, log = audit(run, steps=RETAKEN), Log(read_metrics(run / "metrics.jsonl"))
    assert found.findings == [] and found.accepted and found.tolerance is None
    assert RETAKEN or found.retaken <= 0.05 * STEPS
    assert bool(log.skipped) == name.startswith("skipped")
    if name == "best before the last":
        assert min(log.val_losses, key=log.val_losses.__getitem__) < STEPS
    if name == "resumed":
        assert len((run / "sessions.jsonl").read_text().splitlines()) == 2 and STEPS - 1 not in log.steps
