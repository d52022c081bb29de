"""How fast is a training step? jaxgpt, nanoGPT and transformers' GPT-2, in turns.

Question:  tokens per second of the same GPT, batch and optimiser (AdamW, norm clipped at 1, float32), each with its own
           way of fetching a batch.
Command:   python experiments/benchmarks/training.py --nanogpt DIR        (needs pip install ".[bench]", and
           for the compiled peers a C++ compiler); --shape wide; --json FILE; --systems jaxgpt nanogpt-compiled
           --profile: print where the step of jaxgpt, or of the first of --systems, spends its time; --busy N: measure again beside N busy processes
           --peer-python PYTHON: an interpreter that has torch, for the peers and for jaxgpt-peer, jaxgpt with its jax
Method:    each system runs in a process of its own, compiled and warm. They take turns: a few seconds of steps each,
           round after round, so that a busy minute of the machine affects all of them. Ratios are medians of the ratios
           within a round. --nanogpt: a checkout of github.com/karpathy/nanoGPT, used in place. With --busy each round
           has its turns twice, alone and beside processes that count. Fewer cores: `taskset -c 0 python ...`.
Result:    docs/results/training.md, and LOG.md, 2026-11-29, "beside nanoGPT on a CPU, again".
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from turns import print_table, spread, take_turns

SHAPES = {  # nanoGPT's CPU configuration from its README, and config/train_shakespeare_char.py with a smaller batch
    "small": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "dropout": 0.0},
    "wide": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 12, "dropout": 0.0},
}
VOCAB, TEXT = 65, 1_000_000
# With that attention or dtype, or by the peers' interpreter.
OURS = ("jaxgpt", "jaxgpt-native", "jaxgpt-bfloat16", "jaxgpt-native-bfloat16", "jaxgpt-peer", "jaxgpt-native-peer")
PEERS = ("nanogpt", "nanogpt-compiled", "transformers", "transformers-compiled")
ON_REQUEST = ("nanogpt-bfloat16", "nanogpt-compiled-bfloat16")  # by --systems
Steps = Callable[[int], float]  # number of steps -> the last loss, when all are done


def make_jaxgpt(shape: dict, name: str = "jaxgpt") -> tuple:
    """Return jaxgpt's trainer for a shape, and its batches. name: one of `OURS`."""
    from jaxgpt.parallel.jax_setup import configure_jax

    configure_jax()
    import numpy as np

    from jaxgpt import Experiment, GPTConfig, OptimConfig, TrainConfig
    from jaxgpt.data.pipeline import Tokens, training_batches
    from jaxgpt.parallel.trainer import make_trainer

    sizes = {name: value for name, value in shape.items() if name != "batch_size"}
    trainer = make_trainer(
        Experiment(
            name="benchmark",
            model=GPTConfig(vocab_size=VOCAB, bias=False, activation="gelu", **sizes),
            optim=OptimConfig(learning_rate=1e-3, beta2=0.99, weight_decay=0.1, grad_clip=1.0),
            train=TrainConfig(
                batch_size=shape["batch_size"],
                steps=10**6,
                attention="native" if "native" in name else "auto",
                dtype="bfloat16" if "bfloat16" in name else "auto",
            ),
        )
    )
    text = Tokens([np.random.default_rng(0).integers(0, VOCAB, TEXT).astype(np.uint16)])
    batches = training_batches(text, block_size=shape["block_size"], batch_size=shape["batch_size"], seed=0)
    return trainer, batches


def trainer_steps(trainer, batches: Iterator) -> Steps:
    """Return the steps of a trainer from step 0, with as many in flight as `fit` has."""
    import jax

    from jaxgpt.parallel.trainer import IN_FLIGHT

    key = jax.random.key(1)
    with trainer.draw_by_kernel():  # as `fit` does
        state = trainer.init_state(jax.random.key(0))

    def run(steps: int) -> float:
        nonlocal state
        pending = deque()
        for _ in range(steps):
            state, metrics = trainer.train_step(state, trainer.strategy.shard_batch(next(batches)), key)
            pending.append(metrics["loss"])
            if len(pending) > IN_FLIGHT:
                float(pending.popleft())
        return float(pending[-1])

    return run


