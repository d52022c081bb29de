"""What starts a training over several hosts, on this machine: SLURM's daemons, and Ray's workers."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import REPOSITORY
from tests.helpers import check_command, needs
from tests.parallel.eight_devices import CURVES_EQUAL
from tests.parallel.test_multihost import OPTIONS, curve
from tests.test_docs import DOCS, blocks

SLURM = str(REPOSITORY / "tests" / "slurm.sh")
TRAIN = ["-m", "jaxgpt", "train", *OPTIONS, "--train.steps", "20"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, text_file):
    """A folder with a text, and the run in it that one process with two devices makes of it."""
    place = tmp_path_factory.mktemp("place")
    (place / "text.txt").write_text(text_file.read_text())
    two = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    check_command(*TRAIN, "--data.path", "text.txt", "--run-dir", "one", cwd=place, **two)
    return place


def run_under_slurm(script, place):
    """What a bash script says, standard error included, where SLURM has the two idle nodes n1 and n2."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "SLURM_DEADLINE": "240"}
    command = [SLURM, "bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=place, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(f"no SLURM may be installed here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_run(place, name):
    """It has the losses of one process."""
    for expected, found in zip(curve(place / "one"), curve(place / name), strict=True):
        assert len(found) > 1
        np.testing.assert_allclose(found, expected, **CURVES_EQUAL)


@pytest.mark.slow
def test_slurm_trains_one_run_in_two_processes(place):
    words = " ".join([sys.executable, *TRAIN, "--data.path", "text.txt", "--run-dir", "slurm"])
    said = run_under_slurm(f"srun -N2 -n2 {words}", place)
    print(said)
    assert "2 x cpu" in said and said.count("done in") == 1 and "slurm: all removed" in said
    check_run(place, "slurm")


@pytest.mark.slow
@needs("ray", "ray")
def test_ray_trains_one_run_in_two_workers(place):
    words = ["--data.path", "text.txt", "--run-dir", "ray", "--on", "ray", "--hosts", "2"]
    done = check_command(*TRAIN, *words, cwd=place, RAY_ADDRESS="local")
    assert "2 x cpu" in done.stdout + done.stderr
    check_run(place, "ray")


def test_the_files_of_the_page_parse():
    """Those of Kubernetes name what JAX needs to meet; scripts have bash's syntax."""
    page = DOCS / "clusters.md"
    scripts = [text for text in blocks(page, "bash") if text.startswith("#!")]
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    files = [yaml.safe_load(text) for text in blocks(page, "yaml")]
    scripts += [text["run"] for text in files if "run" in text]
    assert len(scripts) > 3 and len(files) > 3
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
