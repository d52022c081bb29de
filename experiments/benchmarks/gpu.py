"""Check and measure jaxgpt on this GPU: one command, twelve minutes, one table.

Question:  does the device compute what the CPU computes; how fast are training and decoding of GPT-2 124M, beside
           nanoGPT and beside the device's limits; how much memory does a step take, and how long the first one.
Command:   python experiments/benchmarks/gpu.py [--nanogpt DIR] [--json FILE]      (needs jax, flax and optax)
           --parts correctness decode; --budget SECONDS for all; --tiny: small sizes, for a test on CPU
Method:    each part runs in a process of its own, which is killed when its share of the seconds is over; what it has
           measured by then is in the table all the same. What one part leaves over is shared by the next ones. The
           table is printed and the file is saved after each part. Medians (least to most) of rounds.
Result:    NVIDIA H100 80GB HBM3, jax 0.11.2, 2026-11-26, two runs. Losses agree with the CPU's, and cuDNN's attention
           with plain attention. Not all checks were reached. Training: 457,554 tokens/s at 32 x 1,024 (MFU 39.5%, 0.953
           of nanoGPT's speed), 380,683 at 8 x 4,096 (46%, 0.962). Decoding in bfloat16: 1,440 tokens/s at batch 1
           (11.3% of the bandwidth), 68,916 at 128 (28.3%). A step takes 17.8 GiB, as planned, and the first one 54.9 s.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from gpu.row import FAILED, Row, failed
from gpu.setting import make_setting

# The parts in their order, and the seconds that each has of the default budget.
PARTS = dict(correctness=200, training=150, decode=150, memory=15, startup=100, profile=15, variants=90)
INTERRUPTED = "interrupted"
HEADER = "| part | what | median (least to most) | beside | target | met |\n|---|---|---|---|---|---|"


def run_part(command: list[str], rows: Path, limit: float, **env: str) -> dict:
    """Run a part in a process of its own, and kill it with its workers after `limit` seconds.

    Args:
        command: the command, which writes its rows to `rows` after each one.
        rows: a file.
        limit: seconds.
        **env: more of its environment.

    Returns:
        {"rows", "seconds", "ended": None or why it did not finish, "log": the end of what it printed}.
    """
    began, ended = time.monotonic(), None
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | env, start_new_session=True
        )
        try:
            if status := process.wait(limit):
                ended = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s, its share of the budget"
        except KeyboardInterrupt:
            ended = INTERRUPTED
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace")[-4000:]
    found = [Row(**row) for row in json.loads(rows.read_text())] if rows.exists() else []
    return {"rows": found, "seconds": time.monotonic() - began, "ended": ended, "log": said}


def run_parts(
    names: list[str], budget: float, command: Callable[[str, float, Path], list[str]], target: Path | None
) -> dict[str, dict]:
    """Run parts within a budget of seconds; after each, print its rows of the table and save all to `target`."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    end, found = time.monotonic() + budget, {}
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        # What one part has compiled the next ones read.
        environment = {"PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": directory, "PYTHONFAULTHANDLER": "1"}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"  # as `enable_compilation_cache` has it
        for number, name in enumerate(names):
            limit = max(0.0, end - time.monotonic()) * PARTS[name] / sum(PARTS[later] for later in names[number:])
            rows = Path(directory, f"{name}.json")
            found[name] = run_part(command(name, limit, rows), rows, limit, **environment)
            print_part(name, found[name])
            if target is not None:
                save(target, {part: {**one, "rows": as_dicts(one["rows"])} for part, one in found.items()})
            if found[name]["ended"] == INTERRUPTED:
                break
    return found


def print_part(name: str, found: dict) -> None:
    """Print the rows of a part, and the end of its log if something failed."""
    for row in found["rows"]:
        print(f"| {name} | {row.cells()} |")
    if found["ended"]:
        print(f"| {name} | {Row(what='the rest', beside=found['ended'], ok=False).cells()} |")
    if found["ended"] or any(row.beside.startswith(FAILED) for row in found["rows"]):
        print(found["log"][-1500:], end="", file=sys.stderr)
    sys.stdout.flush()


def save(path: Path, value) -> None:
    """Replace a JSON file, which is never half written."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1))
    part.replace(path)


def as_dicts(rows: list[Row]) -> list[dict]:
    """Return rows as JSON has them."""
    return [dataclasses.asdict(row) for row in rows]


def measure(part: str, setting, target: Path) -> None:
    """Run the checks of one part in this process, and save its rows after each one. A failed check is a row."""
    from jaxgpt.parallel.jax_setup import configure_jax

    configure_jax()
    rows: list[Row] = []
    for check in importlib.import_module(f"gpu.{part}").checks(setting):
        try:
            for row in check():
                rows.append(row)
                save(target, as_dicts(rows))
        except (Exception, SystemExit) as e:  # SystemExit: a worker's
            traceback.print_exc()
            called = map(str, getattr(check, "args", ())[1:])
            rows.append(failed(" ".join([getattr(check, "func", check).__name__, *called]), e))
            save(target, as_dicts(rows))


def work(name: str, context: int, setting) -> None:
    """Serve the training steps of a system: see `training.Worker`."""
    from training import serve

    began = time.perf_counter()
    if name == "jaxgpt":
        from jaxgpt.parallel.jax_setup import configure_jax

        configure_jax()
        from gpu import steps

        experiment = steps.gpt2_experiment(setting, context)
        trainer, run = steps.make_steps(experiment)
        serve(run, began, **steps.facts(experiment, trainer))
    else:
        from gpu import nanogpt

        serve(nanogpt.nanogpt_steps(setting, context), began, **nanogpt.facts())


def main() -> None:
    """Run all parts, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--json", type=Path, help="save all rows to this file after each part")
    parser.add_argument("--budget", type=float, default=float(sum(PARTS.values())), help="seconds for all parts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test on CPU")
    for hidden in ("--part", "--worker"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.context, make_setting(options))
    elif options.part:
        measure(options.part, make_setting(options), options.json)
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        given = ["--tiny"] * options.tiny + (["--nanogpt", options.nanogpt] if options.nanogpt else [])

        def command(name: str, limit: float, rows: Path) -> list[str]:
            mine = ["--part", name, "--budget", str(limit), "--json", str(rows)]
            return [sys.executable, __file__, *mine, *given]

        run_parts(options.parts, options.budget, command, options.json)


if __name__ == "__main__":
    main()
