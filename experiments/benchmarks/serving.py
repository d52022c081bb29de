"""How fast does `jaxgpt serve` answer? GPT-2 124M, random weights, greedy, against `transformers serve`.

Question:  tokens per second, seconds to the first token and between tokens, with 1, 4, 8 and 16 clients at once, each of
           which streams completions of 64 tokens to prompts of 64, one after another.
Command:   python experiments/benchmarks/serving.py      (needs pip install ".[serve,bench]" "transformers[serving]")
           --peer-python PYTHON: an interpreter with transformers, torch, fastapi and accelerate
Method:    both serve one set of weights: transformers writes them, `jaxgpt import` reads them. The tokenizer is made
           here: almost every token is a space and up to four letters, so that a client counts tokens as words. Servers
           take turns, round by round, each alone in a fresh process; one pass at each number of clients warms up, then
           come the measured ones, whose prompts are all different. The table has medians of the rounds. A token arrives
           with the event that carries it: where an event carries several, the time between the others is 0; "stall" is
           the time between events. Both servers give the same text for the same prompt, or the script fails.
Result:    docs/results/serving.md, and LOG.md, 2026-11-23, "decoding in slots, and a server".
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

PROMPT, NEW, EACH = 64, 64, 2
VOCAB = 50257
LETTERS = 4  # tokens of a completion that may be letters without a space, of which the vocabulary has 26
SYSTEMS = {
    "transformers": "transformers serve",
    "transformers-batching": "transformers serve --continuous-batching",
    "jaxgpt": "jaxgpt serve",
    "jaxgpt-reproducible": "jaxgpt serve --reproducible",
}


class Completion(NamedTuple):
    """The response to one request; times in seconds since it was sent."""

    text: str
    arrivals: list[float]  # of each token
    events: list[float]  # of each event with text


def write_model(directory: str) -> None:
    """Write GPT-2 124M with random weights and a tokenizer of words, in Hugging Face's format."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = ["Ġ", *string.ascii_lowercase]
    words = ("".join(word) for n in range(1, 5) for word in itertools.product(string.ascii_lowercase, repeat=n))
    merges = [("Ġ" + word[:-1], word[-1]) for word in itertools.islice(words, VOCAB - 1 - len(alphabet))]
    vocab = {token: i for i, token in enumerate([*alphabet, *map("".join, merges), "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(
        directory
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB))
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)


def make_prompt(rng: random.Random) -> str:
    """Return a text of PROMPT tokens."""
    return "".join(" " + "".join(rng.choices(string.ascii_lowercase, k=3)) for _ in range(PROMPT))


