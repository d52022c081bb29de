"""How do the time and the memory of a training step grow with depth, width, context and batch?

Question    one dimension varies at a time, the others as in the base: which power of it do time and memory follow, and
            where does the exponent change?
Reference   arithmetic: 6 FLOPs per weight and token, 12 per layer, token, width and token of context
            (arXiv:2204.02311).
Command     python experiments/step_cost.py [--quick] [--rounds N] [--out DIR]   -> a table, DIR/step-cost.png, step-cost.json
Hardware    any one device. Two cores: 2 to 7 minutes, 2.2 GB.
Method      the step that `jaxgpt train` runs, AdamW, synthetic tokens. Time: every point takes its turn in each round,
            since the machine's speed drifts; median, least and most over the rounds. Memory: the compiler's estimate
            and, on Linux, the measured peak of two steps above what the process held before the state was made.
            Exponents: least squares over logarithms, and from each point to the next.
Expected    depth and batch 1; width 1 to 2; context 1 to 2: time starts below them, where overhead dominates.
Result      time: depth 1.00, width 1.26, context 1.14, batch 0.74 (two cores of an AMD EPYC); memory 0.95, 1.20, 1.16,
            0.84; arithmetic 0.99, 1.83, 1.15, 1.00 in the program's products (the formula has 1.22 for context). From 80 MiB on, the compiler's estimate agrees with the measured
            peak to 5%. Time bends upward with context (0.69 to 1.67 from 32 to 1024 tokens, where arithmetic has 1.4 at
            the end): plain attention's scores are B N T^2, read and written, and GFLOP/s fall from 180 to 121. With
            width, time stays below arithmetic, since larger products run faster: from 59 GFLOP/s at 32 to 288 at 512.
            With batch it starts at 0.4, dominated by overhead, and ends at 1. Memory bends upward with width (1.06 to
            1.38), since the state takes 12 bytes per weight and weights are 12 L D^2 where activations are B T D. At a
            context of 256, where queries begin to go in blocks, memory bends down (0.89), and then up again.
Verdict     as expected; the first thing that a long context needs is another attention kernel.
"""

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import statistics
import sys
import time

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.experiment import Experiment, ParallelConfig, TrainConfig
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.jax_setup import keep_freed_memory, return_freed_memory
from jaxgpt.parallel.limits import train_flops_per_token
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.tools.plan.plan import memory_of_program

DIMENSIONS = ("depth", "width", "context", "batch")
BASE = {"depth": 4, "width": 128, "context": 128, "batch": 8}
SWEEP = {
    "depth": (1, 2, 4, 8, 16),
    "width": (32, 64, 128, 256, 512),
    "context": (32, 64, 128, 256, 512, 1024),
    "batch": (1, 2, 4, 8, 16, 32),
}
QUICK_BASE = {"depth": 1, "width": 32, "context": 8, "batch": 2}
QUICK = {"depth": (1, 2), "width": (32, 64), "context": (8, 16), "batch": (2, 4)}
HEAD = 32  # size of each head: wider models have more heads
ENOUGH = 0.1  # least seconds of one turn, rounded to full steps


@dataclasses.dataclass(kw_only=True)
class Point:
    """A configuration, and what was measured of its training step."""

    depth: int
    width: int
    context: int
    batch: int
    flops: float = 0.0  # FLOPs of one step, by the formula of the reference
    memory: int = 0  # bytes, as estimated by the compiler
    peak: int | None = None  # bytes, measured; None: unknown
    seconds: float = 0.0  # per step, median of the rounds
    least: float = 0.0
    most: float = 0.0


