"""Checkpoints: they are read as they were saved, damage is found and named, and a failed save is reported."""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import time
import warnings

import chex
import jax
import numpy as np
import optax
import pytest

from jaxgpt.errors import CheckpointSaveError, UserError
from jaxgpt.optim import OptimConfig, make_optimizer
from jaxgpt.run import load
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import lock_run, read_metadata
from jaxgpt.train import TrainState
from jaxgpt.training import fit
from tests.helpers import edit_manifest, flip, logged, tiny_experiment

FLIPS = 60  # single bits, over all files of a checkpoint


def small_state(step, size=16):
    params = {"a": {"kernel": jax.numpy.arange(size * size, dtype="float32").reshape(size, size) + step}}
    return new_state(params, optax.adam(1e-3), step)


def new_state(params, optimizer, step):
    counters = {name: jax.numpy.int32(0) for name in ("skipped", "skipped_in_a_row")}
    return TrainState(jax.numpy.int32(step), params, optimizer.init(params), **counters)


def save(directory, steps, losses=(), size=16, **policy):
    checkpoints = Checkpoints(directory, **policy)
    for step, loss in zip(steps, [*losses, *[None] * len(steps)], strict=False):
        checkpoints.save(small_state(step, size), step, loss)
    checkpoints.close()
    return checkpoints


def test_an_output_matrix_that_was_no_module_is_read_as_one(tmp_path):
    """As earlier versions saved it, in the parameters and in the optimiser's state."""
    optimizer = make_optimizer(OptimConfig(name="muon"), 10)

    def state(head):
        params = {"h_0": {"mlp": {"kernel": np.ones((2, 3), np.float32)}}, "lm_head": head}
        return new_state(params, optimizer, 3)

    head = np.arange(6, dtype=np.float32).reshape(2, 3)
    saved, like = state(head), jax.eval_shape(lambda: state({"kernel": head}))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(saved, 3, None)
    checkpoints.close()
    params = {"h_0": saved.params["h_0"], "lm_head": {"kernel": head}}
    found = checkpoints.restore(3, like)
    for read in (checkpoints.restore_params(3, like.params), found.params):
        chex.assert_trees_all_equal(read, params)
    chex.assert_trees_all_equal(jax.tree.leaves(found.opt_state), jax.tree.leaves(saved.opt_state))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Steps 1 and 2."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    save(directory, [1, 2], keep_last=2)
    return directory


@pytest.fixture
def damaged(two, tmp_path):
    return shutil.copytree(two, tmp_path / "checkpoints")


def files(directory):
    return sorted(p for p in directory.rglob("*") if p.is_file())


