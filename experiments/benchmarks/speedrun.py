"""How long does the speedrun take from a cold start, over several seeds?

Question:  seconds from the start of the process to the validation loss, and that loss, for each seed.
Command:   python experiments/benchmarks/speedrun.py shakespeare.txt
           --experiment FILE: another experiment; --seeds N; --json FILE; --keep DIR: keep the runs, to be audited. All
           other options go to the experiment, such as --train.steps 300
Method:    each seed runs in a process of its own with an empty cache directory, one after the other. The clock stops
           when the line of the last validation is in metrics.jsonl, which is polled twenty times a second. What follows
           (saving, the picture, the sample) counts only in the last column.
Result:    experiments/RECORDS.md, and LOG.md, 2026-11-23, "faster speedruns, and a heap for each thread".
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processor import describe_processor

SPEEDRUN = Path(__file__).parents[1] / "speedrun_shakespeare.py"
LONGEST = 3600  # seconds of a run


def one(experiment: Path, text: str, seed: int, options: list[str], keep: Path | None) -> dict:
    """Run one seed in a process of its own. keep: the directory of its run, a new one; None: deleted at the end.

    Returns {"seed", "seconds" to the last validation loss, "val_loss", "whole": seconds to the end of the process}.
    """
    with tempfile.TemporaryDirectory() as directory:
        run = keep or Path(directory) / "run"
        command = [sys.executable, str(experiment), "--data.path", text, "--run-dir", str(run)]
        command += ["--train.seed", str(seed), *options]
        cold = os.environ | {"JAXGPT_CACHE": str(Path(directory) / "cache")}
        cold.pop("JAX_COMPILATION_CACHE_DIR", None)
        began = time.perf_counter()
        process = subprocess.Popen(command, env=cold, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        found: dict = {}
        try:
            while process.poll() is None and time.perf_counter() - began < LONGEST:
                line = last_validation(run / "metrics.jsonl")
                if line is not None and line != found.get("line"):
                    found = {"line": line, "seconds": time.perf_counter() - began}
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        if process.returncode or not found:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {errors.decode()[-2000:]}")
        found["line"] = last_validation(run / "metrics.jsonl")
    seconds = {"seconds": found["seconds"], "whole": time.perf_counter() - began}
    return {"seed": seed, "val_loss": found["line"]["val_loss"]} | seconds


def last_validation(path: Path) -> dict | None:
    """Return the last complete line of metrics.jsonl with a validation loss; None: there is none yet."""
    if not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text().splitlines() if "val_loss" in line and line.endswith("}")]
    return lines[-1] if lines else None


def main() -> None:
    """Run all seeds, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("text", help="file of Tiny Shakespeare")
    parser.add_argument("--experiment", type=Path, default=SPEEDRUN)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="keep the run of each seed in DIR/SEED")
    parser.add_argument("--json", help="write all runs to this file")
    options, of_experiment = parser.parse_known_args()
    if options.keep and options.keep.exists():
        parser.error(f"{options.keep} exists: a record needs new runs, so name another directory")
    runs = []
    print(f"{describe_processor()}\n")
    print("| seed | validation loss | seconds to it | to the end |\n|---|---|---|---|")
    for seed in range(options.seeds):
        keep = options.keep and options.keep / str(seed)
        runs.append(run := one(options.experiment, options.text, seed, of_experiment, keep))
        print(f"| {seed} | {run['val_loss']:.4f} | {run['seconds']:.1f} | {run['whole']:.1f} |", flush=True)
    for name, digits in (("val_loss", 4), ("seconds", 1)):
        values = [run[name] for run in runs]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name}: mean {statistics.mean(values):.{digits}f}, standard deviation {spread:.{digits}f}")
    if options.json:
        Path(options.json).write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
