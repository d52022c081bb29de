"""A run that was left and gone on with is the run that was not, bit for bit, however it is spread; dropout on."""

import json

import pytest

from tests.helpers import run_command
from tests.parallel.resumes import STRATEGIES

pytestmark = pytest.mark.slow  # nine runs; what each of them is made of is held by quicker tests


@pytest.fixture(scope="module")
def found(tmp_path_factory, text_file):
    directory = tmp_path_factory.mktemp("resumes")
    command = ("-m", "tests.parallel.resumes", str(text_file), str(directory))
    done = run_command(*command, cwd=directory, deadline=500, JAX_NUM_CPU_DEVICES="4")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", STRATEGIES)
def test_resumed_is_uninterrupted(found, name):
    expected = {"left_at": 3, "lines": 8, "lines_equal": True, "steps": [6, 6], "parameters_equal": True}
    assert found[name] == expected
