"""How fast do jaxgpt, transformers and llama.cpp start a published model, and how fast do they decode?

Question:  seconds from a command to the first token, and tokens per second of one text after a prompt of 64 tokens.
Command:   python experiments/benchmarks/published.py FILE.gguf         (needs pip install ".[gguf]")
           --transformers PYTHON, --llama-cpp PYTHON: interpreters with torch and transformers, or with llama-cpp-python
Method:    the file is imported in float32, and exported for transformers in float32 and for llama.cpp as F32 and Q8_0.
           A start is a process that loads the model and draws one token: its seconds by the clock, and of processor
           time. It is cold if the compilation cache is empty. The time of one token is subtracted from the time of 64
           to get the decoding, each the median of three calls after one to warm up. All systems take turns, round by round.
Result:    docs/results/sampling.md, under "A published model", and LOG.md, 2026-11-28, "four bits that lose less".
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from processor import describe_processor

PROMPT = "The capital of France is"
LENGTH, NEW, THREADS = 64, 64, 2
IDS = [*range(1000, 1000 + LENGTH)]
READ = (
    "import sys, pathlib, jaxgpt.gguf.file as f; [x.read() for x in f.read_gguf(pathlib.Path(sys.argv[1]))[1].values()]"
)
SAMPLE = ("sample", "--prompt", PROMPT, "--max-new-tokens", "1", "--greedy")


def load_jaxgpt(run: str, weights: str, prompt: str | None) -> Callable:
    """Return a function that draws tokens greedily. prompt: as for all three, None means `IDS`."""
    import jax

    import jaxgpt

    assert prompt is None  # the command line is measured
    jaxgpt.configure_jax()
    loaded = jaxgpt.load(run)
    model, params = jaxgpt.for_decoding(loaded.model, loaded.params, weights)
    how = {"key": jax.random.key(0), "sampling": jaxgpt.Sampling(greedy=True), "bucket": LENGTH}
    return lambda new: jaxgpt.generate(model, params, [IDS], max_new_tokens=new, **how)


def load_transformers(folder: str, dtype: str, prompt: str | None) -> Callable:
    """Return a function that draws tokens greedily."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.tensor([IDS])
    if prompt is not None:
        ids = transformers.AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids

    def generate(new: int) -> None:
        with torch.no_grad():
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    return generate


def load_llama(file: str, _: str, prompt: str | None) -> Callable:
    """Return a function that draws tokens greedily."""
    import llama_cpp

    model = llama_cpp.Llama(file, n_ctx=512, n_threads=THREADS, n_threads_batch=THREADS, verbose=False)
    ids = IDS if prompt is None else model.tokenize(prompt.encode())

    def generate(new: int) -> None:
        model.reset()
        for number, _ in enumerate(model.generate(ids, top_k=1), 1):
            if number == new:
                return

    return generate


LOADERS = {"jaxgpt": load_jaxgpt, "transformers": load_transformers, "llama.cpp": load_llama}


def decode_speed(generate: Callable) -> float:
    """Return tokens per second after the first."""

    def median_seconds(new: int) -> float:
        took = []
        for _ in range(3):
            began = time.perf_counter()
            generate(new)
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    generate(NEW)
    generate(1)
    return (NEW - 1) / (median_seconds(NEW) - median_seconds(1))


def run_process(command: list[str], **env: str) -> tuple[float, float, str]:
    """Run a command, and return its seconds by the clock and of processor time, and its output."""
    began, before = time.perf_counter(), os.times()
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    now = os.times()
    used = now.children_user + now.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, used, done.stdout


def main() -> None:
    """Measure all systems in turns, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers", metavar="PYTHON")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--measure", nargs=4, help="what each round calls: SYSTEM MODEL KIND start|decode")
    options = parser.parse_args()
    if options.measure:
        system, model, kind, what = options.measure
        generate = LOADERS[system](model, kind, PROMPT if what == "start" else None)
        if what == "start":
            generate(1)
        else:
            print(json.dumps(decode_speed(generate)))
        return
    with tempfile.TemporaryDirectory() as place:
        compare(Path(options.file), Path(place), options)


def compare(file: Path, place: Path, options: argparse.Namespace) -> None:
    """Import and export a file, measure all systems, and print what they took."""
    ours, cache = [sys.executable, "-m", "jaxgpt"], {"JAXGPT_CACHE": str(place / "cache")}
    run, folder = str(place / "run"), str(place / "folder")
    took: dict[str, list[tuple[float, float]]] = {"reading and dequantising": [], "import": []}
    for number in range(options.rounds):
        took["reading and dequantising"].append(run_process([sys.executable, "-c", READ, str(file)])[:2])
        where = run if not number else f"{run}-{number}"
        took["import"].append(run_process([*ours, "import", str(file), "--run-dir", where], **cache)[:2])
    systems = [(sys.executable, "jaxgpt", run, kind) for kind in ("float32", "bfloat16", "int8")]
    if options.transformers:
        run_process([*ours, "export", run, "--to", "hf", "--out", folder])
        systems += [(options.transformers, "transformers", folder, kind) for kind in ("float32", "bfloat16")]
    if options.llama_cpp:
        for dtype in ("float32", "q8_0"):
            run_process([*ours, "export", run, "--to", "gguf", "--dtype", dtype, "--out", f"{place}/{dtype}.gguf"])
        files = {"float32": f"{place}/float32.gguf", "q8_0": f"{place}/q8_0.gguf", "the file": str(file)}
        systems += [(options.llama_cpp, "llama.cpp", name, kind) for kind, name in files.items()]
    speeds: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for python, system, model, kind in systems:
            measure, name = [python, __file__, "--measure", system, model, kind], f"{system}, {kind}"
            if system == "jaxgpt":
                command = [*ours, SAMPLE[0], model, *SAMPLE[1:], "--weights", kind]
                took.setdefault(f"{name}, cold", []).append(
                    run_process(command, JAXGPT_CACHE=f"{place}/cold-{kind}-{number}")[:2]
                )
                run_process(command, **cache)
                took.setdefault(f"{name}, warm", []).append(run_process(command, **cache)[:2])
            else:
                took.setdefault(name, []).append(run_process([*measure, "start"])[:2])
            speeds.setdefault(name, []).append(float(run_process([*measure, "decode"], **cache)[2].splitlines()[-1]))

    print(f"{describe_processor()}\n\n| process | s by the clock | s of processor time |")
    print("|---|---|---|")
    for name, pairs in took.items():
        cells = (f"{statistics.median(x):.1f} ({min(x):.1f} to {max(x):.1f})" for x in zip(*pairs, strict=True))
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| decoding one text | tokens/s | rounds |\n|---|---|---|")
    for name, found in speeds.items():
        print(f"| {name} | {statistics.median(found):.1f} | {', '.join(f'{x:.1f}' for x in found)} |")


if __name__ == "__main__":
    main()
