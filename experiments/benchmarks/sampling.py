"""How fast is sampling? GPT-2 124M, random weights, greedy, against transformers' `generate` with its cache.

Question:  tokens per second at batch 1, 8 and 32, with 64 prompt tokens and 64 new ones, prefill included.
Command:   python experiments/benchmarks/sampling.py            (needs pip install ".[bench]")
           --weights int8 --weights bfloat16: fewer bits as well; --peer-python PYTHON: an interpreter with transformers
Method:    each system in a process of its own, one warm-up call for each batch, then the median of three calls. Systems
           take turns, round by round, and the table has the median round. The ceiling at batch 1 is memory bandwidth:
           each token reads all weights, at the measured speed of a sum over as much memory.
Result:    docs/results/sampling.md, and LOG.md, 2026-11-26, "decoding at the memory's speed".
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

PROMPT, NEW, BATCHES = 64, 64, (1, 8, 32)
LONG = 512  # tokens of another prompt, of which only the next token is drawn


def measure(system: str) -> dict:
    """Measure a system in this process.

    Returns {batch: {"total": tokens/s, "decode": tokens/s after the first token, "first": seconds to it}}, the seconds to
    the token after a `long` prompt, and the system's size in megabytes.
    """
    generate, extra = transformers_generate() if system == "transformers" else jaxgpt_generate(system)
    found = {}
    for batch in BATCHES:
        generate(batch, NEW)  # compiles
        whole = statistics.median(seconds(generate, batch, NEW) for _ in range(3))
        first = statistics.median(seconds(generate, batch, 1) for _ in range(3))
        found[batch] = {"total": batch * NEW / whole, "decode": batch * (NEW - 1) / (whole - first), "first": first}
    generate(1, 1, LONG)
    return found | extra | {"long": statistics.median(seconds(generate, 1, 1, LONG) for _ in range(3))}


def seconds(generate, *args) -> float:
    """Return the seconds that `generate(*args)` takes."""
    began = time.perf_counter()
    generate(*args)
    return time.perf_counter() - began


def jaxgpt_generate(weights: str):
    """Return (generate, measures): jaxgpt with random weights of the given kind, and the ceiling of this machine."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxgpt
    from jaxgpt.presets import gpt2

    jaxgpt.configure_jax()
    model = jaxgpt.GPT(gpt2())
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    model, params = jaxgpt.for_decoding(model, params, weights)
    prompts = np.random.default_rng(0).integers(0, 50257, (max(BATCHES), LONG)).tolist()

    def generate(batch: int, new: int, prompt: int = PROMPT) -> None:
        out = jaxgpt.generate(
            model,
            params,
            [row[:prompt] for row in prompts[:batch]],
            key=jax.random.key(0),
            max_new_tokens=new,
            sampling=jaxgpt.Sampling(greedy=True),
            bucket=prompt,
        )
        assert [len(row) for row in out.tokens] == [new] * batch

    size = sum(x.nbytes for x in jax.tree.leaves(params))
    bandwidth = read_bandwidth(2**27)  # 512 MiB, about the size of the weights in float32
    return generate, {"megabytes": size / 1e6, "gigabytes_per_second": bandwidth / 1e9, "ceiling": bandwidth / size}


def read_bandwidth(numbers: int) -> float:
    """Return the bytes per second at which the device adds up that many float32 numbers: the best of five."""
    import jax
    import jax.numpy as jnp

    ones, add = jnp.ones(numbers), jax.jit(jnp.sum)
    add(ones).block_until_ready()
    return ones.nbytes / min(seconds(lambda: add(ones).block_until_ready()) for _ in range(5))


def transformers_generate():
    """Return (generate, measures): transformers' GPT-2 with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    prompts = torch.randint(0, 50257, (max(BATCHES), LONG))

    def generate(batch: int, new: int, prompt: int = PROMPT) -> None:
        ids = prompts[:batch, :prompt]
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape == (batch, prompt + new)

    return generate, {"megabytes": sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6}


def main() -> None:
    """Measure all systems in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--weights", action="append", default=[], choices=("bfloat16", "int8"), help="in addition to float32"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has transformers and torch")
    parser.add_argument(
        "--system", help="measure only this system, in this process, and print JSON; used by each round"
    )
    parser.add_argument("--json", help="write all rounds to this file")
    options = parser.parse_args()
    if options.system:
        print(json.dumps(measure(options.system)))
        return
    systems = ["transformers", "float32", *options.weights]
    runs = {name: [] for name in systems}
    for _ in range(options.rounds):
        for name in systems:
            python = options.peer_python if name == "transformers" else sys.executable
            done = subprocess.run(
                [python, __file__, "--system", name], stdout=subprocess.PIPE, text=True, check=True, timeout=1200
            )
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))

    def median(name: str, batch: int, what: str) -> float:
        return statistics.median(run[str(batch)][what] for run in runs[name])

    from processor import describe_processor  # beside this script

    print(f"{describe_processor()}\n")
    print("| system | MB | batch | tokens/s (rounds) | ratio | decode only | ratio | prefill and first token, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for name in systems:
        for batch in BATCHES:
            each = ", ".join(f"{run[str(batch)]['total']:.1f}" for run in runs[name])
            total, decode = (
                median(name, batch, what) / median("transformers", batch, what) for what in ("total", "decode")
            )
            print(
                f"| {name if name == 'transformers' else 'jaxgpt, ' + name} | {runs[name][0]['megabytes']:.0f} | {batch} "
                f"| {median(name, batch, 'total'):.1f} ({each}) | {total:.2f} | {median(name, batch, 'decode'):.1f} "
                f"| {decode:.2f} | {median(name, batch, 'first') * 1e3:.0f} |"
            )
    for name in systems:
        print(
            f"{name}: the token after {LONG} takes {1e3 * statistics.median(run['long'] for run in runs[name]):.0f} ms"
        )
    for name in systems[1:]:
        ceiling = statistics.median(run["ceiling"] for run in runs[name])
        bandwidth = statistics.median(run["gigabytes_per_second"] for run in runs[name])
        share = median(name, 1, "decode") / ceiling
        print(f"{name}: memory at {bandwidth:.1f} GB/s allows {ceiling:.1f} tokens/s at batch 1; reached {share:.0%}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump(runs, f)


if __name__ == "__main__":
    main()
