"""GPUs without a GPU: the real compiler, the real training step. A minute or two, so by `python -m pytest -m slow`.

One process compiles all of them: XLA's GPU compiler stays loaded for the life of one, beside the TPU's.
"""

import importlib.metadata
import json

import pytest

from jaxgpt.config.presets import gpt2
from jaxgpt.parallel.device import PEAKS, attention_flops
from jaxgpt.tools.plan.topology import TARGETS
from tests.conftest import REPOSITORY
from tests.helpers import run_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not {"jax-cuda13-plugin", "nvidia-cudnn-cu13"} <= {d.name for d in importlib.metadata.distributions()},
        reason='XLA\'s GPU compiler or cuDNN is not here: pip install ".[plan-gpu]"',
    ),
]

COMPILE = """
import dataclasses, json, sys
import jax
sys.path.insert(0, sys.argv[1])
from gpt2_124m import experiment as gpt2_124m
from jaxgpt.errors import UserError
from jaxgpt.parallel.device import compute_options
from jaxgpt.tools.plan.topology import TARGETS
from jaxgpt.tools.plan.plan import make_plan
from jaxgpt.tools.plan.hlo import read_program
from jaxgpt.tools.plan.topology import topology_devices

def choose(topology, **train):
    devices = topology_devices(topology)
    chosen = compute_options(gpt2_124m.model, dataclasses.replace(gpt2_124m.train, **train), devices[0])
    return [devices[0].device_kind, [d.process_index for d in devices], chosen.reason]

def count_tpu_products():
    sharding = jax.sharding.SingleDeviceSharding(topology_devices("v5e:1x1")[0])
    x = jax.ShapeDtypeStruct((512, 512), "bfloat16", sharding=sharding)
    return read_program(jax.jit(lambda x: x @ x).lower(x).compile().as_text()).flops / (2 * 512**3)

def plan(topology, *, batch_size=480, model={}, train={}, **parallel):
    e = dataclasses.replace(
        gpt2_124m,
        model=dataclasses.replace(gpt2_124m.model, **({"scan_layers": True} | model)),  # which compiles faster
        train=dataclasses.replace(gpt2_124m.train, batch_size=batch_size, **train),
        parallel=dataclasses.replace(gpt2_124m.parallel, **parallel),
    )
    try:
        return make_plan(e, e.model.vocab_size, topology=topology).to_json()
    except UserError as error:
        return {"error": str(error)}

small = dict(n_layer=1, n_embd=256, n_head=4, block_size=256, vocab_size=256)
found = dict(
    single=plan("h200:1"),
    pmap=plan("h200:8"),
    data=plan("h200:8", strategy="mesh"),
    fsdp=plan("h200:8", strategy="mesh", fsdp=8),
    unscanned=plan("h200:8", strategy="mesh", fsdp=8, model=dict(n_layer=2, scan_layers=False)),
    tensor=plan("h200:8", strategy="mesh", fsdp=2, tensor=2),
    hosts=plan("h200:4x8", strategy="mesh", fsdp=8),
    options=[choose(f"{name}:2x2", dtype="float32") for name in TARGETS],
    rtx6000pro=plan("rtx6000pro:2x1", batch_size=8, model=small | dict(n_embd=384)),  # heads of 96
    tpu=count_tpu_products(),
    heads=plan("h200:1", batch_size=8, model=small | dict(n_head=1)),
    dtype=plan("h200:1", batch_size=8, model=small, train=dict(dtype="float32", attention="cudnn")),
    large=plan("rtx6000pro:1", batch_size=1, model=small | dict(n_embd=1024, n_head=8, vocab_size=2**24)),
)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    # As `jaxgpt plan` sets them. The tests hold no TPU, so that they need not wait for one another to let go of libtpu.
    env = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    directory = tmp_path_factory.mktemp("plans")
    done = run_command("-c", COMPILE, str(REPOSITORY / "experiments"), cwd=directory, deadline=600, **env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no warning of a GPU or of CUDA that is not there
    return json.loads(done.stdout)


GPT2 = ("single", "pmap", "data", "fsdp", "tensor", "hosts")


@pytest.mark.parametrize("name", GPT2)
def test_the_program_computes_what_the_model_does(found, name):
    plan = found[name]
    assert plan["fits"] and plan["parameters"] == 124_373_760
    assert plan["available"] == int(0.75 * PEAKS["NVIDIA H200"].memory)
    # Attention's five products backward and two forward, of the half that the mask lets through; remat repeats none.
    expected = plan["flops_per_token"] + (7 / 2 - 6) * attention_flops(gpt2("124M"))
    assert plan["executed_flops_per_token"] == pytest.approx(expected, rel=0.01)
    calls = 12 * plan["accumulation"]
    kernels = plan["kernels"]
    assert kernels["cuDNN attention forward"] == kernels["cuDNN attention backward"] == calls
    assert kernels["Triton product"] >= 12 * calls  # six a layer forward, at least as many backward, and the logits
    assert 0.3 < plan["mfu"] < 1.1
    # One after another, kernels of which some wait for memory and some for arithmetic take longer than either bound.
    assert max(plan["compute_seconds"], plan["memory_seconds"]) < plan["serial_seconds"] < 3 * plan["step_seconds"]


def test_state_is_sharded(found):
    single = found["single"]
    assert single["state_memory"] == pytest.approx(12 * single["parameters"], rel=0.001)
    assert found["pmap"]["state_memory"] == single["state_memory"]
    assert found["fsdp"]["state_memory"] == pytest.approx(single["state_memory"] / 8, rel=0.001)
    assert found["hosts"]["state_memory"] == found["fsdp"]["state_memory"]
    assert found["tensor"]["state_memory"] == pytest.approx(single["state_memory"] / 4, rel=0.02)


def totals(plan) -> dict[tuple[str, int], dict]:
    return {(e["kind"], e["devices"]): e for e in plan["exchanges"]}


@pytest.mark.parametrize("name", ["pmap", "data"])
def test_gradients_are_reduced_once_per_step(found, name):
    assert found["single"]["exchanges"] == []
    [(kind, total)] = totals(found[name]).items()
    assert kind == ("all-reduce", 8) and found[name]["accumulation"] == 5
    assert total["bytes"] == pytest.approx(4 * 124_373_760, rel=0.001)
    assert total["seconds"] == pytest.approx(2 * 7 / 8 * total["bytes"] / 450e9)


def test_a_mesh_gathers_within_hosts_and_reduces_between_them(found):
    gathers = totals(found["hosts"])["all-gather", 8]
    assert gathers["seconds"] == pytest.approx(7 / 8 * gathers["bytes"] / 450e9)
    between = totals(found["hosts"])["all-reduce", 4]
    assert between["seconds"] == pytest.approx(2 * 3 / 4 * between["bytes"] / 50e9)
    assert between["bytes"] == pytest.approx(4 * 124_373_760 / 8, rel=0.001)  # once, by each for its part
    assert {("all-gather", 8), ("reduce-scatter", 8)} <= set(totals(found["fsdp"]))
    assert {("all-gather", 2), ("reduce-scatter", 2), ("all-reduce", 2)} <= set(totals(found["tensor"]))


def test_the_loop_over_micro_batches_is_not_pipelined(found):
    """XLA would repeat the forward pass for it."""
    kernels, calls = found["unscanned"]["kernels"], 2 * found["unscanned"]["accumulation"]
    assert kernels["cuDNN attention forward"] == kernels["cuDNN attention backward"] == calls == 10


def test_other_devices(found):
    reason = "float32, plain attention (cudnn: it needs a 16-bit dtype, not float32)"
    assert found["options"] == [[target.name, [0, 0, 1, 1], reason] for target in TARGETS.values()]
    assert found["rtx6000pro"]["kernels"]["cuDNN attention forward"] == 1
    assert found["rtx6000pro"]["interconnect_seconds"] is None  # between hosts without a known network
    assert found["tpu"] == 1  # both compilers live in one process


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heads", "The head dim must be <= 128 and a multiple of 8, but got 256): take --train.attention xla"),
        ("dtype", "train.attention=cudnn is not available here: it needs a 16-bit dtype, not float32. Use auto"),
        ("large", "does not fit on 1 x NVIDIA RTX PRO 6000 Blackwell Server Edition, whatever the micro-batch"),
    ],
)
def test_what_cannot_be_planned(found, name, message):
    assert message in found[name]["error"] and "\n" not in found[name]["error"]


def test_the_command_is_quiet(tmp_path, text_file):
    """Though the plugin is installed without CUDA, and JAX_PLATFORMS is unset."""
    shape = "--model.n-layer 1 --model.n-head 1 --model.n-embd 8 --model.block-size 8 --train.batch-size 2".split()
    command = ("-m", "jaxgpt", "plan", *shape, "--data.path", str(text_file))
    env = {"JAX_PLATFORMS": "", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = run_command(*command, "--topology", "h200:2", cwd=tmp_path, **env)
    assert done.returncode == 0 and done.stderr == ""
    assert "2 x NVIDIA H200, bfloat16, cudnn attention" in done.stdout
    here = "from jaxgpt.parallel.jax_setup import configure_jax; configure_jax(); import jax; print(jax.devices())"
    done = run_command("-c", here, cwd=tmp_path, **env)
    assert done.returncode == 0
    assert "cuFFT" not in done.stderr and "CUDA" not in done.stderr
