"""TPU slices without a TPU: the real compiler, the real training step. Minutes, so by `python -m pytest -m slow`."""

import json

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import check_command, needs

pytestmark = [pytest.mark.slow, needs("libtpu", "tpu")]


def test_programs_of_absent_devices_are_not_kept(tmp_path, text_file):
    """A second plan would find them in the cache and complain that it cannot load them."""
    shape = ("--model.n-layer", "1", "--model.n-head", "1", "--model.n-embd", "8", "--model.block-size", "8")
    command = ("-m", "jaxgpt", "plan", *shape, "--data.path", str(text_file), "--topology", "v5e:1x1")
    kept = tmp_path / "kept"
    env = {"JAX_COMPILATION_CACHE_DIR": str(kept), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    check_command(*command, cwd=tmp_path, ALLOW_MULTIPLE_LIBTPU_LOAD="1", **env)
    assert not kept.exists() or [path for path in kept.rglob("*-cache")] == []


def test_only_gradients_cross_between_slices(tmp_path):
    """The axis data joins the two slices: only its all-reduces cross the network, each chip sending its own part."""
    # A few layers, scanned, which compile in a fraction of the time.
    mesh = ("--parallel.strategy", "mesh", "--parallel.fsdp", "16", "--parallel.slices", "2", "--model.n-layer", "4")
    mesh += ("--model.scan-layers",)
    command = ("-m", "jaxgpt", "plan", f"{REPOSITORY}/experiments/gpt2_124m.py", "--topology", "2xv5e:4x4", "--json")
    done = check_command(*command, *mesh, cwd=tmp_path, deadline=900, ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    found = json.loads(done.stdout)
    assert found["devices"] == 32
    assert found["strategy"] == "mesh of data=2 x fsdp=16 x tensor=1 over 2 slices"
    assert {(e["kind"], e["devices"]) for e in found["exchanges"] if e["between_slices"]} == {("all-reduce", 2)}
    assert all(e["devices"] <= 16 for e in found["exchanges"]) and found["fits"]
    assert found["state_memory"] == pytest.approx(12 * found["parameters"] / 16, rel=0.01)
    # A bfloat16 gradient of a chip's sixteenth, at least once per step; at most float32, per micro-batch, and padded.
    part = found["parameters"] / 16
    sent = sum(e["bytes"] for e in found["exchanges"] if e["between_slices"])  # between two, each sends as much
    assert 2 * part <= sent <= 4 * part * found["accumulation"] * 2


def test_a_kernel_of_pallas_runs_once_for_each_direction(tmp_path):
    """Attention forward and backward in each layer, although remat recomputes; three of the page's loss."""
    page, traffic = (f"{REPOSITORY}/experiments/benchmarks/{name}.py" for name in ("fused_loss", "traffic"))
    how = ("--topology", "v6e:1x1", "--model.n-layer", "1", "--train.batch-size", "12", "--model.remat", "dots")
    done = check_command(traffic, page, *how, "--json", cwd=tmp_path, deadline=900, ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    assert json.loads(done.stdout)["kernels"] == {"Pallas": 2 + 3}
