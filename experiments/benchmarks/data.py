"""Is data ever the bottleneck? Tokenisation, batches, and the memory of a large corpus.

Question:  MB/s from text to token files, tokens/s of the training batches, and megabytes to open a corpus of 10 GB.
Command:   python experiments/benchmarks/data.py TEXT... [--megabytes 60] [--rounds 3] [--gigabytes 10] [--json FILE]
           (BPE needs `jaxgpt[bpe]`, the peer of the batches needs torch)
Method:    the lines of TEXT, shuffled and repeated until they reach the size. Ours is all of `prepare`: both passes
           over the text, and the token files on disk. Its peer only encodes a text in memory: nanoGPT's `[stoi[c] for c
           in s]`, bytes in a list, and one call of `tokenizers`. All take turns; medians of the rounds. "By the clock"
           is elapsed time, "per CPU second" the CPU time of all processes. Batches are compared with nanoGPT's
           get_batch, which draws starts at random and stacks slices. Memory is anonymous memory above that after the
           imports: the kernel can reclaim mapped pages of the file.
Result:    docs/results/training.md, under "Data", and LOG.md, 2026-11-22, "where a step's time goes".
"""

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxgpt.data.dataset import DataConfig, open_data
from jaxgpt.data.pipeline import Tokens, training_batches
from jaxgpt.data.tokenizer import train_bpe

PEER_CHARACTERS = 8_000_000  # the part of the text that peers encode: lists of all of it would take gigabytes
SHAPES = {"12 x 64": (12, 64, 2000), "32 x 1024": (32, 1024, 200)}
LOAD = """
import sys, threading, time
from jaxgpt.data.dataset import DataConfig
from jaxgpt.data.dataset import open_data
def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) / 1024
seen, done, before = [], threading.Event(), anonymous()
def watch():
    while not done.wait(0.01):
        seen.append(anonymous())
thread = threading.Thread(target=watch)
thread.start()
began = time.perf_counter()
data = open_data(DataConfig(path=sys.argv[1], tokenizer="ids"), block_size=1024, vocab_size=50257)
seconds = time.perf_counter() - began
done.set()
thread.join()
print(max([*seen, anonymous()]) - before, seconds, len(data.train) + len(data.val))
"""


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """Return (rate by the clock, rate by CPU time), for the amount of work that `work` returns.

    CPU time includes that of child processes that have ended.
    """

    def processor() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + ended.ru_utime + ended.ru_stime

    clock, before = time.perf_counter(), processor()
    done = work()
    return done / (time.perf_counter() - clock), done / (processor() - before)


def ours(tokenizer: str, text: Path) -> float:
    """Prepare a text with an empty cache; return its size in MB."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["JAXGPT_CACHE"] = cache
        open_data(DataConfig(path=str(text), tokenizer=tokenizer), block_size=64)
    return text.stat().st_size / 1e6


def batches(tokens: Tokens, B: int, T: int, steps: int) -> float:
    """Read batches from the training pipeline; return the number of tokens."""
    made = training_batches(tokens, block_size=T, batch_size=B, seed=0)
    next(made)  # starts the thread that reads
    for _ in itertools.islice(made, steps):
        pass
    made.close()
    return steps * B * T


def nanogpts(path: Path, B: int, T: int, steps: int) -> float:
    """Read batches as nanoGPT's get_batch does; return the number of tokens."""
    import torch

    for _ in range(steps):
        data = np.memmap(path, dtype=np.uint16, mode="r")  # opened for each batch, as nanoGPT does
        ix = torch.randint(len(data) - T, (B,))
        torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix])
        torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix])
    return steps * B * T


def main() -> None:
    """Measure all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measured(options, Path(directory))
    print(
        "| what | unit | jaxgpt, by the clock | jaxgpt, per CPU second | the peer "
        "| clock / peer's | per CPU second / peer's |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, (unit, mine, peer) in found["rates"].items():
        (wall, core), (peer_wall, peer_core) = (
            tuple(statistics.median(x) for x in zip(*runs, strict=True)) if runs else (float("nan"),) * 2
            for runs in (mine, peer)
        )
        print(
            f"| {name} | {unit} | {wall:,.1f} ({', '.join(f'{x:,.1f}' for x, _ in mine)}) | {core:,.1f} | {peer_wall:,.1f} "
            f"| {wall / peer_wall:.1f} | {core / peer_core:.1f} |"
        )
    megabytes, seconds, _ = found["corpus"]
    print(
        f"| to open a corpus of {options.gigabytes:g} GB, its SHA-256 included | MB | {megabytes:.0f} ({seconds:.0f} s) | | | | |"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def measured(options: argparse.Namespace, directory: Path) -> dict:
    """Generate the text and the tokens, and return the rates and the memory of a large corpus."""
    lines = [line for path in options.texts for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]
    random.seed(0)
    text, pieces, length = directory / "text.txt", [], 0
    while length < options.megabytes * 1e6:
        random.shuffle(lines)
        pieces.append("".join(lines))
        length += len(pieces[-1].encode())
    whole = "".join(pieces)
    text.write_text(whole, encoding="utf-8")
    part = whole[:PEER_CHARACTERS]
    size = len(part.encode()) / 1e6
    bpe = train_bpe(["".join(lines)], 16384)
    (directory / "tokenizer.json").write_text(bpe.to_json(), encoding="utf-8")
    stoi = {c: i for i, c in enumerate(sorted(set(part)))}

    import tokenizers

    library = tokenizers.Tokenizer.from_str(bpe.to_json())

    def listed(encode: Callable[[], object]) -> Callable[[], float]:
        def work() -> float:
            encode()
            return size

        return work

    path = directory / "tokens.bin"
    np.random.default_rng(0).integers(0, 50257, 20_000_000).astype(np.uint16).tofile(path)
    tokens = Tokens([np.memmap(path, np.uint16, "r")])
    work: dict[str, tuple[str, Callable[[], float], Callable[[], float] | None]] = {
        "characters": ("MB/s", lambda: ours("char", text), listed(lambda: [stoi[c] for c in part])),
        "bytes": ("MB/s", lambda: ours("byte", text), listed(lambda: list(part.encode()))),
        "BPE of 16,384": (
            "MB/s",
            lambda: ours(str(directory / "tokenizer.json"), text),
            listed(lambda: library.encode(part).ids),
        ),
    }
    try:
        import torch  # noqa: F401

        peered = True
    except ImportError:
        peered = False
    for name, (B, T, steps) in SHAPES.items():
        peer = (lambda B=B, T=T, steps=steps: nanogpts(path, B, T, steps) / 1e6) if peered else None
        work[f"batches of {name}"] = (
            "M tokens/s",
            lambda B=B, T=T, steps=steps: batches(tokens, B, T, steps) / 1e6,
            peer,
        )
    rates: dict = {name: (unit, [], []) for name, (unit, _, _) in work.items()}
    for _ in range(options.rounds):
        for name, (_, mine, peer) in work.items():
            rates[name][1].append(timed(mine))
            if peer is not None:
                rates[name][2].append(timed(peer))
    large = directory / "large.bin"
    with large.open("wb") as f:
        f.truncate(int(options.gigabytes * 1e9) // 2 * 2)
    done = subprocess.run([sys.executable, "-c", LOAD, str(large)], stdout=subprocess.PIPE, text=True, check=True)
    return {"rates": rates, "corpus": [float(x) for x in done.stdout.split()]}


if __name__ == "__main__":
    main()
