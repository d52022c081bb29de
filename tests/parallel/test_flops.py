"""What a training step costs, in counts that no busy machine disturbs: a guard against a step that grows unseen.

`python -m tests.parallel.test_flops` prints SEEN as it is now. What a TPU's compiler makes of one, tests/tools/plan looks at.
"""

import os
import pprint
import re

import jax

from jaxgpt.experiment import Experiment, ParallelConfig, TrainConfig
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.parallel.trainer import Trainer, make_trainer
from tests.helpers import script

# One step, as jax 0.10.2 compiles it. jax 0.12.0.1 had much the same.
# Instructions: as often as the text has them, those inside fusions as well.
SEEN = {
    "MFLOP of products": 3964,
    "KB read and written": 427517,
    "KB of temporaries": 52409,
    "fusion instructions": 510,
    "copy instructions": 129,
    "transpose instructions": 32,
    "dot instructions": 99,
    "donated": 110,
}
# Compilers differ from release to release, so a limit is this much above what was seen; arithmetic is ours alone.
HEADROOM = 1.15
HEADROOM_OF = {"MFLOP of products": 1.01, "donated": 1.0}

# nanoGPT's configuration for CPUs, as experiments/shakespeare_char.py has it.
EXPERIMENT = Experiment(
    name="cpu",
    model=GPTConfig(vocab_size=65, block_size=64, n_layer=4, n_head=4, n_embd=128, bias=False, activation="gelu"),
    optim=OptimConfig(grad_clip=1.0),
    train=TrainConfig(batch_size=12),
    parallel=ParallelConfig(strategy="single"),
)


def counts_of(trainer: Trainer) -> dict[str, int]:
    """Of one training step, by kind."""
    compiled = trainer.lower().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    traffic = script("benchmarks/traffic")
    return {
        "MFLOP of products": round(traffic.count_products(text) / 1e6),
        "KB read and written": round(traffic.read_traffic(text).bytes_accessed / 1e3),
        "KB of temporaries": round(memory.temp_size_in_bytes / 1e3),
        **{f"{op} instructions": len(re.findall(rf" {op}\(", text)) for op in ("fusion", "copy", "transpose")},
        "dot instructions": len(re.findall(r" (?:dot|convolution)\(", text)),
        # Results that lie where arguments lay: what the step returns of its state needs no memory of its own.
        "donated": len(re.findall(r"(?:may|must)-alias", text.split("\n", 1)[0])),
    }


def test_a_step_costs_no_more():
    trainer = make_trainer(EXPERIMENT)
    counts = counts_of(trainer)
    for kind, seen in SEEN.items():
        limit = seen * HEADROOM_OF.get(kind, HEADROOM)
        assert counts[kind] <= limit, (
            f"{kind} of a step: got {counts[kind]:,}, the limit is {limit:,.0f}, for {seen:,} were seen when this was "
            "written. If it is worth it, put what `python -m tests.parallel.test_flops` prints into SEEN."
        )
    assert counts["donated"] == SEEN["donated"] == len(jax.tree.leaves(trainer.abstract_state))  # the whole state


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    pprint.pp(counts_of(make_trainer(EXPERIMENT)))
