"""What a training step costs, in counts that no busy machine disturbs: a guard against a step that grows unseen.

`python -m tests.parallel.test_flops` prints SEEN as it is now, and `python -m tests.parallel.test_flops tpu` the part that wants libtpu.
"""

import importlib.util
import json
import os
import pprint
import re
import sys

import jax
import numpy as np
import pytest

from jaxgpt.batch import Batch
from jaxgpt.config import Experiment, GPTConfig, OptimConfig, ParallelConfig, TrainConfig
from jaxgpt.parallel.trainer import Trainer, make_trainer
from jaxgpt.tools.plan.hlo import read_program
from jaxgpt.tools.plan.topology import tpu_devices
from tests.helpers import run_command

# One step, as jax 0.10.2 and libtpu 0.0.42.1 compile it. jax 0.12.0.1 had much the same on CPU.
# Instructions: as often as the text has them, those inside fusions as well.
SEEN = {
    "cpu": {
        "MFLOP of products": 3964,
        "KB read and written": 427517,
        "KB of temporaries": 52409,
        "fusion instructions": 510,
        "copy instructions": 129,
        "transpose instructions": 32,
        "dot instructions": 99,
        "kernels": 0,
        "donated": 111,
    },
    "tpu": {
        "MFLOP of products": 10469,
        "KB read and written": 48287,
        "KB of temporaries": 7855,
        "fusion instructions": 205,
        "copy instructions": 28,
        "transpose instructions": 10,
        "dot instructions": 39,
        "kernels": 4,
        "donated": 63,
    },
}
# Compilers differ from release to release, so a limit is this much above what was seen; arithmetic is ours alone.
HEADROOM = 1.15
HEADROOM_OF = {"MFLOP of products": 1.01}

EXPERIMENTS = {
    # nanoGPT's configuration for CPUs, as experiments/shakespeare_char.py has it.
    "cpu": Experiment(
        name="cpu",
        model=GPTConfig(vocab_size=65, block_size=64, n_layer=4, n_head=4, n_embd=128, bias=False, activation="gelu"),
        optim=OptimConfig(grad_clip=1.0),
        train=TrainConfig(batch_size=12),
        parallel=ParallelConfig(strategy="single"),
    ),
    # Heads of 64 and splash attention, as in GPT-2; small, for its compiler takes minutes for the whole of it.
    "tpu": Experiment(
        name="tpu",
        model=GPTConfig(vocab_size=512, block_size=256, n_layer=2, n_head=4, n_embd=256, bias=False),
        train=TrainConfig(batch_size=4),
        parallel=ParallelConfig(strategy="single"),
    ),
}


def trainer_of(name: str) -> Trainer:
    return make_trainer(EXPERIMENTS[name], tpu_devices("v5e:1x1") if name == "tpu" else None)


def counts_of(trainer: Trainer) -> dict[str, int]:
    """Of one training step, by kind."""
    compiled = trainer.lower().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    program = read_program(text)
    return {
        "MFLOP of products": round(program.flops / 1e6),
        "KB read and written": round(program.bytes_accessed / 1e3),
        "KB of temporaries": round(memory.temp_size_in_bytes / 1e3),
        **{f"{op} instructions": len(re.findall(rf" {op}\(", text)) for op in ("fusion", "copy", "transpose")},
        "dot instructions": len(re.findall(r" (?:dot|convolution)\(", text)),
        "kernels": program.kernels.get("Pallas", 0),
        # Results that lie where arguments lay: what the step returns of its state needs no memory of its own.
        "donated": len(re.findall(r"(?:may|must)-alias", text.split("\n", 1)[0])),
    }


@pytest.fixture(scope="module")
def cpu():
    return trainer_of("cpu")


def check(name: str, counts: dict[str, int]) -> None:
    for kind, seen in SEEN[name].items():
        headroom = 1.0 if kind == "donated" else HEADROOM_OF.get(kind, HEADROOM)
        assert counts[kind] <= seen * headroom, (
            f"{kind} of a step on {name}: got {counts[kind]:,}, the limit is {seen * headroom:,.0f}, which is {headroom} times "
            f"the {seen:,} seen when this was written. If it is worth it, put what `python -m tests.parallel.test_flops` "
            "prints into SEEN."
        )
    assert counts["donated"] == SEEN[name]["donated"]  # the whole state


def test_a_step_costs_no_more(cpu):
    check("cpu", counts_of(cpu))
    assert SEEN["cpu"]["donated"] == len(jax.tree.leaves(cpu.abstract_state))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler, libtpu, is not installed")
def test_a_step_on_a_tpu_costs_no_more(tmp_path):
    """In a process of its own, for libtpu stays in the one that loads it."""
    env = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # beside another process that compiles: no TPU is opened
    done = run_command("-m", "tests.parallel.test_flops", "tpu", "--json", cwd=tmp_path, deadline=200, **env)
    assert done.returncode == 0, done.stderr
    check("tpu", json.loads(done.stdout))


def test_nothing_is_compiled_after_the_first_step_and_evaluation(cpu):
    compiled = []

    def on_event(event: str, seconds: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    experiment = EXPERIMENTS["cpu"]
    rng = np.random.default_rng(0)
    shape = (experiment.train.batch_size, experiment.model.block_size)
    # Zeros, for to compile a model's own initialisation takes seconds; copied, since it is donated.
    state = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding, may_alias=False), cpu.abstract_state
    )
    key = jax.random.key(1)
    jax.monitoring.register_event_duration_secs_listener(on_event)
    after = []
    try:
        for _ in range(4):
            tokens = rng.integers(0, 65, (2, *shape)).astype(np.int32)
            batch = cpu.strategy.shard_batch(Batch(*tokens))
            before = jax.tree.leaves(state)
            state, metrics = cpu.train_step(state, batch, key)
            nats, _ = cpu.eval_step(cpu.merged_params(state), batch)
            assert np.isfinite(float(metrics["loss"])) and np.isfinite(float(nats))
            assert all(x.is_deleted() for x in before)  # donated, not copied
            after.append(len(compiled))
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
    assert after[0] > 0 and after == [after[0]] * 4, f"programs compiled after each step: {after}"


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    found = {name: counts_of(trainer_of(name)) for name in [a for a in sys.argv[1:] if a in SEEN] or SEEN}
    if "--json" in sys.argv:
        print(json.dumps(next(iter(found.values()))))
    else:
        pprint.pp({name: found.get(name, seen) for name, seen in SEEN.items()})
