"""experiments/minimal.py: the page runs as it stands, on one device and on two, and learns the same."""

import re

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import check_command

PAGE = REPOSITORY / "experiments" / "minimal.py"
DEADLINE = 120.0  # seconds for one run, which takes about ten


def losses(tmp_path, *argv, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = check_command(
        "-W", "error", str(PAGE), *argv, cwd=tmp_path, deadline=DEADLINE, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"
    )
    head, *lines = done.stdout.splitlines()
    assert f"devices: {devices}" in head
    found = [float(match[1]) for line in lines if (match := re.match(r"step \d+  loss (\S+)", line))]
    sample = done.stdout.split(" s\n")[-1]
    assert len(sample) > 300  # the prompt, 300 characters, and the end of the line
    return found


def test_it_learns_the_same_on_one_device_and_on_two(tmp_path):
    one, two = (losses(tmp_path, "--steps", "20", devices=devices) for devices in (1, 2))
    assert one[0] - one[-1] > 1.0
    assert two == pytest.approx(one, abs=2e-3)  # printed to four digits, after 20 steps in other orders of summation


@pytest.mark.slow
def test_it_reads_a_file(tmp_path, text_file):
    first, last = losses(tmp_path, str(text_file), "--steps", "20")
    assert last < first - 1.0


def test_it_fits_on_a_page_and_imports_the_core_only():
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    core = {"batch", "config.model", "config.training", "loss", "optim", "plain_generate", "train", "model"}
    assert set(re.findall(r"^from jaxgpt\.(\S+) import", text, re.MULTILINE)) <= core
    others = set(re.findall(r"^(?:from|import) ([a-z_]+)", text, re.MULTILINE)) - {"jaxgpt"}
    assert others <= {"argparse", "functools", "time", "pathlib", "pydoc_data", "jax", "numpy", "flax", "optax"}
