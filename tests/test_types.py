"""The public interface as the type checker of a user's project sees it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

RIGHT = """
import jax
import jaxgpt

experiment = jaxgpt.Experiment(name="x", model=jaxgpt.GPTConfig(n_layer=2), train=jaxgpt.TrainConfig(steps=10))
run = jaxgpt.fit(experiment, run_dir="runs/x", fresh=True)
again: jaxgpt.Run = jaxgpt.load("runs/x", which="last")
text = run.sample("The", max_new_tokens=8, temperature=0.5, top_k=3, stop=("x",), seed=1)
for piece in run.stream("The", max_new_tokens=8):
    print(piece.upper())
greedy = jaxgpt.Sampling(greedy=True)
out = jaxgpt.generate(run.model, run.params, [[1, 2]], key=jax.random.key(0), max_new_tokens=4, sampling=greedy)
print(out.tokens, run.score(["a"])[0].bits)
page: str = jaxgpt.xray(run, "The")
"""

# Each line after the imports is one mistake.
WRONG = """
from jaxgpt import Run, GPT
jaxgpt.GPTConfig(n_layers=2)
def f(run: Run): jaxgpt.generate(run.model, run.params, [[1]], key=jax.random.key(0), max_new_token=4)
def g(run: Run): run.score("a")
def h(run: Run): run.sample("a", max_new_token=4)
fitted: int = jaxgpt.fit
"""


def test_right_calls_have_no_errors_and_each_wrong_one_has_one(tmp_path):
    lines = (RIGHT + WRONG).splitlines()
    first = next(number for number, line in enumerate(lines, 1) if "n_layers" in line)
    (tmp_path / "user.py").write_text(RIGHT + WRONG)
    checker = shutil.which("pyrefly", path=str(Path(sys.executable).parent)) or shutil.which("pyrefly")
    if checker is None:
        pytest.skip("pyrefly is not installed")
    command = [checker, "check", "--search-path", REPOSITORY, "--python-interpreter-path", sys.executable]
    command += ["--output-format", "json", "user.py"]
    (tmp_path / "pyrefly.toml").touch()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    found = {error["line"] for error in json.loads(done.stdout)["errors"] if error["severity"] == "error"}
    assert found == set(range(first, len(lines) + 1))
    assert (REPOSITORY / "jaxgpt" / "py.typed").exists()
