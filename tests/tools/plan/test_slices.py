"""TPU slices without a TPU: the real compiler, the real training step. Minutes, so by `python -m pytest -m slow`."""

import importlib.util
import json

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import run_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='libtpu is not here: pip install ".[tpu]"'),
]

# What takes the place of a file of its own: sizes that have no experiment.
LARGE = """
from jaxgpt import Experiment, GPTConfig, ParallelConfig, TrainConfig

llama_7b = Experiment(
    name="llama-7b",
    model=GPTConfig(
        vocab_size=32_000, block_size=4096, n_layer=32, n_head=32, n_embd=4096, mlp_dim=11008, norm="rmsnorm",
        activation="swiglu", position="rope", tie_embeddings=False, scan_layers=True, remat="full", bias=False,
    ),
    train=TrainConfig(batch_size=1024),
    parallel=ParallelConfig(strategy="mesh", fsdp=128, tensor=4, loss_chunk=512),
)
"""


def test_programs_of_absent_devices_are_not_kept(tmp_path, text_file):
    """A second plan would find them in the cache and complain that it cannot load them."""
    shape = ("--model.n-layer", "1", "--model.n-head", "1", "--model.n-embd", "8", "--model.block-size", "8")
    command = ("-m", "jaxgpt", "plan", *shape, "--data.path", str(text_file), "--topology", "v5e:1x1")
    kept = tmp_path / "kept"
    env = {"JAX_COMPILATION_CACHE_DIR": str(kept), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = run_command(*command, cwd=tmp_path, ALLOW_MULTIPLE_LIBTPU_LOAD="1", **env)
    assert done.returncode == 0, done.stderr
    assert not kept.exists() or [path for path in kept.rglob("*-cache")] == []


def test_only_gradients_cross_between_slices(tmp_path):
    """The axis data joins the two slices: only its all-reduces cross the network, each chip sending its own part."""
    # A few layers, scanned, which compile in a fraction of the time.
    mesh = ("--parallel.strategy", "mesh", "--parallel.fsdp", "16", "--parallel.slices", "2", "--model.n-layer", "4")
    mesh += ("--model.scan-layers",)
    command = ("-m", "jaxgpt", "plan", f"{REPOSITORY}/experiments/gpt2_124m.py", "--topology", "2xv5e:4x4", "--json")
    done = run_command(*command, *mesh, cwd=tmp_path, deadline=900, ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["devices"] == 32
    assert found["strategy"] == "mesh of data=2 x fsdp=16 x tensor=1 over 2 slices"
    assert {(e["kind"], e["devices"]) for e in found["exchanges"] if e["between_slices"]} == {("all-reduce", 2)}
    assert all(e["devices"] <= 16 for e in found["exchanges"])
    # A bfloat16 gradient of a chip's sixteenth, at least once per step; at most float32, per micro-batch, and padded.
    part = found["parameters"] / 16
    assert 2 * part <= found["network_bytes"] <= 4 * part * found["accumulation"] * 2
    assert found["network_seconds"] == pytest.approx(found["network_bytes"] / 3.125e9)


@pytest.mark.parametrize(
    ("experiment", "topology", "strategy", "split"),  # over how many devices the state is cut
    [
        (f"{REPOSITORY}/experiments/gpt2_124m.py", "v5e:2x4", "pmap over 8 devices", 1),
        ("large.py:llama_7b", "v5p:8x8x8", "mesh of data=1 x fsdp=128 x tensor=4", 512),
    ],
)
def test_it_fits_and_could_be_fast(experiment, topology, strategy, split, tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    command = ("-m", "jaxgpt", "plan", experiment, "--topology", topology, "--model.scan-layers", "--json")
    # libtpu lets in one process at a time; here none of them has a TPU.
    done = run_command(*command, cwd=tmp_path, deadline=900, ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = json.loads(done.stdout)
    assert found["fits"] and found["strategy"] == strategy
    assert found["mfu"] >= 0.5
    # Each device holds its part of the state: 12 bytes a parameter, over the devices that share it.
    assert found["state_memory"] == pytest.approx(12 * found["parameters"] / split, rel=0.01)
    kinds = {e["kind"] for e in found["exchanges"]}
    assert kinds == {"all-reduce"} if split == 1 else kinds >= {"all-gather"}


def test_a_kernel_of_pallas_runs_once_for_each_direction(tmp_path):
    """Attention forward and backward in each layer, although remat recomputes; three of the loss, on a v6e."""
    layers = ("--model.n-layer", "1", "--train.batch-size", "12")
    command = ("-m", "jaxgpt", "plan", f"{REPOSITORY}/experiments/gpt2_124m.py", "--topology", "v6e:1x1", *layers)
    done = run_command(*command, "--json", cwd=tmp_path, deadline=900, ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["remat"] == "dots" and found["accumulation"] == 1
    assert found["kernels"] == {"Pallas": 2 + 3}
