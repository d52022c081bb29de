"""How long does it take to reach the first step? Imports, help, and `jaxgpt train` with a cold and a warm cache.

Question:  seconds from the start of a process, and where they go.
Command:   python experiments/benchmarks/startup.py [--rounds 5] [--trains 3] [--json FILE]
           --peer-python PYTHON: an interpreter with transformers and torch; default: this one, if it has them
           --topology h100:1: only compile GPT-2 124M's programs for a GPU that need not be there
Method:    every command in a process of its own, in turns, round by round; medians, least and most. The training is
           one step of the quickstart, with its validation and its checkpoint. Cold runs have an empty JAXGPT_CACHE of
           their own. A milestone is the time from the start of the process until it is reached; tracing, lowering and
           compiling are sums over all programs, as JAX reports them. For a topology, the processor time of this process,
           with the compiler's threads and children. It takes the flags of XLA_FLAGS, and tunes nothing.
Result:    docs/results/training.md, under "Start-up", and LOG.md, 2026-11-24, "the quickstart's first step in 1.9 s with a
           warm cache", and 2026-11-29, "the first start on an H100, by the compiler's clock".
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processor import describe_processor

TRAIN = """
import json, sys, time
began = float(sys.argv.pop(1))
at, sums = {}, {}
def reached(what):
    at.setdefault(what, time.time() - began)
from jaxgpt import __main__
from jaxgpt.cli import train
reached("the command line is imported")
configure_jax = train.configure_jax
def started():
    configure_jax()
    reached("jax is imported")
    import jax.monitoring
    from jaxgpt import DataConfig, training
    from jaxgpt.runs import checkpoint
    reached("all is imported")
    names = {"jaxpr_trace_duration": "tracing", "jaxpr_to_mlir_module_duration": "lowering",
             "backend_compile_duration": "compiling or reading the cache"}
    def record(name, seconds, **_):
        if (what := names.get(name.split("/")[-1])) is not None:
            sums[what] = sums.get(what, 0.0) + seconds
    jax.monitoring.register_event_duration_secs_listener(record)
    def after(owner, name, what):
        plain = getattr(owner, name)
        def timed(*arguments, **options):
            found = plain(*arguments, **options)
            reached(what)
            return found
        setattr(owner, name, timed)
    after(DataConfig, "open_dataset", "the data is there")
    after(training.Training, "restore_or_init", "the state is there")
    after(training.RunLog, "log_first_step", "the first step is done")
    after(training, "mean_loss", "the validation loss is known")
    after(checkpoint.Checkpoints, "wait", "it is saved")
train.configure_jax = started
__main__.main(sys.argv[1:])
reached("the process ends")
print(json.dumps({"at": at, "sums": sums}))
"""


def once(command: list[str], **env: str) -> tuple[float, str]:
    """Run a command and return (seconds, its output)."""
    began = time.time()
    done = subprocess.run(
        [word.replace("BEGAN", repr(began)) for word in command],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    return time.time() - began, done.stdout


def trained(directory: str, cache: str) -> dict:
    """Train the quickstart for one step; return its milestones and sums, in seconds."""
    run = tempfile.mkdtemp(dir=directory)
    command = [sys.executable, "-c", TRAIN, "BEGAN", "train", "quickstart", "--run-dir", f"{run}/r"]
    _, said = once(
        [*command, "--train.steps", "1", "--optim.warmup-steps", "0", "--train.sample-tokens", "0"], JAXGPT_CACHE=cache
    )
    return json.loads(said.splitlines()[-1])


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def compile_for(topology: str) -> None:
    """Print the processor seconds that the programs of a start take, with micro-batches of 32, without recomputation."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import jax
    import numpy as np
    from gpt2_124m import experiment

    import jaxgpt
    from jaxgpt.config.words import replace_fields
    from jaxgpt.parallel.trainer import make_trainer
    from jaxgpt.tools.plan.topology import topology_devices

    jaxgpt.configure_jax()
    experiment = replace_fields(experiment, {"parallel.micro_batch_size": 32, "model.remat": "none"})
    trainer = make_trainer(experiment, topology_devices(topology))
    key, batch = jax.eval_shape(jax.random.key, 0), trainer.abstract_batch
    rows = trainer.strategy.abstract_tokens(32 * trainer.strategy.data_parallel_size, experiment.model.block_size)
    windows = batch._replace(inputs_BT=rows, targets_BT=rows)
    programs = {
        "init_state": lambda: trainer.init_state.lower(key, None),
        "train_step": trainer.lower,
        "eval_step": lambda: trainer.eval_step.lower(trainer.abstract_state.params, windows),
    }
    at = [processor_seconds()]
    for lower in programs.values():
        with trainer.draw_by_kernel():
            lowered = lower()
        at.append(processor_seconds())
        lowered.compile()
        at.append(processor_seconds())
    table = np.diff(at).reshape(3, 2)
    print(f"| GPT-2 124M on {topology}, processor seconds | traced | compiled |\n|---|---|---|")
    for name, (traced, compiled) in zip([*programs, "all"], [*table, table.sum(axis=0)], strict=True):
        print(f"| {name} | {traced:.1f} | {compiled:.1f} |")


def spread(seconds: list[float]) -> str:
    """Format the median, least and most as table cells."""
    return f"{statistics.median(seconds):.2f} | {min(seconds):.2f} to {max(seconds):.2f}"


def main() -> None:
    """Measure all commands in turns, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trains", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--topology")
    options = parser.parse_args()
    if options.topology:
        return compile_for(options.topology)
    peer = "import torch, transformers; transformers.GPT2LMHeadModel"
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import jax": [sys.executable, "-c", "import jax"],
        "import jax, flax.linen": [sys.executable, "-c", "import jax, flax.linen"],
        "import jaxgpt": [sys.executable, "-c", "import jaxgpt"],
        "import jaxgpt, every name": [
            sys.executable,
            "-c",
            "import jaxgpt; [getattr(jaxgpt, n) for n in jaxgpt.__all__]",
        ],
        "jaxgpt --help": [sys.executable, "-m", "jaxgpt", "--help"],
        "jaxgpt train --help": [sys.executable, "-m", "jaxgpt", "train", "--help"],
    }
    if subprocess.run([options.peer_python, "-c", "import torch, transformers"], capture_output=True).returncode == 0:
        commands["import torch, transformers' GPT-2"] = [options.peer_python, "-c", peer]
    took: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            took[name].append(once(command)[0])
    runs: dict[str, list[dict]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(options.trains):
            cache = tempfile.mkdtemp(dir=directory)
            for kind in runs:
                runs[kind].append(trained(directory, cache))

    base = statistics.median(took["import jax, flax.linen"])
    print(f"{describe_processor()}\n")
    print("| command | median, s | least to most | relative to import jax, flax.linen |")
    print("|---|---|---|---|")
    for name, seconds in took.items():
        print(f"| {name} | {spread(seconds)} | {statistics.median(seconds) / base:.2f} |")
    print("\n| jaxgpt train quickstart | cold cache, s | least to most | warm cache, s | least to most |")
    print("|---|---|---|---|---|")
    for part, label in (("at", "when {}"), ("sums", "of it {}, summed")):
        for name in runs["cold"][0][part]:
            both = (spread([run[part].get(name, 0.0) for run in runs[kind]]) for kind in runs)
            print(f"| {label.format(name)} | {' | '.join(both)} |")
    if options.json:
        options.json.write_text(json.dumps({"commands": took, "train": runs}, indent=1))


if __name__ == "__main__":
    main()
