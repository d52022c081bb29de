"""What XLA on CPU computes is right, within rounding: see `tests.canary`."""

import itertools
import json

import jax
import jaxlib
import pytest

from tests.canary import deviations, known_programs
from tests.conftest import REPOSITORY
from tests.helpers import run_command

MODELS = 2  # without jit each takes a minute and a half of compiling one operation after the other


def explain(found, flags):
    where = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, XLA_FLAGS={flags!r}"
    return "\n".join([f"{where}: compiled programs differ from float64 by more than rounding", *map(json.dumps, found)])


def test_sums_that_were_computed_wrongly_are_right():
    """Without the flag that `configure_jax` sets, each of them is wrong with jaxlib 0.10.2."""
    for program in itertools.islice(known_programs(), 4):
        found, _ = deviations(program)
        assert not found, explain(found, "as in tests/conftest.py")


@pytest.mark.slow
def test_programs_of_a_gpts_shapes_are_right(tmp_path):
    done = run_command("-m", "tests.canary", str(MODELS), cwd=REPOSITORY, deadline=800, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    *found, last = map(json.loads, done.stdout.splitlines())
    assert not found, explain(found, last["flags"])
    assert last["programs"] == 5 + 7 * MODELS and last["numbers"] > 10**5