class Prepared:
    """A point's compiled step, and how to run it."""

    def __init__(self, point: Point):
        """Compile the step, and note its arithmetic and memory in the point."""
        model = GPTConfig(
            vocab_size=65,
            block_size=point.context,
            n_layer=point.depth,
            n_head=point.width // HEAD,
            n_embd=point.width,
            bias=False,
        )
        self.trainer = make_trainer(
            Experiment(
                name="step-cost",
                model=model,
                train=TrainConfig(batch_size=point.batch),
                parallel=ParallelConfig(strategy="single"),
            )
        )
        strategy = self.trainer.strategy
        key = jax.random.key(1)
        self.compiled = self.trainer.lower().compile()
        parameters, _ = self.trainer.parameters
        point.flops = train_flops_per_token(model, parameters) * point.batch * point.context
        point.memory = memory_of_program(self.compiled)
        tokens = np.random.default_rng(0).integers(0, 65, (point.batch, point.context + 1)).astype(np.int32)
        self.batch = strategy.shard_batch(Batch(tokens[:, :-1], tokens[:, 1:]))
        self.key, self.state, self.steps = key, None, 1

    def start(self) -> None:
        """Make a state from random weights: compiling the model's own initialisation would take as long as its step."""
        rng = np.random.default_rng(0)
        shapes = self.trainer.abstract_state

        def draw(x: jax.ShapeDtypeStruct) -> np.ndarray:
            return 0.02 * rng.standard_normal(x.shape, np.float32)

        def place(value: np.ndarray, x: jax.ShapeDtypeStruct) -> jax.Array:
            return jax.device_put(value, x.sharding, may_alias=False)  # it is donated

        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        self.state = jax.tree.map(place, zeros.replace(params=jax.tree.map(draw, shapes.params)), shapes)

    def step(self) -> None:
        """Run one step and wait for it."""
        self.state, metrics = self.compiled(self.state, self.batch, self.key)
        jax.block_until_ready(metrics)

    def seconds(self) -> float:
        """Return the seconds per step, after one step that warms memory and caches up."""
        self.step()
        began = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        return (time.perf_counter() - began) / self.steps


def measured_peak(prepared: Prepared) -> int | None:
    """Return the peak bytes of the state and two steps; None unless on CPU under Linux, where it can be reset."""
    if jax.default_backend() != "cpu" or not os.path.exists("/proc/self/clear_refs"):
        return None
    prepared.start()
    prepared.step()  # allocations that happen once: threads, the program's own memory
    prepared.state = None
    gc.collect()
    before = memory_status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: reset the peak to current memory
    prepared.start()
    prepared.step(), prepared.step()
    prepared.state = None
    return memory_status("VmHWM") - before


