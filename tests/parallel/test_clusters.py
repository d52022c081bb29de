"""What starts a training over several hosts, on this machine: SLURM's daemons, and Ray's workers."""

import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import REPOSITORY
from tests.faults.grid_kills import STUDY, read_results, run
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
    how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 420}
    done = subprocess.run(command, cwd=place, env=env, **how)
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
    assert "2 x cpu" in said and said.count("done in") == 1 and "slurm: all removed" in said
    check_run(place, "slurm")


@pytest.mark.slow
def test_an_array_of_jobs_is_one_study(place):
    (place / "own.py").write_text(STUDY.format(text=str(place / "text.txt")))
    command = "study own.py --seeds 1 --run-dir "
    assert run(f"{command} alone", place, None, 0, random.Random(0)) == (0, "")
    (place / "study.sh").write_text(f"#!/bin/bash\n{sys.executable} -m jaxgpt {command} array\n")
    said = run_under_slurm("sbatch --wait --array=0-1 study.sh; tail -n 3 slurm-*.out", place)
    assert read_results(place / "array") == read_results(place / "alone") != {}, said


@pytest.mark.slow
@needs("ray", "ray")
def test_ray_trains_one_run_in_two_workers(place):
    words = ["--data.path", "text.txt", "--run-dir", "ray", "--on", "ray", "--hosts", "2"]
    done = check_command(*TRAIN, *words, cwd=place, RAY_ADDRESS="local")
    assert "2 x cpu" in done.stdout + done.stderr
    check_run(place, "ray")


def test_the_files_of_the_page_have_form():
    """Bash and YAML can be read, and a JobSet names the first of its own pods. It stops there: no cluster is asked."""
    page = DOCS / "clusters.md"
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    files = [yaml.safe_load(text) for text in blocks(page, "yaml")]
    scripts = blocks(page, "sh") + blocks(page, "console") + [file["run"] for file in files if "run" in file]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
    sets = [file for file in files if file.get("kind") == "JobSet"]
    assert (len(scripts), len(files), len(sets)) == (8, 3, 2)
    for file in sets:
        assert file["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        name, (hosts,) = file["metadata"]["name"], file["spec"]["replicatedJobs"]
        first, job = f"{name}-{hosts['name']}-0-0.{name}:8476", hosts["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        given = dict(re.findall(r"--parallel\.(\S+)=(\S+)", " ".join(container["args"])))
        assert job["parallelism"] == job["completions"] == int(given.get("processes", job["completions"]))
        assert given.get("coordinator", first) == first and (
            "google.com/tpu" in container["resources"]["limits"]
        ) != bool(given)
