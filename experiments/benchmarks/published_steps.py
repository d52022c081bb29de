"""How good is a plan? Plan the training steps whose times llm.c and MaxText publish.

    python experiments/benchmarks/published_steps.py NAME

docs/results/accelerators.md has what this printed, and what they measured. The model, the batch, the recomputation and the devices
are theirs; the compiled program is ours.
"""

import dataclasses
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0", "XLA_CLIENT_MEM_FRACTION": "0.9"}

from jaxgpt import DataConfig, Experiment, GPTConfig, ParallelConfig, TrainConfig
from jaxgpt.presets import gpt2
from jaxgpt.tools.plan.plan import format_plan, make_plan


def gpt2_model(size: str) -> GPTConfig:
    """Scan the largest one's layers, which compile in minutes otherwise."""
    return dataclasses.replace(gpt2(size), vocab_size=50_304, dropout=0.0, scan_layers=size == "1558M")


LLAMA = GPTConfig(
    vocab_size=32_000,
    block_size=2048,
    n_layer=32,
    n_head=32,
    n_embd=4096,
    mlp_dim=11_008,
    bias=False,
    norm="rmsnorm",
    activation="swiglu",
    position="rope",
    tie_embeddings=False,
    scan_layers=True,
    remat="dots",
)
WIDE = dataclasses.replace(LLAMA, n_head=64, head_dim=128, mlp_dim=28_672, remat="full")
# topology, model, sequences per step, sequences per device at once, state sharded over
SHAPES = {
    "llmc-124M": ("8xa100-80", gpt2_model("124M"), 512, 64, 1),
    "llmc-350M": ("8xa100-80", gpt2_model("350M"), 512, 64, 1),
    "llmc-1558M": ("8xh100", gpt2_model("1558M"), 1024, 16, 1),
    "maxtext-7b-h100": ("8xh100", dataclasses.replace(LLAMA, block_size=4096), 32, 4, 8),
    "maxtext-7b-v5e": ("v5e-256", LLAMA, 1024, 4, 256),
    "maxtext-16b-v5e": ("v5e-256", WIDE, 1536, 6, 256),
}


def planned(name: str) -> Experiment:
    _, model, batch, micro, fsdp = SHAPES[name]
    strategy = ParallelConfig(micro_batch_size=micro, loss_chunk=512)
    if fsdp > 1:
        strategy = dataclasses.replace(strategy, strategy="mesh", fsdp=fsdp)
    return Experiment(
        name=name,
        model=model,
        data=DataConfig(path="none", tokenizer="ids"),
        parallel=strategy,
        train=TrainConfig(batch_size=batch, steps=1000),
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or SHAPES:
        experiment = planned(name)
        found = make_plan(experiment, experiment.model.vocab_size, topology=SHAPES[name][0], say=print)
        print(format_plan(found), flush=True)
