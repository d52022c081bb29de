"""`jaxgpt runs`: what is read of each run, the order, the table, and what it costs."""

import dataclasses
import json
import shutil
import statistics

import pytest

from jaxgpt.model import GPTConfig
from jaxgpt.parallel import limits
from jaxgpt.runs.directory import lock_run, read_metadata
from jaxgpt.tools.grid import read_curve
from jaxgpt.tools.overview import count_parameters, format_rows, read_rows, runs
from tests.helpers import check_command
from tests.tools.written_run import STEPS, write_run

MODELS = [
    {"norm_position": "sandwich", "qk_norm": True, "tie_embeddings": False, "head_dim": 6, "mlp_dim": 7},
    {"sliding_window": 2, "global_every": 2, "position": "rope", "rope_local_theta": 100.0},
]


@pytest.mark.parametrize("fields", MODELS, ids=str)
def test_parameters_are_counted_as_jax_does(fields):
    config = GPTConfig(**{"vocab_size": 11, "block_size": 5, "n_layer": 2, "n_head": 4, "n_embd": 8} | fields)
    assert count_parameters(config) == limits.count_parameters(config.make_model().shapes())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs of all kinds."""
    place = tmp_path_factory.mktemp("overview") / "runs"
    write_run(place / "complete", done=STEPS)
    write_run(place / "study/gelu/seed-0", trained=6, done=6)
    write_run(place / "study/gelu/seed-1", trained=0)
    write_run(place / "skipped", trained=4, last=[{"step": step, "skipped": "loss"} for step in (5, 7, 8, 9)])
    write_run(place / "some skipped", trained=4, last=[{"step": step, "skipped": "loss"} for step in (5, 7, 8)])
    write_run(place / "nan", trained=9, done=8, last=[{"step": 10, "loss": 3.0}, {"step": 10, "val_loss": None}])
    write_run(place / "imported", imported={"model_type": "gpt2"})
    write_run(place / "damaged")
    (place / "damaged/experiment.json").write_text("{")
    write_run(place / "pipe")
    (place / "pipe/metrics.jsonl").unlink()
    (place / "pipe/metrics.jsonl").mkdir()
    (place / "link").symlink_to(place / "complete")
    (place / "study/loop").symlink_to(place)
    return place


def named(rows, place):
    return {row.name.removeprefix(f"{place}/"): row for row in rows}


def test_every_run_has_a_row_with_its_status(place):
    rows = named(read_rows(place), place)
    assert {name: (row.status, row.step) for name, row in rows.items()} == {
        "complete": ("complete", STEPS),
        "damaged": ("damaged", None),
        "imported": ("imported", None),
        "nan": ("diverged", STEPS),
        "pipe": ("damaged", None),
        "skipped": ("diverged", 9),
        "some skipped": ("interrupted", 8),
        "study/gelu/seed-0": ("interrupted", 6),
        "study/gelu/seed-1": ("interrupted", 0),
    }
    assert "experiment.json is damaged" in rows["damaged"].problem
    assert "metrics.jsonl is a directory" in rows["pipe"].problem


def test_numbers_are_those_of_the_log(place):
    rows = named(read_rows(place), place)
    row = rows["complete"]
    assert (row.tokens, row.loss, row.steps) == (STEPS * 2 * 8, 1.25, STEPS)
    assert row.speed == statistics.median(100.0 * step for step in range(2, STEPS + 1))
    assert (rows["imported"].tokens, rows["imported"].speed, rows["imported"].size) == (None, None, row.size)
    assert rows["study/gelu/seed-1"].loss is None


def test_a_run_is_in_training_while_its_lock_is_held(place, tmp_path):
    shutil.copytree(place / "complete", tmp_path / "run")
    lock = lock_run(tmp_path / "run", fresh=False)
    assert read_rows(tmp_path)[0].status == "training"
    lock.release()
    assert read_rows(tmp_path)[0].status == "complete"


@pytest.mark.parametrize("sort", ["loss", "speed", "date"])
def test_rows_are_sorted_and_those_without_a_value_come_last(place, sort):
    values = [row[sort] for row in runs(str(place), sort=sort).to_json()]
    known = [value for value in values if value is not None]
    assert values == sorted(known, reverse=sort != "loss") + [None] * (len(values) - len(known))


def test_a_line_of_wrong_types_is_damage_of_its_run_alone(place, tmp_path):
    shutil.copytree(place / "complete", tmp_path / "bad")
    shutil.copytree(place / "complete", tmp_path / "good")
    log = tmp_path / "bad/metrics.jsonl"
    log.write_text('{"step": 5, "val_loss": 1.0, "val_losses": {"a": "x"}}\n' + log.read_text())
    bad, good = read_rows(tmp_path)
    said = "metrics.jsonl: 1 of 16 lines are damaged and left out"
    assert (bad.status, bad.problem, good.status) == ("damaged", said, "complete")
    assert dataclasses.replace(bad, name=good.name, status=good.status, problem=None, date=good.date) == good
    with pytest.warns(UserWarning, match="1 of 16 lines"):
        assert read_curve(tmp_path / "bad", read_metadata(tmp_path / "bad").experiment).losses[-1] == 7.25


def test_lines_that_are_doubled_count_once_and_their_order_does_not(place, tmp_path):
    shutil.copytree(place / "complete", tmp_path / "run")
    log, experiment = tmp_path / "run/metrics.jsonl", read_metadata(tmp_path / "run").experiment
    curve = read_curve(tmp_path / "run", experiment)
    log.write_text("".join(f"{line}\n" for line in reversed(log.read_text().splitlines())) * 2)
    assert read_curve(tmp_path / "run", experiment) == curve and read_rows(tmp_path)[0].status == "complete"


def test_each_run_is_a_line(place):
    rows = read_rows(place)
    head, _, *lines = format_rows([*rows, dataclasses.replace(rows[0], name="a\x1b[2J\nb")]).splitlines()
    assert len(lines) == len(rows) + 1 and head.startswith("| run | size |")
    assert all(row.name in line and (row.problem or "") in line for row, line in zip(rows, lines, strict=False))


SECONDS = 10.0  # of CPU for 200 runs, which took 4.2 without jax's import on two busy cores with AVX2


@pytest.mark.slow
def test_two_hundred_runs_are_listed_without_a_device(place, tmp_path):
    shutil.copytree(place / "complete", tmp_path / "runs/0")
    log = tmp_path / "runs/0/metrics.jsonl"
    log.write_bytes(log.read_bytes() * 67)  # 1,005 lines
    for number in range(1, 200):
        shutil.copytree(tmp_path / "runs/0", tmp_path / f"runs/{number}")
    code = """
import json, sys, time
from jaxgpt.__main__ import main
main(["runs", "--json"])
from jax._src import xla_bridge
assert not xla_bridge._backends
print(time.process_time(), file=sys.stderr)
"""
    done = check_command("-c", code, cwd=tmp_path)
    assert {row["status"] for row in json.loads(done.stdout)} == {"complete"} and len(json.loads(done.stdout)) == 200
    assert float(done.stderr) < SECONDS
