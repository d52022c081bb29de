"""Kill the workers of grids again and again, and compare the results byte for byte with those of one process.

    python -m tests.faults.grid_kills --text TEXT --kills 50

A study, a sweep and `prepare` take turns, on processes of this machine and on a Ray cluster of two nodes, one of which is
removed in the middle. Exit status 0 if no byte differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.faults.kills import start

STUDY = """
import dataclasses
from jaxgpt import DataConfig, Experiment, GPTConfig, TrainConfig

@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(GPTConfig):
    extra: int = 1

model = OwnConfig(n_layer=1, n_head=2, n_embd=32, block_size=32)
train = TrainConfig(steps=90, batch_size=8, eval_every=30, eval_tokens=4096, checkpoint_every=10, sample_tokens=0)
experiment = Experiment(name="own", model=model, data=DataConfig(path={text!r}), train=train)
variants = {{"base": experiment, "relu": dataclasses.replace(experiment, model=dataclasses.replace(model, activation="relu"))}}
"""
COMMANDS = {
    "study": "study own.py --seeds 2 --run-dir {out}",
    "sweep": "sweep own.py --over optim.learning-rate=1e-4..1e-1 --trials 4 --seeds 2 --run-dir {out}",
    "prepare": "prepare {long} --tokenizer byte --shard-tokens 1000000 --out {out}",
}
RESULTS = ("study.json", "sweep.json", "*.bin", "index.json")
DEADLINE = 600  # seconds of one command
WORKER = re.compile(rb"spawn_main|ray::_run_there")


def run(command: str, folder: Path, on: str | None, kills: int, rng: random.Random, **env: str) -> tuple[int, str]:
    """Run a command, killing its workers so often. Return the number of kills, and its last lines if it failed."""
    words = [*command.split(), *([] if on is None else ["--on", on])]
    told, done = folder / "told.txt", 0
    child = start(words, folder, told, **env)
    until, due = time.monotonic() + DEADLINE, time.monotonic() + rng.uniform(1, 6)
    while child.poll() is None:
        time.sleep(0.05)
        if time.monotonic() > until:
            child.kill()
        if done < kills and time.monotonic() > due:
            with contextlib.suppress(IndexError, ProcessLookupError):
                os.kill(rng.choice(find_workers()), signal.SIGKILL)
                done, due = done + 1, time.monotonic() + rng.uniform(1, 6)
    return done, "" if child.returncode == 0 else told.read_text()[-2000:]


def find_workers() -> list[int]:
    """Return the processes that compute: those of this machine's executors, and Ray's while they run a task."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if WORKER.search((place / "cmdline").read_bytes()):
                found.append(int(place.name))
    return found


def read_results(out: Path) -> dict[str, bytes]:
    """Return the files that must be equal."""
    return {path.name: path.read_bytes() for pattern in RESULTS for path in sorted(out.glob(pattern))}


CLUSTER = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
node = cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
input()
cluster.remove_node(node, allow_graceful=False)
input()
cluster.shutdown()
"""


@contextlib.contextmanager
def two_nodes(seconds: float) -> Iterator[str]:
    """Start a Ray cluster of two nodes on this machine, and yield its address. One is removed after so many seconds."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    child = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, **pipes
    )
    timer = threading.Timer(seconds, lambda: child.stdin and (child.stdin.write("\n"), child.stdin.flush()))
    try:
        address = child.stdout.readline().strip()
        timer.start()
        yield address
    finally:
        timer.cancel()
        timer.join()
        child.communicate("\n\n", timeout=120)


def main() -> None:
    """Run the harness."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, kills, differing, turns = random.Random(given.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        text, long = folder / "text.txt", folder / "long.txt"
        text.write_bytes(given.text.read_bytes()[:300_000])
        long.write_bytes(given.text.read_bytes() * 60)
        (folder / "own.py").write_text(STUDY.format(text=str(text)))
        expected = {}
        for name, command in COMMANDS.items():
            _, said = run(command.format(out=f"{name}-alone", long=long), folder, None, 0, rng)
            expected[name] = read_results(folder / f"{name}-alone")
            assert not said and expected[name], said
        while kills < given.kills:
            for name, on in [(name, on) for name in COMMANDS for on in ("local:2", "ray")]:
                out = f"{name}-{turns}"
                turns += 1
                how = (command := COMMANDS[name].format(out=out, long=long)), folder, on, 4, rng
                if on == "ray":
                    with two_nodes(rng.uniform(8, 20)) as address:
                        done, said = run(*how, RAY_ADDRESS=address)
                else:
                    done, said = run(*how)
                is_equal = not said and read_results(folder / out) == expected[name]
                kills, differing = kills + done, differing + (not is_equal)
                print(f"{name} --on {on}: {done} kills, {'equal' if is_equal else 'DIFFERENT ' + said}", flush=True)
    print(f"{kills} kills in {turns} results: {differing} differ")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