async def complete(port: int, model: str, prompt: str) -> Completion:
    """Stream one greedy completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "stream": True}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    began, text, arrivals, events = time.perf_counter(), "", [], []
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(head.encode() + raw)
    async for line in reader:
        if line.startswith(b"data: {"):
            now = time.perf_counter() - began
            piece = "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            text += piece
            arrivals += [now] * max(piece.count(" "), bool(piece))
            events += [now] * bool(piece)
    writer.close()
    assert NEW - LETTERS <= len(arrivals) <= NEW, f"{len(arrivals)} tokens: {text!r}"
    return Completion(text, arrivals, events)


async def measure_streams(
    port: int, model: str, streams: int, seed: int, each: int = EACH
) -> tuple[list[Completion], float]:
    """Send `each` requests from each client, one after another. Return the completions and the total seconds."""

    async def client(number: int) -> list[Completion]:
        rng = random.Random(f"{seed} {streams} {number}")
        return [await complete(port, model, make_prompt(rng)) for _ in range(each)]

    began = time.perf_counter()
    found = await asyncio.gather(*map(client, range(streams)))
    return list(itertools.chain(*found)), time.perf_counter() - began


@contextlib.contextmanager
def server(system: str, directory: Path, peer_python: str, slots: int):
    """Serve the weights; yield the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if system.startswith("jaxgpt"):
        fixed = ["--reproducible"] if system.endswith("reproducible") else []
        command = [sys.executable, "-m", "jaxgpt", "serve", str(directory / "run"), "--slots", str(slots), *fixed]
    else:
        batching = ["--continuous-batching"] if system.endswith("batching") else []
        command = [peer_python, "-m", "transformers.cli.transformers", "serve", "./hf", "--device", "cpu", *batching]
    with (directory / f"{system}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=directory,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        for _ in range(600):
            assert process.poll() is None, (directory / f"{system}.log").read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def measure(system: str, directory: Path, options, round_number: int) -> dict:
    """Measure a system in a process of its own: {streams: figures}, and the texts by prompt's place."""
    model, found = "run" if system.startswith("jaxgpt") else "./hf", {}
    with server(system, directory, options.peer_python, options.slots) as port:
        if system.startswith("jaxgpt"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response:
                model = json.load(response)["data"][0]["id"]
        for streams in options.clients:
            asyncio.run(measure_streams(port, model, streams, seed=-1, each=1))  # warms up
            completions, seconds = asyncio.run(measure_streams(port, model, streams, seed=round_number))
            between = [b - a for c in completions for a, b in itertools.pairwise(c.arrivals)]
            stalls = [b - a for c in completions for a, b in itertools.pairwise(c.events)]
            found[streams] = {
                "tokens_per_second": len(completions) * NEW / seconds,
                "first": [c.arrivals[0] for c in completions],
                "between": between,
                "stalls": stalls,
                "texts": [c.text for c in completions],
            }
    return found


def percentile(values: list[float], p: float) -> float:
    """Return the p-th percentile in milliseconds."""
    ranked = sorted(values)
    return 1e3 * ranked[min(int(p / 100 * len(ranked)), len(ranked) - 1)]


def print_table(rounds: dict[str, list[dict]]) -> None:
    """Print throughput and latency of each system at each number of streams, and where texts differ."""

    def speed(system: str, streams: int) -> float:
        return statistics.median(found[streams]["tokens_per_second"] for found in rounds[system])

    print(
        "| server | streams | tokens/s (rounds) | ratio to the best peer | first token p50, p95 (ms) "
        "| between tokens p50, p95, mean (ms) | stall p50, p95 (ms) |"
    )
    print("|---|---|---|---|---|---|---|")
    peers = [system for system in rounds if not system.startswith("jaxgpt")]
    systems = list(rounds)
    clients = list(rounds[systems[0]][0])
    for system, streams in itertools.product(systems, clients):
        pooled = {
            what: [x for found in rounds[system] for x in found[streams][what]]
            for what in ("first", "between", "stalls")
        }
        each = ", ".join(f"{found[streams]['tokens_per_second']:.1f}" for found in rounds[system])
        ratio = speed(system, streams) / max(speed(peer, streams) for peer in peers) if peers else 1.0
        ranks = {what: [f"{percentile(values, p):.0f}" for p in (50, 95)] for what, values in pooled.items()}
        print(
            f"| {SYSTEMS[system]} | {streams} | {speed(system, streams):.1f} ({each}) | {ratio:.2f} "
            f"| {', '.join(ranks['first'])} | {', '.join(ranks['between'])}, {1e3 * statistics.mean(pooled['between']):.0f} "
            f"| {', '.join(ranks['stalls'])} |"
        )
    pairs = [(a, b) for found in zip(*rounds.values(), strict=True) for s in clients
             for texts in zip(*(f[s]["texts"] for f in found), strict=True) for a, b in itertools.pairwise(texts)]  # fmt: skip
    print(f"equal texts: {sum(a == b for a, b in pairs)} of {len(pairs)} pairs between {', '.join(systems)}")


def main() -> None:
    """Measure all systems in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16], help="clients at once")
    parser.add_argument("--slots", type=int, default=8, help="of jaxgpt serve")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="measure only these")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has transformers and torch")
    parser.add_argument("--write-model", help="write the weights into this directory and exit; used by each call")
    parser.add_argument("--json", help="write all rounds to this file")
    options = parser.parse_args()
    if options.write_model:
        write_model(options.write_model)
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        hf = str(directory / "hf")
        subprocess.run([options.peer_python, __file__, "--write-model", hf], check=True, timeout=600)
        make_run = [sys.executable, "-m", "jaxgpt", "import", hf, "--run-dir", str(directory / "run")]
        subprocess.run(make_run, check=True, timeout=600, stdout=subprocess.DEVNULL)
        rounds: dict[str, list[dict]] = {system: [] for system in options.system or SYSTEMS}
        for number in range(options.rounds):
            for system in rounds:
                rounds[system].append(measure(system, directory, options, number))
                print(f"round {number}: {system} measured", file=sys.stderr)
    print_table(rounds)
    if options.json:
        Path(options.json).write_text(json.dumps(rounds))


if __name__ == "__main__":
    main()
