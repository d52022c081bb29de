"""`fit` without a model: which steps are settled, validated and saved, and when. And its step, which a thread compiles."""

import contextlib
import dataclasses
import math

import jax
import jax.monitoring
import pytest

from jaxgpt import training
from jaxgpt.errors import Diverged, Preempted
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.log import RunLog
from jaxgpt.training import Training, fit, open_training
from tests.helpers import chat_file, replace_fields, tiny_experiment

COMPILED_STEPS = 7  # of no other test: trainers with equal fields are shared


@pytest.fixture
def run(text_file, tmp_path, monkeypatch):
    """Trains with steps that compute nothing: (what was called, what was raised). The state is the number of steps."""

    def run(steps, *, bad=(), losses=None, stop=lambda step: None, max_skipped=9, **train):
        events, in_row = [], [0]
        losses = losses or {}

        def take_step(state, batch, key):
            events.append(f"begin {state + 1}")
            in_row[0] = in_row[0] + 1 if state + 1 in bad else 0
            metrics = {"loss": math.nan if in_row[0] else 1.0, "grad_norm": 1.0, "learning_rate": 0.1}
            return state + 1, metrics | {"skipped_in_a_row": in_row[0]}

        def measure(self, state, is_interrupted):
            events.append(f"validation {state}")
            return losses.get(state, 9.0), {}

        def save(self, step, state, val_loss, log):
            events.append(f"save {step}" + ("" if val_loss is None else f" with {val_loss}"))

        log_step = RunLog.log_step

        def settle(self, step, metrics):
            log_step(self, step, metrics)
            events.append(f"settle {step}")

        pieces = {"start_compiling": lambda self, start: take_step, "restore_or_init": lambda self, start: 0}
        pieces |= {"shard_batch": lambda self, step, state, batch: (batch, {})}
        for name, piece in pieces.items() | {"measure_val_loss": measure, "save": save}.items():
            monkeypatch.setattr(Training, name, piece)
        monkeypatch.setattr(Trainer, "merged_params", lambda self, state: state)
        monkeypatch.setattr(RunLog, "log_step", settle)
        monkeypatch.setattr(training, "catch_signals", lambda: contextlib.nullcontext(stop))
        monkeypatch.setattr("jaxgpt.run.load_run", lambda metadata: None)
        fields = {"eval_every": 99, "checkpoint_every": 99} | train
        experiment = replace_fields(
            tiny_experiment(text_file, steps=steps, **fields), optim={"max_skipped": max_skipped}
        )
        try:
            fit(experiment, tmp_path / "r", progress=False)
        except (Diverged, Preempted) as e:
            return events, str(e)
        return events, None

    return run


def of_saves(events):
    return [event.removeprefix("save ") for event in events if event.startswith("save")]


def test_at_most_two_steps_are_in_flight_after_the_first(run):
    events, _ = run(6)
    begins = "begin 1, settle 1, begin 2, begin 3, begin 4, settle 2, begin 5, settle 3, begin 6, settle 4"
    assert ", ".join(events) == f"{begins}, settle 5, settle 6, validation 6, save 6 with 9.0"


def test_a_checkpoint_that_is_due_after_a_skipped_step_waits_for_the_next_taken_one(run):
    events, _ = run(8, checkpoint_every=3, bad=(3, 4))
    assert of_saves(events) == ["5", "6", "8 with 9.0"]


def test_a_finite_validation_loss_is_enough_to_save_after_a_skipped_step(run):
    events, _ = run(4, eval_every=2, bad=(2, 4), losses={2: 3.0, 4: 1.0})
    assert of_saves(events) == ["2 with 3.0", "4 with 1.0"]


def test_only_a_better_loss_is_a_reason_to_save(run):
    events, _ = run(5, eval_every=1, losses={1: 3.0, 2: 3.2, 3: 2.0, 4: math.nan, 5: 2.5})
    assert of_saves(events) == ["1 with 3.0", "3 with 2.0", "5 with 2.5"]  # the last is saved always


def test_a_signal_goes_before_validation_and_saves(run):
    events, raised = run(9, eval_every=2, stop=lambda step: "SIGTERM" if step == 2 else None)
    assert events[-1] == "save 2" and raised.startswith("SIGTERM: saved step 2 of 9. To continue: jaxgpt train")


def test_a_signal_in_a_validation_ends_the_run_unmeasured(run):
    asked = []

    def stop(step):  # once before the first step, and then in the validation
        asked.extend([step] if step is None else [])
        return "SIGINT" if len(asked) > 1 else None

    events, raised = run(9, eval_every=2, stop=stop)
    assert of_saves(events) == ["2"] and "validation 2" in events
    assert raised.startswith("SIGINT: saved step 2 of 9")


def test_too_many_skipped_steps_in_a_row_end_the_run(run):
    events, raised = run(9, bad=(2, 4, 5, 6), max_skipped=3)
    assert raised.startswith("3 steps in a row were skipped, up to step 6: loss is nan. Start over")
    assert of_saves(events) == []


def test_a_last_loss_that_is_not_finite_ends_the_run_unsaved(run):
    events, raised = run(2, losses={2: math.nan})
    assert raised.startswith("the last validation loss is nan. Start over") and of_saves(events) == []


def experiment(kind, text_file, directory, **train):
    path = chat_file(directory) if kind == "conversations" else text_file
    made = tiny_experiment(path, steps=COMPILED_STEPS, **train)
    sizes = {"block_size": 112} if kind == "conversations" else {}
    return dataclasses.replace(made, model=dataclasses.replace(made.model, n_layer=1, dropout=0.1, **sizes))


@pytest.fixture
def compiled():
    """Names of the programs that XLA compiles."""
    names = []

    def on_event(event, _, *, fun_name="", **__):
        if event.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    yield names
    jax.monitoring.unregister_event_duration_listener(on_event)


@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.slow), "conversations"])
def test_the_step_is_compiled_once(kind, text_file, tmp_path, compiled):
    """The steps run the program that the thread compiled, and give their state's memory to the next one."""
    session = open_training(experiment(kind, text_file, tmp_path), tmp_path / "r", None)
    with contextlib.closing(session.batches(0)) as batches:
        train_step, state = session.start_compiling(0), session.restore_or_init(0)
        for _ in range(2):
            before, batch = jax.tree.leaves(state), next(batches)
            state, _ = train_step(state, batch, session.dropout_key)
            assert all(x.is_deleted() for x in before)
    assert len([name for name in compiled if "train_step" in name]) == 1, compiled


def test_what_fails_in_the_thread_ends_the_run(text_file, tmp_path, monkeypatch):
    def lower(self):
        raise MemoryError("of the compiler")

    monkeypatch.setattr(Trainer, "lower", lower)
    with pytest.raises(MemoryError, match="of the compiler"):
        fit(experiment("text", text_file, tmp_path), tmp_path / "r", progress=False)
