"""A GPU's program that draws tokens, by the real compiler without a GPU: half a minute, so by `python -m pytest -m slow`."""

import importlib.metadata
import json

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import check_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not {"jax-cuda13-plugin", "nvidia-cudnn-cu13"} <= {d.name for d in importlib.metadata.distributions()},
        reason='XLA\'s GPU compiler or cuDNN is not here: pip install ".[plan-gpu]"',
    ),
]

COMPILE = """
import json, sys
sys.path[:0] = [sys.argv[1] + "/benchmarks"]
from decode_roofline import BURST, compile_program, configure_jax, lower, per_token, topology_devices

configure_jax()
found, [device] = [], topology_devices("h100:1")
for rows, weights in ((1, "bfloat16"), (1, "int8"), (8, "bfloat16")):
    program = compile_program(lower(device, "GPT-2 124M", weights, rows, 256, "greedy"))
    copied = max(k.bytes for k in program.kernels if k.kind == "copy")
    found.append((*per_token(program, BURST), program.graphs, program.others, copied))
print(json.dumps(found))
"""


def test_a_token_is_one_graph_of_few_kernels(tmp_path):
    env = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = check_command("-c", COMPILE, str(REPOSITORY / "experiments"), cwd=tmp_path, deadline=300, **env)
    one, one_int8, eight = json.loads(done.stdout)
    for (kernels, _, graphs, others, copied), most in ((one, 170), (one_int8, 170), (eight, 140)):
        assert kernels <= most and copied < 1000  # caches are updated in place
        # One graph is the body of the loop, and before and after it the host launches a few kernels. It never waits.
        assert 1 <= graphs <= 3 and len(others) < 10 and others.count("kWhile") == 1 and "kConditional" not in others
    weights = 124_318_464  # as int8. Their scales, and activations around them in float32, are 2 MB
    assert one[1] < 2 * weights + 12e6 and one_int8[1] < one[1] - weights + 2.5e6 and eight[1] < 2 * weights + 120e6
