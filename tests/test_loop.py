"""The loop without a model: which steps are settled, validated and saved, and when."""

import itertools
import math
import time

import jax
import pytest

from jaxgpt.config import TrainConfig
from jaxgpt.errors import Diverged, Preempted
from jaxgpt.loop import train


def metrics(in_row=0, loss=1.0, norm=1.0):
    return {"loss": loss, "grad_norm": norm, "learning_rate": 0.1, "in_a_row": in_row}


def run(config, *, bad=(), start=0, max_skipped=9, best=math.inf, seconds=0.0, **replaced):
    """(what was called, the last state, what was raised); the state is the number of steps. replaced: functions."""
    events, raised, state, in_row = [], None, start, [0]

    def step(state, batch, key):
        events.append(f"begin {state + 1}")
        time.sleep(seconds)
        in_row[0] = in_row[0] + 1 if state + 1 in bad else 0
        return state + 1, metrics(in_row[0], loss=math.nan if in_row[0] else 1.0)

    def log(line):
        if "val_loss" in line:
            events.append(f"validation {line['step']}")
        elif "compiled" not in line:
            events.append(f"settle {line['step']}")

    def save(step, state, val_loss):
        events.append(f"save {step}" + ("" if val_loss is None else f" with {val_loss}"))

    functions = {"log": log, "save": save} | replaced
    options = {"key": jax.random.key(0), "max_skipped": max_skipped, "best": best} | functions
    try:
        state = train(step, start, itertools.repeat(None), config=config, start=start, **options)
    except (Diverged, Preempted) as e:
        raised = e
    return events, state, raised


def of_saves(events):
    return [event.removeprefix("save ") for event in events if event.startswith("save")]


def test_at_most_two_steps_are_in_flight():
    events, state, _ = run(TrainConfig(steps=6, eval_every=9, checkpoint_every=9))
    begins = "begin 1, settle 1, begin 2, settle 2, begin 3, begin 4, begin 5, settle 3, begin 6, settle 4, settle 5"
    assert ", ".join(events) == f"{begins}, settle 6, save 6" and state == 6


def test_long_steps_are_not_left_in_flight(monkeypatch):
    """A loop begins after the step of its state."""
    monkeypatch.setattr("jaxgpt.loop.LONG_STEP", 0.01)
    events, *_ = run(TrainConfig(steps=7, eval_every=9, checkpoint_every=9), start=3, seconds=0.02)
    assert ", ".join(events[4:]) == "begin 6, settle 6, begin 7, settle 7, save 7"


def test_a_checkpoint_that_is_due_after_a_skipped_step_waits_for_the_next_taken_one():
    events, _, _ = run(TrainConfig(steps=8, eval_every=99, checkpoint_every=3), bad=(3, 4, 8))
    assert of_saves(events) == ["5", "6"]  # not 8, whose parameters may be ruined


def test_a_finite_validation_loss_is_enough_to_save_after_a_skipped_step():
    config = TrainConfig(steps=4, eval_every=2, checkpoint_every=99)
    events, _, _ = run(config, bad=(2, 4), validate=lambda step, state: 5.0 - step)
    assert of_saves(events) == ["2 with 3.0", "4 with 1.0"]


def test_only_a_better_loss_is_a_reason_to_save():
    values = {1: 3.0, 2: 3.2, 3: 2.0, 4: math.nan, 5: 2.5}
    config = TrainConfig(steps=5, eval_every=1, checkpoint_every=99)
    events, _, _ = run(config, best=3.5, validate=lambda step, state: values[step])
    assert of_saves(events) == ["1 with 3.0", "3 with 2.0", "5 with 2.5"]  # the last is saved always


def test_a_signal_goes_before_validation_and_saves():
    config = TrainConfig(steps=9, eval_every=2, checkpoint_every=99)
    events, _, raised = run(config, stop=lambda step: "SIGTERM" if step == 2 else None)
    assert events[-1] == "save 2" and str(raised) == "SIGTERM: saved step 2 of 9"


@pytest.mark.parametrize(("val_loss", "saved"), [(None, "2"), (1.5, "2 with 1.5")])
def test_a_signal_in_a_validation_ends_the_run_with_what_was_measured(val_loss, saved):
    config = TrainConfig(steps=9, eval_every=2, checkpoint_every=99)
    functions = {"stop": lambda step: "SIGINT" if step is None else None, "validate": lambda step, state: val_loss}
    events, _, raised = run(config, **functions)
    assert of_saves(events) == [saved] and ("validation 2" in events) == (val_loss is not None)
    assert str(raised) == "SIGINT: saved step 2 of 9"


def test_too_many_skipped_steps_in_a_row_end_the_run():
    told = []
    _, _, raised = run(
        TrainConfig(steps=9, eval_every=99, checkpoint_every=99),
        bad=(2, 4, 5, 6),
        max_skipped=3,
        log=lambda line: "skipped" in line and told.append(line["step"]),
    )
    assert str(raised) == "3 steps in a row were skipped, up to step 6: loss is nan"
    assert told == [2, 4, 5, 6]


def test_a_last_loss_that_is_not_finite_ends_the_run_unsaved():
    events, _, raised = run(TrainConfig(steps=2, eval_every=9), validate=lambda step, state: math.nan)
    assert str(raised) == "the last validation loss is nan" and of_saves(events) == []
