"""experiments/minimal.py: the page runs as it stands, on one device and on two, and learns the same."""

import re

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import check_command

PAGE = REPOSITORY / "experiments" / "minimal.py"


def losses(tmp_path, devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    argv = ("-W", "error", str(PAGE), "--steps", "20")
    done = check_command(*argv, cwd=tmp_path, deadline=120, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    return [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", done.stdout, re.MULTILINE)]


def test_it_learns_the_same_on_one_device_and_on_two(tmp_path):
    one, two = (losses(tmp_path, devices) for devices in (1, 2))
    assert one[0] - one[-1] > 1.0
    assert two == pytest.approx(one, abs=2e-3)  # printed to four digits, after 20 steps in other orders of summation
