"""Many small steps with checkpoints and evaluations: does anything grow?

    python -m tests.faults.soak --steps 20000

Prints the slope of the resident memory after warm-up, open files, threads, and what was compiled after the warm-up.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.config import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig
from jaxgpt.fitting import fit
from jaxgpt.runs.metrics import MetricsFile

WARM_UP = 0.25  # the first share of the steps, in which memory may grow and programs are compiled


class Sample(NamedTuple):
    step: int
    kilobytes: int  # resident
    files: int
    threads: int


class Found(NamedTuple):
    slope: float  # KB per 1,000 steps, by least squares, after the warm-up
    resident: int  # KB at the end
    files: tuple[int, int]  # open, at the fewest, in the first and in the second half after the warm-up
    threads: tuple[int, int]  # the same; those of a save come and go, those of the process's other work are in both
    compiled: int  # programs after the warm-up
    seconds: float


def soak(directory: Path, steps: int, *, saves: bool = True) -> Found:
    """Train in this process and look at it as it goes. saves: with checkpoints and evaluations, not steps alone."""
    model = GPTConfig(block_size=16, n_layer=1, n_head=1, n_embd=16)
    train = TrainConfig(
        steps=steps,
        batch_size=4,
        log_every=10,
        eval_every=min(500, steps // 10) if saves else steps,
        eval_tokens=1024,
        checkpoint_every=min(250, steps // 10) if saves else steps,
        sample_tokens=0,
    )
    experiment = Experiment(
        name="soak", model=model, data=DataConfig(), optim=OptimConfig(warmup_steps=10), train=train
    )
    samples: list[Sample] = []
    compiled: list[tuple[int, str]] = []
    now = [0]

    def on_event(event: str, seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append((now[0], event))

    write = MetricsFile.write

    def watched(self: MetricsFile, **values) -> None:
        now[0] = values["step"]
        write(self, **values)
        if "loss" in values and values["step"] % max(10, steps // 1000 * 10) == 0:
            samples.append(measure(values["step"]))

    jax.monitoring.register_event_duration_secs_listener(on_event)
    MetricsFile.write = watched  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        fit(experiment, directory, progress=False)
    finally:
        MetricsFile.write = write  # type: ignore[method-assign]
    warm = [s for s in samples if s.step > WARM_UP * steps]
    early, late = warm[: len(warm) // 2], warm[len(warm) // 2 :]
    slope = np.polyfit([s.step for s in warm], [s.kilobytes for s in warm], 1)[0] * 1000
    return Found(
        slope=float(slope),
        resident=warm[-1].kilobytes,
        files=(min(s.files for s in early), min(s.files for s in late)),
        threads=(min(s.threads for s in early), min(s.threads for s in late)),
        compiled=sum(WARM_UP * steps < step < steps for step, _ in compiled),
        seconds=time.monotonic() - began,
    )


def measure(step: int) -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        step=step,
        kilobytes=pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        files=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--no-saves", action="store_true", help="steps alone, without checkpoints and evaluations")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = soak(Path(root) / "run", given.steps, saves=not given.no_saves)
    print(
        f"{given.steps:,} steps in {found.seconds:.0f} s, after the first {WARM_UP:.0%}:\n"
        f"resident memory  {found.slope:+.1f} KB per 1,000 steps, {found.resident / 1024:.0f} MB at the end\n"
        f"open files       at least {found.files[0]} in the first half, {found.files[1]} in the second\n"
        f"threads          at least {found.threads[0]} in the first half, {found.threads[1]} in the second\n"
        f"compilations     {found.compiled}"
    )


if __name__ == "__main__":
    main()
