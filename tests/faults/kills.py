"""Kill a training run again and again, and compare what comes out with a run that nobody killed.

    python -m tests.faults.kills --kills 50                  at random instants
    python -m tests.faults.kills --kills 50 --inside-saves   while a checkpoint is being written

Options behind -- go to `jaxgpt train`. Exit status 0 if not a bit differs and nothing was lost.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxgpt.run import load
from jaxgpt.runs.checkpoint import Checkpoints, CorruptCheckpoint
from tests.conftest import REPOSITORY
from tests.helpers import logged

OPTIONS = """
    --model.n-layer 2 --model.n-head 4 --model.n-embd 64 --model.block-size 32 --model.dropout 0.2 --train.batch-size 4
    --parallel.micro-batch-size 2 --train.steps 500 --train.log-every 1 --train.eval-every 100 --train.eval-tokens 4096
    --train.checkpoint-every 10 --train.sample-tokens 1
"""
DEADLINE = 900  # seconds for one session, after which the harness gives up
SAVE_LASTS = 0.12  # seconds after the beginning of a save within which it is killed: most last 0.13 to 0.15
SAVES = 4  # of a session, one of which is killed
MOMENT = 0.001  # seconds between looks


@dataclasses.dataclass
class Report:
    """What the kills did."""

    kills: int = 0
    inside: int = 0  # of which left an unfinished save or removal behind
    lost: int = 0  # steps that a completed checkpoint had, and that were done again
    unreadable: int = 0  # completed checkpoints with a damaged file
    differing: int = 0  # lines of metrics, and arrays of the last checkpoint
    runs: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.lost or self.unreadable or self.differing or self.faults)


def start(words: list[str], folder: Path, told: Path, **env: str) -> subprocess.Popen:
    """Start a command, whose stderr is added to a file."""
    with told.open("a") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxgpt", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def differences(one: Path, other: Path) -> int:
    """Lines of metrics and arrays of the last checkpoint that are not the same, bit for bit."""
    a, b = logged(one), logged(other)
    lines = sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
    arrays = 0
    for which in ("last", "best"):
        x, y = load(one, which=which), load(other, which=which)
        if x.step != y.step:
            return lines + 1
        equal = jax.tree.map(np.array_equal, x.params, y.params)
        arrays += sum(not e for e in jax.tree.leaves(equal))
    return lines + arrays


def wait_to_kill(child: subprocess.Popen, directory: Path, rng: random.Random, every: float, inside: bool) -> bool:
    """Sleep until the instant; False if the run was done before."""
    instant = time.monotonic() + (DEADLINE if inside else rng.uniform(0, 2 * every))
    which, seen = rng.randint(1, SAVES), set()  # inside the first, second, ... save of this session
    while time.monotonic() < instant:
        if child.poll() is not None:
            return False
        if inside and len(seen) < which:
            seen |= {p.name for p in (directory / "checkpoints").glob("*.saving")}
            if len(seen) == which:
                instant = time.monotonic() + rng.uniform(0, SAVE_LASTS)
        time.sleep(MOMENT if inside else min(0.02, every))
    return child.poll() is None


def harass(root: Path, options: list[str], *, kills: int, every: float, inside: float, seed: int) -> Report:
    """Run and kill until `kills` are done and the run that they hit has ended; compare each run that ended.

    every: seconds between kills, on average. inside: the share of them that waits for a checkpoint to be written.
    """
    rng, report = random.Random(seed), Report()
    root.mkdir(parents=True, exist_ok=True)
    reference = root / "alone"
    options = ["train", *options, "--run-dir"]
    if start([*options, str(reference)], root, told := reference.with_suffix(".err")).wait(DEADLINE):
        raise SystemExit(f"the run does not even work alone:\n{told.read_text()}")
    while report.kills < kills:
        directory = root / f"run-{report.runs}"
        told, from_step = directory.with_suffix(".err"), 0
        sessions: list[int] = []  # the step at which each went on
        while True:
            child = start([*options, str(directory)], root, told)
            killed = report.kills < kills and wait_to_kill(child, directory, rng, every, rng.random() < inside)
            if killed:
                child.kill()
            status = child.wait(DEADLINE)
            went_on = re.findall(r"continuing at step (\d+)", told.read_text())
            if len(went_on) > len(sessions):  # killed before that, it did nothing
                sessions.append(int(went_on[-1]))
                report.lost += max(0, from_step - sessions[-1])
            if not killed:
                if status:
                    report.faults.append(f"exit status {status}: {told.read_text()[-2000:]}")
                    return report
                break
            report.kills += 1
            names = [p.name for p in (directory / "checkpoints").glob("*.*")]
            report.inside += any(re.fullmatch(r"\d+\.(saving|deleting)", name) for name in names)
            steps = Checkpoints(directory / "checkpoints").steps()
            for step in steps:
                try:
                    Checkpoints(directory / "checkpoints").verify(step)
                except CorruptCheckpoint as e:
                    report.unreadable += 1
                    report.faults.append(str(e))
            from_step = max(steps, default=0)
        report.faults += [line for line in told.read_text().splitlines() if "damaged" in line or "Traceback" in line]
        report.runs += 1
        report.differing += differences(reference, directory)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--inside-saves", action="store_true", help="kill while a checkpoint is being written")
    parser.add_argument("options", nargs="*", help="of jaxgpt train, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        options, inside = [*OPTIONS.split(), *given.options], float(given.inside_saves)
        report = harass(Path(temporary), options, kills=given.kills, every=10.0, inside=inside, seed=0)
    print(*(f"{name:10} {value}" for name, value in dataclasses.asdict(report).items()), sep="\n")
    raise SystemExit(0 if report.good else 1)


if __name__ == "__main__":
    main()