def memory_status(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def measure(base: dict[str, int], sweep: dict[str, tuple[int, ...]], rounds: int) -> dict[str, list[Point]]:
    """Return {dimension: its points, by size}. A configuration that several dimensions share is measured once."""
    points: dict[tuple[int, ...], Point] = {}
    sizes = {name: [base | {name: size} for size in sweep[name]] for name in DIMENSIONS}
    return_freed_memory()  # for the peaks
    prepared = []
    for size in (size for several in sizes.values() for size in several):
        if tuple(size.values()) not in points:
            point = points[tuple(size.values())] = Point(**size)
            prepared.append((point, Prepared(point)))
            point.peak = measured_peak(prepared[-1][1])
    print(f"{len(prepared)} steps compiled; timing them", file=sys.stderr, flush=True)
    keep_freed_memory()  # as training does
    for _, p in prepared:
        p.start()
        p.steps = max(1, round(ENOUGH / p.seconds()))
    turns = [[p.seconds() for _, p in prepared] for _ in range(rounds)]
    for (point, _), seconds in zip(prepared, zip(*turns, strict=True), strict=True):
        point.seconds, point.least, point.most = statistics.median(seconds), min(seconds), max(seconds)
    return {name: [points[tuple(size.values())] for size in several] for name, several in sizes.items()}


def exponents(x: list[float], y: list[float]) -> tuple[float, float, list[float]]:
    """Fit y = factor x^exponent by least squares over logarithms.

    Returns (exponent, factor, exponents from point to point).
    """
    log_x, log_y = np.log(x), np.log(y)
    exponent, log_factor = np.polyfit(log_x, log_y, 1)
    return float(exponent), float(np.exp(log_factor)), (np.diff(log_y) / np.diff(log_x)).tolist()


def table(found: dict[str, list[Point]]) -> str:
    """Format the points and their exponents as a Markdown table."""
    lines = [
        "| | ms (least to most) | exponent | MiB | exponent | MiB measured | GFLOP | GFLOP/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, points in found.items():
        x = [getattr(p, name) for p in points]
        times, memories = exponents(x, [p.seconds for p in points]), exponents(x, [p.memory for p in points])
        flops = exponents(x, [p.flops for p in points])
        lines.append(f"| **{name}**, all | | **{times[0]:.2f}** | | **{memories[0]:.2f}** | | {flops[0]:.2f} | |")
        for i, p in enumerate(points):
            local = [f"{e[2][i - 1]:.2f}" if i else "" for e in (times, memories)]
            peak = "" if p.peak is None else f"{p.peak / 2**20:.1f}"
            lines.append(
                f"| {x[i]} | {p.seconds * 1e3:.1f} ({p.least * 1e3:.1f} to {p.most * 1e3:.1f}) | {local[0]} "
                f"| {p.memory / 2**20:.1f} | {local[1]} | {peak} | {p.flops / 1e9:.2f} | {p.flops / p.seconds / 1e9:.0f} |"
            )
    return "\n".join(lines)


def draw(found: dict[str, list[Point]], base: dict[str, int], path: pathlib.Path) -> None:
    """Plot time and memory against each dimension."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    dark, light, warm = "#08519c", "#9ecae1", "#d94801"
    figure = Figure(figsize=(13.5, 6.8), layout="constrained")
    panels = figure.subplots(2, len(found), sharey="row", sharex="col")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for column, (name, points) in enumerate(found.items()):
        x = [getattr(p, name) for p in points]
        measured = [p.peak / 2**20 if p.peak else np.nan for p in points]
        rows = {
            "time per step (ms)": [p.seconds * 1e3 for p in points],
            "memory (MiB)": [p.memory / 2**20 for p in points],
        }
        for row, (quantity, y) in enumerate(rows.items()):
            axes = panels[row, column]
            exponent, factor, local = exponents(x, y)
            power = f"fit: {name}$^{{\\,{exponent:.2f}}}$"
            axes.plot(x, [factor * size**exponent for size in x], "--", color=warm, linewidth=1.3, label=power)
            if row == 0:
                below, above = zip(*((p.seconds - p.least, p.most - p.seconds) for p in points), strict=True)
                spread = np.array([below, above]) * 1e3
                axes.errorbar(
                    x, y, spread, fmt="o", color=dark, ecolor=light, elinewidth=3, markersize=5, label="median"
                )
            else:
                axes.plot(x, y, "o", color=dark, markersize=5, label="compiler's estimate")
                axes.plot(x, measured, "x", color=dark, alpha=0.55, markersize=6, label="measured peak")
            axes.set(xscale="log", yscale="log")
            for i, e in enumerate(local):
                middle = (x[i] * x[i + 1]) ** 0.5, (y[i] * y[i + 1]) ** 0.5
                axes.annotate(
                    f"{e:.2f}",
                    middle,
                    xytext=(5, -9),
                    textcoords="offset points",
                    fontsize=8,
                    color="0.45",
                )
            axes.set_xticks(x, [str(size) for size in x])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(plain)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, loc="upper left", fontsize=9)
            if column == 0:
                axes.set_ylabel(quantity)
            if row == 1:
                axes.set_xlabel(name)
    others = ", ".join(f"{name} {size}" for name, size in base.items())
    device = jax.devices()[0].device_kind
    figure.suptitle(f"One training step on {device}; base: {others}. Grey: exponent from point to point")
    for row in panels:  # room above the points, so that the legend does not cover them
        low, high = row[0].get_ylim()
        row[0].set_ylim(low, high * (high / low) ** 0.22)
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> dict[str, list[Point]]:
    """Measure all points; print the table and write the plot and the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small models, two points each: takes seconds, only checks that it runs"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    args = parser.parse_args(argv)
    base, sweep = (QUICK_BASE, QUICK) if args.quick else (BASE, SWEEP)
    found = measure(base, sweep, args.rounds)
    print(table(found))
    args.out.mkdir(parents=True, exist_ok=True)
    draw(found, base, args.out / "step-cost.png")
    record = {name: [dataclasses.asdict(p) for p in points] for name, points in found.items()}
    (args.out / "step-cost.json").write_text(json.dumps(record, indent=1))
    return found


if __name__ == "__main__":
    main()
