"""GPUs without a GPU: the real compiler, the real training step. A minute or two, so by `python -m pytest -m slow`.

One process compiles all of them: XLA's GPU compiler stays loaded for the life of one, beside the TPU's.
"""

import importlib.metadata
import json

import pytest

from jaxgpt.parallel.jax_setup import NO_MERGED_PRODUCTS
from jaxgpt.parallel.limits import PEAKS, attention_flops
from jaxgpt.presets import gpt2
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
import dataclasses, json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/benchmarks"]
from gpt2_124m import experiment as gpt2_124m
from jaxgpt.errors import UserError
from jaxgpt.tools.plan import plan as plans
from gpu.setting import Setting
from gpu.steps import gpt2_experiment
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.tools.plan.topology import topology_devices
from roofline import compile_program
from traffic import count_products, read_traffic

texts = []
read_collectives = plans.read_collectives
plans.read_collectives = lambda text: (texts.append(text), read_collectives(text))[1]

def plan(topology, *, batch_size=480, model={}, train={}, **parallel):
    e = dataclasses.replace(
        gpt2_124m,
        model=dataclasses.replace(gpt2_124m.model, **({"scan_layers": True} | model)),  # which compiles faster
        train=dataclasses.replace(gpt2_124m.train, batch_size=batch_size, **train),
        parallel=dataclasses.replace(gpt2_124m.parallel, **parallel),
    )
    try:
        found = dataclasses.asdict(plans.make_plan(e, e.model.vocab_size, topology=topology))
        flops = count_products(texts[-1]) * found["devices"] / found["tokens_per_step"]
        return found | {"kernels": read_traffic(texts[-1]).kernels, "program_flops_per_token": flops}
    except UserError as error:
        return {"error": str(error)}

small = dict(n_layer=1, n_embd=256, n_head=4, block_size=256, vocab_size=256)
found = dict(
    single=plan("h200:1"),
    pmap=plan("h200:8"),
    fsdp=plan("h200:8", strategy="mesh", fsdp=8),
    unscanned=plan("h200:8", strategy="mesh", fsdp=8, model=dict(n_layer=2, scan_layers=False)),
    hosts=plan("h200:4x8", strategy="mesh", fsdp=8),
    heads=plan("h200:1", batch_size=8, model=small | dict(n_head=1)),
    large=plan("rtx6000pro:1", batch_size=1, model=small | dict(n_embd=1024, n_head=8, vocab_size=2**24)),
)
step = compile_program(make_trainer(gpt2_experiment(Setting(), 1024), topology_devices("h100:1")).lower())
found["step"] = dict(bytes=step.bytes, launches=step.launches, temporaries=step.temporaries, graphs=step.graphs)
found["step"]["others"] = step.others
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    # As `jaxgpt plan` sets them. The tests hold no TPU, so that they need not wait for one another to let go of libtpu.
    env = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env["XLA_FLAGS"] = NO_MERGED_PRODUCTS  # as every entrance sets it
    directory = tmp_path_factory.mktemp("plans")
    done = check_command("-c", COMPILE, str(REPOSITORY / "experiments"), cwd=directory, deadline=600, **env)
    assert done.stderr == ""  # no warning of a GPU or of CUDA that is not there
    return json.loads(done.stdout)


GPT2 = ("single", "pmap", "fsdp", "hosts")


@pytest.mark.parametrize("name", GPT2)
def test_the_program_computes_what_the_model_does(found, name):
    plan = found[name]
    assert plan["fits"] and plan["parameters"] == 124_373_760
    assert plan["available"] == int(0.75 * PEAKS["NVIDIA H200"].memory)
    # The program's own products: five of attention's backward and two forward, of the half that the mask lets through.
    expected = plan["flops_per_token"] + (7 / 2 - 6) * attention_flops(gpt2("124M"))
    assert plan["program_flops_per_token"] == pytest.approx(expected, rel=0.01)
    assert 0.97 * expected < plan["executed_flops_per_token"] < expected  # a lower bound
    calls = 12 * plan["accumulation"]
    kernels = plan["kernels"]
    assert kernels["cuDNN attention forward"] == kernels["cuDNN attention backward"] == calls
    assert kernels["Triton product"] >= 12 * calls  # six a layer forward, at least as many backward, and the logits


def test_state_is_sharded(found):
    single = found["single"]
    assert single["state_memory"] == pytest.approx(12 * single["parameters"], rel=0.001)
    assert found["pmap"]["state_memory"] == single["state_memory"]
    assert found["fsdp"]["state_memory"] == pytest.approx(single["state_memory"] / 8, rel=0.001)
    assert found["hosts"]["state_memory"] == found["fsdp"]["state_memory"]


def totals(plan) -> dict[tuple[str, int], dict]:
    return {(e["kind"], e["devices"]): e for e in plan["exchanges"]}


def test_gradients_are_reduced_once_per_step(found):
    assert found["single"]["exchanges"] == []
    [(kind, total)] = totals(found["pmap"]).items()
    assert kind == ("all-reduce", 8) and found["pmap"]["accumulation"] == 5
    assert total["bytes"] == pytest.approx(4 * 124_373_760, rel=0.001)


def test_a_mesh_gathers_within_hosts_and_reduces_between_them(found):
    between = totals(found["hosts"])["all-reduce", 4]
    assert between["bytes"] == pytest.approx(4 * 124_373_760 / 8, rel=0.001)  # once, by each for its part
    assert {("all-gather", 8), ("reduce-scatter", 8)} <= set(totals(found["fsdp"]))


def test_the_loop_over_micro_batches_is_not_pipelined(found):
    """XLA would repeat the forward pass for it."""
    kernels, calls = found["unscanned"]["kernels"], 2 * found["unscanned"]["accumulation"]
    assert kernels["cuDNN attention forward"] == kernels["cuDNN attention backward"] == calls == 10


def test_a_step_on_an_h100_is_one_graph_and_moves_no_more_than_its_forms_need(found):
    """GPT-2 124M, 32 x 1,024. Each form of `layers.gpu` that is gone, or merged products of q and k, add 2 GB or more."""
    step = found["step"]
    assert (step["graphs"], step["others"]) == (1, [])
    assert step["bytes"] <= 95e9 and step["launches"] <= 800 and step["temporaries"] <= 13 * 2**30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heads", "The head dim must be <= 128 and a multiple of 8, but got 256.): take --train.attention plain, or"),
        ("large", "does not fit on 1 x NVIDIA RTX PRO 6000 Blackwell Server Edition, whatever the micro-batch"),
    ],
)
def test_what_cannot_be_planned(found, name, message):
    assert message in found[name]["error"] and "\n" not in found[name]["error"]


MUON = """
from jaxgpt import Experiment, GPTConfig, OptimConfig, TrainConfig
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.tools.plan.topology import topology_devices

model = GPTConfig(vocab_size=64, block_size=32, n_layer=3, n_head=2, n_embd=32)
for device in (*topology_devices("h100:1"), None):
    for dtype in ("auto", "float32"):
        e = Experiment(name="muon", model=model, optim=OptimConfig(name="muon"), train=TrainConfig(dtype=dtype))
        print("tensor<12x32x32xbf16>" in make_trainer(e, device and [device]).lower().as_text())
"""


def test_muon_multiplies_in_bfloat16_on_gpus_that_train_in_it(tmp_path):
    done = check_command("-c", MUON, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert done.stdout.split() == ["True", "False", "False", "False"]
