"""A run in training: its step is compiled in a thread while the state is made."""

import contextlib
import dataclasses

import jax
import jax.monitoring
import pytest

from jaxgpt.fitting import fit, open_training
from jaxgpt.parallel.trainer import Trainer
from tests.helpers import chat_file, tiny_experiment

STEPS = 7  # of no other test: trainers with equal fields are shared


def experiment(kind, text_file, directory, **train):
    path = chat_file(directory) if kind == "conversations" else text_file
    made = tiny_experiment(path, steps=STEPS, **train)
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
