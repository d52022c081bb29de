"""Measure what training options cost: memory by option, compilation by depth, host time by strategy.

    python experiments/benchmarks/parallel.py [memory] [depth] [overhead]       (default: all three)

Result: LOG.md, 2026-11-21, "many devices, and TPU slices on paper".

memory      GPT-2 124M, 32 x 1024 tokens on one TPU v5p, as estimated by the compiler (needs `jaxgpt[tpu]`, but no TPU)
depth       seconds to trace and to compile the training step of 12 and of 48 layers, scanned and unrolled, on this host
overhead    one step of a tiny model on one device through jit, pmap and mesh: the difference is host time
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.experiment import Experiment, ParallelConfig, TrainConfig
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.trainer import Trainer, make_trainer
from jaxgpt.presets import gpt2
from jaxgpt.tools.plan.plan import make_plan

GPT2 = dataclasses.replace(gpt2(), vocab_size=50_304, dropout=0.0, bias=False)
ROUNDS, STEPS = 5, 200


def memory() -> None:
    """Print the memory of the training step with each option, as the TPU compiler estimates it."""
    rows = {
        "none": {},
        "splash attention": {"attention": "auto"},
        "scan": {"scan_layers": True},
        "remat dots": {"remat": "dots"},
        "remat full": {"remat": "full"},
        "loss in chunks of 128": {"loss_chunk": 128},
        "accumulation 4": {"micro_batch_size": 8},
        "splash, chunks": {"attention": "auto", "loss_chunk": 128},
        "splash, chunks, scan, remat full": {
            **{"attention": "auto", "loss_chunk": 128, "scan_layers": True, "remat": "full"},
        },
        "all of them": {
            **{"attention": "auto", "loss_chunk": 128, "scan_layers": True, "remat": "full", "micro_batch_size": 8},
        },
    }
    print("| options | GiB | state, GiB | ms, at least |\n|---|---|---|---|")
    for name, options in rows.items():
        model = {k: v for k, v in options.items() if k in ("scan_layers", "remat")}
        parallel = {k: v for k, v in options.items() if k in ("loss_chunk", "micro_batch_size")}
        found = make_plan(
            Experiment(
                name="memory",
                model=dataclasses.replace(GPT2, **model),
                train=TrainConfig(batch_size=32, attention=options.get("attention", "plain")),
                parallel=ParallelConfig(strategy="single", **parallel),
            ),
            GPT2.vocab_size,
            topology="v5p:2x2x1",
        )
        gib = f"{found.memory / 2**30:.2f} | {found.state_memory / 2**30:.2f}"
        print(f"| {name} | {gib} | {found.step_seconds * 1e3:.0f} |", flush=True)


def trainer(config: GPTConfig, strategy: str) -> Trainer:
    """Return a trainer of the model under the given strategy, with a batch of two."""
    parallel = ParallelConfig(strategy=strategy)
    return make_trainer(Experiment(name="benchmark", model=config, train=TrainConfig(batch_size=2), parallel=parallel))


def depth() -> None:
    """Print seconds to trace and to compile the step by number of layers."""
    print("| layers | scan | trace, s | compile, s |\n|---|---|---|---|")
    for scan, layers in ((True, 12), (True, 48), (True, 12), (True, 48), (False, 12), (False, 48)):
        config = dataclasses.replace(GPT2, n_layer=layers, scan_layers=scan)
        made = trainer(config, "single")
        began = time.perf_counter()
        lowered = made.lower()
        traced = time.perf_counter()
        lowered.compile()
        print(f"| {layers} | {scan} | {traced - began:.1f} | {time.perf_counter() - traced:.1f} |", flush=True)


def overhead() -> None:
    """Print the time of a tiny step by strategy."""
    config = GPTConfig(vocab_size=16, block_size=8, n_layer=1, n_head=1, n_embd=8)
    tokens = np.zeros((2, 8), np.int32)
    made = {name: trainer(config, name) for name in ("single", "pmap", "mesh")}
    states, key = {name: m.init_state(jax.random.key(0)) for name, m in made.items()}, jax.random.key(1)
    times, placing = ({name: [] for name in made} for _ in range(2))
    for number in range(1 + ROUNDS):  # in turns, since the machine's speed drifts; the first round compiles
        for name, m in made.items():
            began, placed = time.perf_counter(), 0.0
            for _ in range(STEPS):
                before = time.perf_counter()
                batch = m.strategy.shard_batch(Batch(tokens, tokens))
                placed += time.perf_counter() - before
                states[name], metrics = m.train_step(states[name], batch, key)
                jax.block_until_ready(metrics)
            if number:
                times[name].append((time.perf_counter() - began) / STEPS * 1e6)
                placing[name].append(placed / STEPS * 1e6)
    print(f"| strategy | µs per step, median of {ROUNDS} | least | most | over jit | placing the batch |")
    print("|---|---|---|---|---|---|")
    plain = statistics.median(times["single"])
    for name, values in times.items():
        middle, spread = statistics.median(values), f"{min(values):.0f} | {max(values):.0f}"
        print(f"| {name} | {middle:.0f} | {spread} | {middle - plain:+.0f} | {statistics.median(placing[name]):.0f} |")


if __name__ == "__main__":
    parts = {"memory": memory, "depth": depth, "overhead": overhead}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], metavar="PART", help=", ".join(parts))
    for part in parser.parse_args().parts or parts:
        print(f"\n{part}\n", file=sys.stderr)
        parts[part]()
