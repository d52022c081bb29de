"""How long does the first training step take? jaxgpt, nanoGPT and transformers' GPT-2, with cold and warm caches.

Question:  seconds from the start of a new process to the end of its first step: imports, the model, compilation.
Command:   python experiments/benchmarks/compilation.py --nanogpt DIR        (needs what training.py needs)
           --shape wide; --systems jaxgpt nanogpt-compiled; --rounds N; --json FILE
Method:    the workers of training.py, one at a time, in turns. Cold: an empty cache directory, for XLA's programs and
           for torch's. Warm: the same directory again. The eager peers cache nothing, and show the cost without
           compilation.
Result:    docs/results/training.md, under "Start-up", and LOG.md, 2026-11-22, "another machine, and the second rung".
"""

import json
import statistics
import tempfile

from processor import describe_processor
from training import arguments, start_worker, systems


def main() -> None:
    """Measure all systems in turns, and print the table."""
    options = arguments(__doc__, rounds=3).parse_args()
    names = systems(options)
    took: dict[str, dict[str, list[float]]] = {name: {"cold": [], "warm": []} for name in names}
    for _ in range(options.rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                for kind in took[name]:
                    worker = start_worker(name, options, JAXGPT_CACHE=cache, TORCHINDUCTOR_CACHE_DIR=cache)
                    worker.close()
                    took[name][kind].append(worker.facts["first"])

    print(f"{describe_processor()}; the shape {options.shape}\n")
    print("| system | cold cache, s: median (least to most) | over jaxgpt's | warm cache, s | over jaxgpt's |")
    print("|---|---|---|---|---|")
    for name in names:
        cells = []
        for kind, seconds in took[name].items():
            over = statistics.median(seconds) / statistics.median(took[names[0]][kind])
            cells.append(f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | {over:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")
    if options.json:
        with open(options.json, "w") as f:
            json.dump(took, f)


if __name__ == "__main__":
    main()