def torch_steps(shape: dict, options, name: str) -> Steps:
    """Build the training step of a peer, eager or compiled."""
    import torch

    torch.manual_seed(0)
    if name.startswith("nanogpt"):
        module = load_nanogpt(options.nanogpt)
        sizes = {name: value for name, value in shape.items() if name != "batch_size"}
        model = module.GPT(module.GPTConfig(vocab_size=VOCAB, bias=False, **sizes))
    else:
        import transformers

        p = shape["dropout"]
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB,
                n_positions=shape["block_size"],
                n_layer=shape["n_layer"],
                n_head=shape["n_head"],
                n_embd=shape["n_embd"],
                activation_function="gelu",
                resid_pdrop=p,
                embd_pdrop=p,
                attn_pdrop=p,
                use_cache=False,
                bos_token_id=None,  # the default is beyond this vocabulary
                eos_token_id=None,
            )
        )
    model.train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.99),
    )
    called = torch.compile(model) if "compiled" in name else model
    autocast = torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in name)
    text = torch.randint(0, VOCAB, (TEXT,))
    T, B = shape["block_size"], shape["batch_size"]

    def run(steps: int) -> float:
        for _ in range(steps):
            starts = torch.randint(len(text) - T, (B,)).tolist()
            x = torch.stack([text[i : i + T] for i in starts])
            y = torch.stack([text[i + 1 : i + 1 + T] for i in starts])
            if name.startswith("nanogpt"):
                with autocast:
                    _, loss = called(x, y)
            else:
                logits = called(x).logits
                loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), y.view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def load_nanogpt(directory: str):
    """Import the model.py of a checkout of nanoGPT."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", os.path.join(directory, "model.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worker(options) -> None:
    """Build a system, and serve its steps."""
    shape = SHAPES[options.shape] | json.loads(options.sizes)
    began = time.perf_counter()
    run = (
        trainer_steps(*make_jaxgpt(shape, options.worker))
        if options.worker in OURS
        else torch_steps(shape, options, options.worker)
    )
    serve(run, began)


def serve(run: Steps, began: float, **facts) -> None:
    """Compile a system's steps, then run as many as each line of stdin asks for.

    Prints {"first": seconds from `began` to the first step, **facts}, then {"seconds": per step, "loss"} for each line.
    """
    run(1)
    first = time.perf_counter() - began
    run(10)
    print(json.dumps({"first": first} | facts), flush=True)
    for line in sys.stdin:
        steps = int(line)
        began = time.perf_counter()
        loss = run(steps)
        print(json.dumps({"seconds": (time.perf_counter() - began) / steps, "loss": loss}), flush=True)


class Worker:
    """A process that runs training steps of one system on demand."""

    def __init__(self, command: list[str], **env: str):
        """Start the process."""
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | env
        )
        self.facts: dict = {}

    def wait_until_ready(self, deadline: float | None = None) -> float:
        """Return the seconds to its first step, once that is done; kill it if that takes `deadline` seconds more."""
        timer = threading.Timer(threading.TIMEOUT_MAX if deadline is None else deadline, self.process.kill)
        timer.daemon = True
        timer.start()
        self.facts = self.answer()
        timer.cancel()
        return self.facts["first"]

    def answer(self) -> dict:
        """Return the next line of JSON that the process prints."""
        for line in self.process.stdout:
            if line.startswith("{"):  # nanoGPT also prints its size
                return json.loads(line)
        raise SystemExit(f"{' '.join(self.process.args)} ended with {self.process.wait()}")

    def seconds(self, steps: int) -> float:
        """Run some steps and return the seconds per step."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.answer()["seconds"]

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(60)


def start_worker(name: str, options, **env: str) -> Worker:
    """Start the worker of one of this file's systems, and wait for its first step."""
    python = sys.executable if name in OURS and not name.endswith("-peer") else options.peer_python
    command = [python, __file__, "--worker", name, "--shape", options.shape, "--sizes", options.sizes]
    worker = Worker(command + ([] if options.nanogpt is None else ["--nanogpt", options.nanogpt]), **env)
    worker.wait_until_ready()
    return worker


def arguments(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that the benchmarks of workers share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has torch")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument(
        "--sizes", default="{}", help='overrides of the shape, as JSON: {"dropout": 0.2, "batch_size": 64}'
    )
    parser.add_argument("--systems", nargs="+", choices=(*OURS, *PEERS, *ON_REQUEST))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", help="write all times to this file")
    return parser


def systems(options) -> list[str]:
    """Return the systems to compare; nanoGPT's only with a checkout."""
    return options.systems or ["jaxgpt", *(p for p in PEERS if options.nanogpt or not p.startswith("nanogpt"))]


def compare(options, shape: dict) -> None:
    """Measure all systems in turns, and print the tables."""
    workers = {name: start_worker(name, options) for name in systems(options)}
    steps = {name: max(1, round(options.seconds / each.seconds(3))) for name, each in workers.items()}
    alone, beside = take_turns(
        {n: lambda n=n: workers[n].seconds(steps[n]) for n in workers}, options.rounds, options.busy
    )
    for each in workers.values():
        each.close()
    tokens = shape["batch_size"] * shape["block_size"]
    print(f"{tokens} tokens a step, {options.rounds} rounds of {options.seconds} s")
    first = {name: each.facts["first"] for name, each in workers.items()}
    rates = {name: tokens / statistics.median(seconds) for name, seconds in alone.items()}
    print_table(
        alone, "tokens/s | first step, s", {name: f"{rates[name]:,.0f} | {first[name]:.1f}" for name in workers}
    )
    if options.busy:
        slower = {name: spread(beside[name], alone[name]) for name in workers}
        print_table(beside, f"beside {options.busy} busy: over its time alone", slower)
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"shape": shape, "seconds": alone, "busy": beside, "first": first}, f)


def main() -> None:
    """Compare the systems, or print the profile of jaxgpt's step."""
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    parser.add_argument("--busy", type=int, default=0, help="measure again beside that many busy processes")
    parser.add_argument("--profile", action="store_true", help="print where the time of jaxgpt's step goes, on CPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    from processor import describe_processor

    shape = SHAPES[options.shape] | json.loads(options.sizes)
    print(f"{describe_processor()}\n{shape}")
    if options.profile:
        from step_profile import print_profile

        trainer, batches = make_jaxgpt(shape, systems(options)[0])
        print_profile(trainer, batches, trainer_steps(trainer, batches), options.seconds)
    else:
        compare(options, shape)


if __name__ == "__main__":
    main()