def found(directory, which="last"):
    """(step that is used, what was said)."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        return Checkpoints(directory).latest_valid(which), [str(w.message) for w in said]


@pytest.mark.parametrize("name", ["plain", "run[1]", "a*?"])
def test_what_is_saved_is_what_is_read(tmp_path, monkeypatch, name):
    """Whatever the name of a directory means to `glob`, by which Orbax finds the files of each process."""
    tmp_path /= name
    save(tmp_path.with_name("runs1" if name == "a*?" else "run1"), [1])
    monkeypatch.setattr("jaxgpt.runs.checkpoint.AT_ONCE", 0)  # less than an array has
    checkpoints = save(tmp_path, [1, 2], keep_last=2, size=99)
    assert found(tmp_path) == (2, [])
    chex.assert_trees_all_equal(checkpoints.restore(2, small_state(2, 99)), small_state(2, 99))
    about = checkpoints.manifest(2)
    assert about["step"] == 2 and about["jaxgpt"] and about["arrays"]["params"] == {"['a']['kernel']": "float32[99,99]"}
    assert sum(size for size, _ in about["files"].values()) > 117_612  # three arrays, of which two are zeros


@pytest.mark.parametrize("name", ["back\\slash", "not_utf_8_\udcff"])
def test_a_path_that_tensorstore_cannot_open_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(UserError, match="a backslash or is not UTF-8.*: rename that directory"):
        Checkpoints(tmp_path / name)
    assert not any(tmp_path.iterdir())


NOT_THESE = [None, -1, 10**400, "x", [1], {"x": []}]  # JSON of many types


def test_a_sealed_manifest_of_other_types_is_damage_in_words(run):
    """Any value in any field: the run is loaded, or a line says that its checkpoint is damaged or does not fit."""
    checkpoint = run / "checkpoints" / "4"
    shutil.rmtree(run / "checkpoints" / "2")
    whole = (checkpoint / "manifest.json").read_bytes()
    fields = [*[(name,) for name in json.loads(whole)][:-1], ("arrays", "params"), ("arrays", "rest")]
    fields += [("arrays", "params", "['wte']['embedding']"), ("files", "state/params/manifest.ocdbt")]
    for field, value in itertools.product(fields, NOT_THESE):

        def put(body, field=field, value=value):
            for name in field[:-1]:
                body = body[name]
            body[field[-1]] = value

        (checkpoint / "manifest.json").write_bytes(whole)
        edit_manifest(checkpoint, put)
        checkpoints = Checkpoints(run / "checkpoints")
        checkpoints.val_loss(4)
        try:
            assert checkpoints.latest_valid("best") == 4
            checkpoints.restore(4, small_state(4))
        except UserError as e:
            assert str(checkpoint) in str(e), (field, value, e)
    (checkpoint / "manifest.json").unlink()
    os.mkfifo(checkpoint / "manifest.json")
    with pytest.raises(UserError, match="manifest.json is a pipe"):
        load(run)


def test_every_flipped_bit_is_found_and_its_file_named(damaged):
    """And every byte and file that is missing."""
    rng = random.Random(0)
    paths = files(damaged / "2")
    bits = [(p, at) for p in paths for at in range(8 * p.stat().st_size)]
    chosen = [rng.choice(bits) for _ in range(FLIPS)] + [(p, rng.randrange(8 * p.stat().st_size)) for p in paths]
    for path, how in [*chosen, *((p, how) for p in paths for how in ("cut", "gone"))]:
        whole = path.read_bytes()
        path.unlink() if how == "gone" else path.write_bytes(whole[:-1]) if how == "cut" else flip(path, how)
        step, said = found(damaged)
        assert step == 1 and len(said) == 1, (path, how)
        assert "checkpoint 2 is damaged, so 1 is used" in said[0] and str(path) in said[0] and "\n" not in said[0]
        path.write_bytes(whole)
    assert found(damaged) == (2, [])


@pytest.mark.parametrize(("step", "used", "losses"), [(1, 2, (1.0, 2.0)), (2, 1, ())])
def test_a_damaged_manifest_is_named_when_the_best_is_looked_for(damaged, losses, step, used):
    """It may have been the best: which loss it had is not known any more. So it is not removed, either."""
    for number, loss in enumerate(losses, start=1):
        Checkpoints(damaged).set_val_loss(number, loss)
    flip(damaged / str(step) / "manifest.json", 2000)
    step_used, (said,) = found(damaged, "best")
    assert step_used == used and f"checkpoint {step} is damaged, so {used} is used: {damaged}/{step}" in said
    if step == 1:
        assert save(damaged, [3, 4], [3.0, 4.0]).steps() == [1, 2, 4]


def test_names_that_are_no_checkpoints_are_left_alone(two, damaged):
    for name in ("3.saving", "4.deleting", "0x5", "٣", "-6", "07", "..8"):
        shutil.copytree(two / "2", damaged / name)
    flip(damaged / "2" / "manifest.json", 2000)
    with pytest.warns(UserWarning, match="checkpoint 2 is damaged, so 1 is used"):
        assert Checkpoints(damaged).rewind() == 1
    assert {p.name for p in damaged.iterdir()} == {"1", "2.damaged", "0x5", "٣", "-6", "07", "..8"}


def test_shapes_are_compared_before_anything_is_read(two):
    like = jax.eval_shape(lambda: small_state(2, size=2**20))  # 4 TiB
    said = r"\['a'\]\['kernel'\] is float32\[16,16\], experiment.json makes it float32\[1048576"
    with pytest.raises(UserError, match=said):
        Checkpoints(two).restore(2, like)


def test_what_is_kept(tmp_path):
    def steps(name, **policy):
        return save(tmp_path / name, [1, 2, 3, 4, 5, 6], [5.0, 3.0, 4.0, float("nan")], **policy).steps()

    assert steps("a") == [2, 6]
    assert steps("b", keep_last=2, keep_every=3) == [2, 3, 5, 6]
    assert Checkpoints(tmp_path / "a").latest_valid("best") == 2 and Checkpoints(tmp_path / "a").last() == 6


@pytest.mark.parametrize("loss", [0.7, float("nan")])
def test_a_validation_loss_can_be_told_later(damaged, loss):
    """One that is no number is as good as none."""
    for step, measured in ((2, loss), (1, 0.5)):
        Checkpoints(damaged).set_val_loss(step, measured)
    assert found(damaged) == (2, []) and found(damaged, "best") == (1, [])
    assert Checkpoints(damaged).val_loss(2) == (0.7 if loss == 0.7 else None)


# What a run makes of it


@pytest.fixture(scope="module")
def experiment(text_file):
    e = tiny_experiment(text_file, steps=4, eval_every=2)
    return dataclasses.replace(e, model=dataclasses.replace(e.model, n_layer=1))


@pytest.fixture(scope="module")
def trained(experiment, tmp_path_factory):
    """A run that was killed in its first moment before, and could begin all the same."""
    directory = tmp_path_factory.mktemp("runs") / "r"
    directory.mkdir()
    for name in (".lock", "tokenizer.json", "tokenizer.json.x8a_b2", "experiment.json.q"):
        (directory / name).write_text("")
    return fit(experiment, directory, progress=False).directory


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "r")


def test_no_run_begins_where_something_else_is(experiment, tmp_path):
    for name in (".lock", "tokenizer.json", "index.json"):  # as `jaxgpt prepare` leaves them
        (tmp_path / name).write_text(name)
    with pytest.raises(UserError, match="exists and is not a run directory"):
        fit(experiment, tmp_path, progress=False)
    assert (tmp_path / "tokenizer.json").read_text() == "tokenizer.json"


def test_a_run_goes_on_from_the_newest_good_checkpoint(experiment, trained, run):
    path = max((run / "checkpoints" / "4" / "state").rglob("*"), key=lambda p: p.stat().st_size)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.warns(UserWarning, match="checkpoint 4 is damaged, so 2 is used"):
        assert load(run, which="last").step == 2
    with pytest.warns(UserWarning, match="checkpoint 4 is damaged, so 2 is used"):
        fit(experiment, run, progress=False)
    assert logged(run) == logged(trained)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"2", "4", "4.damaged"}
    assert load(run, which="last").step == 4


def test_a_run_is_loaded_while_it_is_trained(run, monkeypatch):
    """Training removes an old checkpoint at any moment, also between its check and its reading."""
    good, removed = Checkpoints.latest_valid, []

    def then_removed(self, *arguments, **options):
        step = good(self, *arguments, **options)
        if not removed:
            Checkpoints(run / "checkpoints").remove(step)
            removed.append(step)
        return step

    monkeypatch.setattr(Checkpoints, "latest_valid", then_removed)
    assert load(run, which="last", average=1).step == 2 and removed == [4]
    removed.clear()
    with pytest.raises(UserError, match="has no checkpoint"):
        load(run)


def test_a_run_without_a_good_checkpoint_does_not_start_over(experiment, run):
    for path in (run / "checkpoints").glob("*/manifest.json"):
        path.unlink()
    before = files(run)
    for use in (lambda: fit(experiment, run, progress=False), lambda: load(run)):
        with pytest.raises(UserError, match="checkpoint 4 is damaged, and no other is good: .*4/manifest.json"):
            use()
    assert files(run) == before


def test_two_at_once_are_refused_and_a_crash_releases(experiment, run, tmp_path):
    """Another process holds the lock, then is killed."""
    code = f"""
