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
import pytest

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


def check(name: str, counts: dict[str, int]) -> None:
    for kind, seen in SEEN[name].items():
        headroom = 1.0 if kind == "donated" else HEADROOM_OF.get(kind, HEADROOM)
        assert counts[kind] <= seen * headroom, (
            f"{kind} of a step on {name}: got {counts[kind]:,}, the limit is {seen * headroom:,.0f}, which is {headroom} times "
            f"the {seen:,} seen when this was written. If it is worth it, put what `python -m tests.parallel.test_flops` "
            "prints into SEEN."
        )
    assert counts["donated"] == SEEN[name]["donated"]  # the whole state


def test_a_step_costs_no_more():
    trainer = trainer_of("cpu")
    check("cpu", counts_of(trainer))
    assert SEEN["cpu"]["donated"] == len(jax.tree.leaves(trainer.abstract_state))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler, libtpu, is not installed")
def test_a_step_on_a_tpu_costs_no_more(tmp_path):
    """In a process of its own, for libtpu stays in the one that loads it."""
    env = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # beside another process that compiles: no TPU is opened
    done = run_command("-m", "tests.parallel.test_flops", "tpu", "--json", cwd=tmp_path, deadline=200, **env)
    assert done.returncode == 0, done.stderr
    check("tpu", json.loads(done.stdout))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    found = {name: counts_of(trainer_of(name)) for name in [a for a in sys.argv[1:] if a in SEEN] or SEEN}
    if "--json" in sys.argv:
        print(json.dumps(next(iter(found.values()))))
    else:
        pprint.pp({name: found.get(name, seen) for name, seen in SEEN.items()})
