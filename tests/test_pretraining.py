"""docs/pretraining.md: its commands are taken from the page and run at a reduced size, by several processes, and stopped.

A full disk is in runs/test_checkpoint.py, kills at random instants in faults/test_short.py, a process that dies or hangs in
parallel/test_multihost.py, and the page's `bash` blocks, which are the laptop's recipe, in test_docs.py.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxgpt.cli.main import COMMANDS, bind_command
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.metrics import read_metrics
from tests.conftest import REPOSITORY
from tests.faults.kills import differences
from tests.helpers import check_command
from tests.parallel.eight_devices import CURVES_EQUAL
from tests.parallel.test_multihost import free_port

PAGE = (REPOSITORY / "docs" / "pretraining.md").read_text(encoding="utf-8")
DEADLINE = 240  # seconds, after which a process is killed
STEPS = 80  # enough for a signal to find the run in its middle
SMALL = f"""--model.n-layer 1 --model.n-head 4 --model.n-embd 16 --model.block-size 16 --model.vocab-size 256
    --optim.warmup-steps 2 --train.batch-size 8 --train.steps {STEPS} --train.log-every 1 --train.eval-every {STEPS}
    --train.eval-tokens 64 --train.checkpoint-every 10 --train.sample-tokens 5""".split()


def list_commands(text):
    """Each `jaxgpt COMMAND ...` in a fence, as words: also inside the quoted command of gcloud, and over several lines."""
    command = re.compile(rf"\bjaxgpt (?:{'|'.join(COMMANDS)}) (?:\"[^\"\n]*\"|[^\"&#\n])*")
    for fence in re.findall(r"^```\w+\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield from (shlex.split(found)[1:] for found in command.findall(fence.replace("\\\n", " ")))


RECIPES = {
    number: list(list_commands(body))
    for number, body in re.findall(r"^## (\d)\. .*?\n(.*?)(?=^## )", PAGE, flags=re.MULTILINE | re.DOTALL)
}


def test_every_command_is_one_and_plans_what_it_trains(monkeypatch):
    """The options exist, the experiment file builds, and a recipe trains on as many tokens as its plan has counted."""
    monkeypatch.chdir(REPOSITORY)
    bound = {tuple(words): bind_command(*words).keywords for words in list_commands(PAGE)}
    assert list(RECIPES) == list("123456") and len(bound) >= 10
    assert RECIPES["2"][1] == RECIPES["3"][1] and RECIPES["3"][1][0] == "train"  # which is run once, below
    for number in "12345":
        of = {words[0]: bound[tuple(words)] for words in RECIPES[number]}
        trained = of["train"]["experiment"].train.steps * 491_520
        assert trained == pytest.approx(1e9 * float(of["plan"]["tokens"].removesuffix("B")), rel=0.01)


@pytest.fixture(scope="module")
def place(tmp_path_factory, text_file):
    """A working directory with experiments, and a few kilobytes of tokens that `jaxgpt prepare` has made."""
    directory = tmp_path_factory.mktemp("pretraining")
    (directory / "experiments").symlink_to(REPOSITORY / "experiments")
    check_command(
        *["-m", "jaxgpt", "prepare", str(text_file), "--out", "tokens", "--tokenizer", "byte"],
        cwd=directory,
        deadline=60,
    )
    return directory


# What is set for each of two processes: by GKE on the hosts of a slice, with what makes JAX believe it without a chip and
# without Google's metadata server; and by srun.
TPU = "TPU_WORKER_HOSTNAMES=127.0.0.1,127.0.0.1 TPU_WORKER_ID={} JAX_FORCE_TPU_INIT=1 MEGASCALE_COORDINATOR_ADDRESS= "
TPU += "MEGASCALE_NUM_SLICES=1 MEGASCALE_SLICE_ID=0"
SLURM = "SLURM_JOB_ID=7 SLURM_STEP_NODELIST=127.0.0.1 SLURM_NTASKS=2 SLURM_PROCID={} SLURM_LOCALID=0"
MACHINES = {"1": [(1, "")], "2": [(4, "")], "4": [(2, TPU)] * 2, "5": [(2, SLURM)] * 2}  # devices of each process


def run(place, number, name, stop=None):
    """Run the recipe; a signal ends all of its processes once steps are saved and logged. Return what process 0 said."""
    [command] = [words for words in RECIPES[number] if words[0] == "train"]
    words = [sys.executable, "-m", "jaxgpt", *command, "--data.path", "tokens", "--run-dir", name, *SMALL]
    port, started, told, deadline = str(free_port()), [], place / f"{name}.0", time.monotonic() + DEADLINE
    metrics, saved = place / name / "metrics.jsonl", Checkpoints(place / name / "checkpoints").steps
    try:
        for process, (devices, variables) in enumerate(MACHINES[number]):
            env = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_NUM_CPU_DEVICES": str(devices)}
            env |= {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_PORT": port}
            env |= dict(variable.split("=") for variable in variables.format(process).split())
            with told.with_suffix(f".{process}").open("w") as err:
                how = dict(cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=err, stderr=err)
                started.append(subprocess.Popen(words, **how))
        while stop is not None and (len(read_metrics(metrics)) < STEPS // 4 or not saved()):
            assert time.monotonic() < deadline and started[0].poll() is None, told.read_text()
            time.sleep(0.01)
        for process in started if stop is not None else ():
            process.send_signal(stop)
        codes = [process.wait(max(1, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = told.read_text()
    expected = {None: 0, signal.SIGTERM: 1, signal.SIGKILL: -signal.SIGKILL}[stop]
    assert set(codes) == {expected}, (codes, said)
    return said


@pytest.fixture(scope="module")
def finished(place):
    """Names of runs that nothing has stopped, by recipe, each trained once."""
    done = {}

    def finish(number):
        if number not in done:
            done[number] = f"recipe-{number}"
            said = run(place, number, done[number])
            assert f"next: jaxgpt sample {done[number]}" in said and "the tokenizer is tokens/tokenizer.json" in said
        return done[number]

    return finish


def losses(directory):
    return [x["loss"] for x in read_metrics(directory / "metrics.jsonl") if "loss" in x]


@pytest.mark.slow
@pytest.mark.parametrize("number", MACHINES)
def test_a_recipe_trains_and_all_machines_find_the_same_losses(place, finished, number):
    found, one = (losses(place / finished(n)) for n in (number, "1"))
    assert len(found) == STEPS
    np.testing.assert_allclose(found, one, **CURVES_EQUAL)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "stop"), [("2", signal.SIGKILL), ("5", signal.SIGTERM)])
def test_a_preempted_recipe_goes_on_bit_for_bit(place, finished, number, stop):
    whole, name = finished(number), f"preempted-{number}"
    said = run(place, number, name, stop)
    assert ("SIGTERM: saved step" in said) == (stop == signal.SIGTERM), said
    kept = max(Checkpoints(place / name / "checkpoints").steps())
    lost = len(losses(place / name)) - kept  # steps are so short here that the last save may not have been complete
    assert lost == 0 if stop == signal.SIGTERM else 0 <= lost <= 20
    assert f"continuing at step {kept}" in run(place, number, name)
    assert differences(place / whole, place / name) == 0