import sys, time
from pathlib import Path
from jaxgpt.runs.directory import lock_run
lock = lock_run(Path({str(run)!r}), False)
print("locked", flush=True)
time.sleep(1000)
"""
    child = subprocess.Popen([os.sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert child.stdout.readline() == "locked\n"
        for fresh in (False, True):
            with pytest.raises(UserError, match=rf"is being trained by another process \(process {child.pid} on "):
                fit(experiment, run, fresh=fresh, progress=False)
        assert load(run).step  # reading is free
    finally:
        child.kill()
        child.communicate()
    lock_run(run, False).release()
    # It goes with the run that is moved aside.
    with lock_run(run, True), pytest.raises(UserError, match="being trained"):
        lock_run(run, True)
    assert {p.name for p in run.parent.iterdir()} == {"r", "r.old-1"}
    assert read_metadata(run.parent / "r.old-1")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 KB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "jaxgpt-test", directory]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-R", "-l", directory], check=True)


# TensorStore tells some of its failed writes to an event loop that has closed by then, from threads of its own.
@pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_fails_the_save_that_it_fails(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints")
    checkpoints.save(small_state(1), 1, None)
    checkpoints.wait()
    checkpoints.save(small_state(2, size=512), 2, None)  # 3 MB
    said = r"step 2 could not be saved in .*: No space left on device\. .* is step 1\."
    with pytest.raises(CheckpointSaveError, match=said):
        checkpoints.wait()
    with contextlib.suppress(CheckpointSaveError):
        checkpoints.close()
    assert found(small_disk / "checkpoints") == (1, [])
    for _ in range(50):  # on a busy machine another thread may still write what was given up
        assert Checkpoints(small_disk / "checkpoints").rewind() == 1
        if {p.name for p in (small_disk / "checkpoints").iterdir()} == {"1"}:
            return
        time.sleep(0.1)
    pytest.fail("what was not saved is still there")
