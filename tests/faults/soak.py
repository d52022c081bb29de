"""Many small steps with checkpoints and evaluations: does anything grow?

    python -m tests.faults.soak --steps 20000

Prints the slope of the resident memory after warm-up, open files, threads, and what was compiled after the warm-up.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.experiment import Experiment, TrainConfig
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.runs.metrics import MetricsFile
from jaxgpt.training import fit

WARM_UP = 0.25  # the first share of the steps, in which memory may grow and programs are compiled


class Found(NamedTuple):
    slope: float  # KB per 1,000 steps, by least squares, after the warm-up
    files: tuple[int, int]  # open, at the fewest, in the first and in the second half after the warm-up
    threads: tuple[int, int]  # the same; those of a save come and go, those of the process's other work are in both
    compiled: int  # programs after the warm-up


def soak(directory: Path, steps: int) -> Found:
    """Train in this process and look at it as it goes."""
    train = TrainConfig(
        steps=steps,
        batch_size=4,
        log_every=10,
        eval_every=min(500, steps // 10),
        eval_tokens=1024,
        checkpoint_every=min(250, steps // 10),
        sample_tokens=0,
    )
    model = GPTConfig(block_size=16, n_layer=1, n_head=1, n_embd=16)
    experiment = Experiment(name="soak", model=model, optim=OptimConfig(warmup_steps=10), train=train)
    samples: list[tuple[int, int, int, int]] = []  # step, resident KB, open files, threads
    compiled: list[int] = []
    now = [0]

    def on_event(event: str, seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(now[0])

    write = MetricsFile.write

    def watched(self: MetricsFile, **values) -> None:
        now[0] = step = values["step"]
        write(self, **values)
        if "loss" in values and step > WARM_UP * steps and step % max(10, steps // 1000 * 10) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            kilobytes = pages * os.sysconf("SC_PAGE_SIZE") // 1024
            samples.append((step, kilobytes, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))

    jax.monitoring.register_event_duration_secs_listener(on_event)
    MetricsFile.write = watched  # type: ignore[method-assign]
    try:
        fit(experiment, directory, progress=False)
    finally:
        MetricsFile.write = write  # type: ignore[method-assign]
    at, kilobytes, files, threads = np.array(samples).T
    half = len(at) // 2
    return Found(
        slope=float(np.polyfit(at, kilobytes, 1)[0] * 1000),
        files=(min(files[:half]), min(files[half:])),
        threads=(min(threads[:half]), min(threads[half:])),
        compiled=sum(WARM_UP * steps < step < steps for step in compiled),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = soak(Path(root) / "run", given.steps)
    print(*(f"{name:10} {value}" for name, value in found._asdict().items()), sep="\n")


if __name__ == "__main__":
    main()
