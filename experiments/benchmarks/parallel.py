"""What the ways to train cost: memory by option, compilation by depth, the host's work by strategy.

    python experiments/benchmarks/parallel.py [memory] [depth] [overhead]       (none named: all three)

memory      GPT-2 124M, 32 x 1024 tokens on one TPU v5p, by the compiler's account (wants `jaxgpt[tpu]`, no TPU)
depth       seconds to trace and to compile the training step of 12 and of 48 layers, scanned and not, on this machine
overhead    one step of a tiny model on one device through jit, pmap and mesh: the difference is the host's
"""

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import numpy as np

from jaxgpt.config import Experiment, GPTConfig, OptimConfig, ParallelConfig, TrainConfig
from jaxgpt.data.pipeline import Batch
from jaxgpt.model import GPT
from jaxgpt.optim import learning_rate, make_optimizer
from jaxgpt.parallel.choose import choose_strategy
from jaxgpt.plan import plan
from jaxgpt.presets import gpt2
from jaxgpt.train import train_step

GPT2 = dataclasses.replace(gpt2(), vocab_size=50_304, dropout=0.0, bias=False)
ROUNDS, STEPS = 5, 200


def memory() -> None:
    rows = {
        "nothing": {},
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
    print("| with | GiB | of it state | executed FLOPs per token | ms, at least |\n|---|---|---|---|---|")
    for name, options in rows.items():
        model = {k: v for k, v in options.items() if k in ("scan_layers", "remat")}
        parallel = {k: v for k, v in options.items() if k in ("loss_chunk", "micro_batch_size")}
        found = plan(
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
        print(f"| {name} | {gib} | {found.executed_flops_per_token:.3g} | {found.step_seconds * 1e3:.0f} |", flush=True)


def compiled_step(config: GPTConfig, parallel: ParallelConfig):
    """(strategy, `train_step` jitted on it)."""
    model, optim = GPT(config), OptimConfig()
    optimizer = make_optimizer(optim, 1000)
    strategy = choose_strategy(parallel, model, optimizer)
    step = functools.partial(
        train_step,
        model=model.clone(spread=strategy.spread),
        optimizer=optimizer,
        schedule=learning_rate(optim, 1000),
    )
    return strategy, strategy.step(step)


def depth() -> None:
    print("| layers | scan | trace, s | compile, s |\n|---|---|---|---|")
    for scan, layers in ((True, 12), (True, 48), (True, 12), (True, 48), (False, 12), (False, 48)):
        config = dataclasses.replace(GPT2, n_layer=layers, scan_layers=scan)
        strategy, step = compiled_step(config, ParallelConfig(strategy="single"))
        began = time.perf_counter()
        key = jax.eval_shape(lambda: jax.random.key(0))
        lowered = step.lower(strategy.state, strategy.batch(2, config.block_size), key)
        traced = time.perf_counter()
        lowered.compile()
        print(f"| {layers} | {scan} | {traced - began:.1f} | {time.perf_counter() - traced:.1f} |", flush=True)


def overhead() -> None:
    config = GPTConfig(vocab_size=16, block_size=8, n_layer=1, n_head=1, n_embd=8)
    tokens = np.zeros((2, 8), np.int32)
    running = {}
    for name in ("single", "pmap", "mesh"):
        strategy, step = compiled_step(config, ParallelConfig(strategy=name))
        state, key = strategy.init(jax.random.key(0)), jax.random.key(1)
        state, _ = step(state, strategy.place(Batch(tokens, tokens)), key)
        running[name] = (strategy, step, state, key)
    times = {name: [] for name in running}
    for _ in range(ROUNDS):  # in turns, since the machine's speed wanders
        for name, (strategy, step, state, key) in running.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                state, metrics = step(state, strategy.place(Batch(tokens, tokens)), key)
                jax.block_until_ready(metrics)
            times[name].append((time.perf_counter() - began) / STEPS * 1e6)
            running[name] = (strategy, step, state, key)
    print(f"| strategy | µs per step, median of {ROUNDS} | least | most | over jit |\n|---|---|---|---|---|")
    plain = statistics.median(times["single"])
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"| {name} | {middle:.0f} | {min(values):.0f} | {max(values):.0f} | {middle - plain:+.0f} |")


if __name__ == "__main__":
    parts = {"memory": memory, "depth": depth, "overhead": overhead}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], metavar="PART", help=", ".join(parts))
    for part in parser.parse_args().parts or parts:
        print(f"\n{part}\n", file=sys.stderr)
        parts[part]()
