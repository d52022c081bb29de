"""Measure seconds and peak memory of import, export and transformers' own load, for a generated model.

    python experiments/benchmarks/interop.py [--size 1558M] [--rounds 3]       (needs `jaxgpt[hf,bench]`)

Result: LOG.md, 2026-11-21, "weights in and out".

The checkpoint has GPT-2's shape, random parameters in bfloat16, and one file. Each measurement is a process of its own.
Its peak is the largest resident memory of that process; the base is the peak of a process that only imports the same
packages. All files have been read once before, so that no measurement waits for reading from the disk; import and
export also write, and wait until their files are on the disk. "import, reading only" is the part of
import that corresponds to transformers' load.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

MEASURE = """
import json, resource, sys, time
{imports}
began = time.monotonic()
{work}
print(json.dumps([time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""

OURS = "from jaxgpt.parallel.jax_setup import configure_jax; configure_jax(computes=False); import jax; jax.devices()\n"
IMPORTS = {
    "import": OURS + "from jaxgpt.tools.convert import import_model",
    "import, reading only": OURS
    + "from jaxgpt.hf.weights import read_params; from jaxgpt.hf.source import open_source",
    "export": OURS + "from jaxgpt.tools.convert import export_hf",
    "transformers": "import torch; from transformers import AutoModelForCausalLM as Model",
}
WORK = {
    "import": "import_model(sys.argv[1] + '/hf', sys.argv[2], tokenizer='ids')",
    "import, reading only": "s = open_source(sys.argv[1] + '/hf', 'ids'); params = read_params(s.tensors, s.family, s.config)",
    "export": "export_hf(sys.argv[1] + '/run', sys.argv[2])",
    "transformers": "model = Model.from_pretrained(sys.argv[1] + '/hf', dtype=torch.bfloat16)\n"
    "sum(float(x.sum()) for x in model.parameters())",  # otherwise its pages are mapped but not read
}


def make(directory: Path, size: str) -> int:
    """Write a random checkpoint and return its size in bytes."""
    import ml_dtypes
    import numpy as np

    from jaxgpt.hf.families import GPT2
    from jaxgpt.hf.family import their_shape
    from jaxgpt.hf.weights import SPELLED, Tensor, shapes_of, write
    from jaxgpt.presets import gpt2

    config, kind = gpt2(size), np.dtype(ml_dtypes.bfloat16)
    shapes, rng = shapes_of(config), np.random.default_rng(0)
    tensors = {}
    for row in GPT2.expand_rules(config, shapes):
        shape = their_shape([shapes[path] for path in row.ours], row.layout)
        make = lambda shape=shape: (rng.standard_normal(shape, np.float32) * 0.02).astype(kind)  # noqa: E731
        tensors[row.theirs] = Tensor(shape, SPELLED[kind], make)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(GPT2.write(config) | {"dtype": "bfloat16"}))
    write(directory, tensors)
    return sum(tensor.bytes for tensor in tensors.values())


def measure(what: str, place: Path, number: int, work: str | None = None) -> tuple[float, int]:
    """Return (seconds, peak bytes) of one measurement in a process of its own."""
    code = MEASURE.format(imports=IMPORTS[what], work=WORK[what] if work is None else work)
    target = place / f"{what.split()[-1]}-{number}"
    done = subprocess.run([sys.executable, "-c", code, str(place), str(target)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    if what == "import" and target.exists() and not (place / "run").exists():
        target.rename(place / "run")
    elif target.exists():
        subprocess.run(["rm", "-r", str(target)], check=True)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def main() -> None:
    """Measure all in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1558M", help="size of GPT-2: 124M, 350M, 774M, 1558M")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        place = Path(root)
        began = time.monotonic()
        with ProcessPoolExecutor(1) as pool:  # a child inherits the peak of the process that started it
            size = pool.submit(make, place / "hf", given.size).result()
        print(f"{given.size}: {size / 1e9:.2f} GB in bfloat16, made in {time.monotonic() - began:.0f} s\n")
        print(
            "| what | seconds, median (least to most) | peak GB above the base | times the checkpoint |\n|---|---|---|---|"
        )
        base = {what: measure(what, place, 99, work="pass")[1] for what in WORK}
        found: dict[str, list[tuple[float, int]]] = {what: [] for what in WORK}
        for number in range(given.rounds):  # in turns, so that the machine's load affects all alike
            for what in WORK:
                found[what].append(measure(what, place, number))
        for what, rounds in found.items():
            seconds = sorted(s for s, _ in rounds)
            peak = max(p for _, p in rounds) - base[what]
            print(
                f"| {what} | {statistics.median(seconds):.1f} ({seconds[0]:.1f} to {seconds[-1]:.1f}) "
                f"| {peak / 1e9:.2f} | {peak / size:.2f} |"
            )


if __name__ == "__main__":
    main()
