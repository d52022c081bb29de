"""Run in a process with JAX_NUM_CPU_DEVICES=8: prints, as JSON, what each strategy did. See test_strategies.py."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxgpt.checkpoint import Checkpoints
from jaxgpt.config import GPTConfig, OptimConfig, ParallelConfig
from jaxgpt.data.pipeline import Batch
from jaxgpt.model import GPT
from jaxgpt.optim import learning_rate, make_optimizer
from jaxgpt.parallel.choose import choose_strategy
from jaxgpt.parallel.strategy import share
from jaxgpt.train import eval_step, train_step

STEPS, BATCH, T = 20, 16, 16
# Every axis divides over 8; dropout would draw other numbers on other devices.
CONFIG = GPTConfig(
    vocab_size=16, block_size=T, n_layer=2, n_head=4, n_embd=16, position="rope", qk_norm=True, scan_layers=True
)
STRATEGIES = {
    "single": ParallelConfig(strategy="single"),
    "accumulation": ParallelConfig(strategy="single", micro_batch_size=4),
    "pmap": ParallelConfig(strategy="pmap"),
    "data": ParallelConfig(strategy="mesh"),
    "fsdp": ParallelConfig(strategy="mesh", data=1, fsdp=-1),
    "tensor": ParallelConfig(strategy="mesh", tensor=2),
    "all": ParallelConfig(strategy="mesh", data=2, fsdp=2, tensor=2),
    "all, in pieces": ParallelConfig(strategy="mesh", data=2, fsdp=2, tensor=2, micro_batch_size=2, loss_chunk=4),
}


def tokens(step: int) -> np.ndarray:
    """Every row counts on from somewhere in strides of its own: something to learn, quickly."""
    start, stride = np.random.default_rng(step).integers(0, 16, (2, BATCH, 1))
    return ((start + (stride % 3) * np.arange(T + 1)) % 16).astype(np.int32)


class Trainer:
    def __init__(self, name: str, optimizer: str, devices: int = 8, model: GPTConfig = CONFIG):
        optim = OptimConfig(name=optimizer, warmup_steps=2, learning_rate=1e-2)
        plain, self.optimizer = GPT(model), make_optimizer(optim, STEPS)
        parallel = STRATEGIES[name]
        self.strategy = choose_strategy(parallel, plain, self.optimizer, jax.devices()[:devices])
        self.model = plain.clone(spread=self.strategy.spread)
        step = functools.partial(
            train_step,
            model=self.model,
            optimizer=self.optimizer,
            schedule=learning_rate(optim, STEPS),
            accumulation=share(BATCH, self.strategy.shards, parallel).accumulation,
            loss_chunk=parallel.loss_chunk,
        )
        self.step = self.strategy.step(step)
        self.state = None

    def batch(self, step: int) -> Batch:
        text = tokens(step)[self.strategy.rows(BATCH)]
        return self.strategy.place(Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:]))

    def run(self, start: int = 0, stop: int = STEPS) -> list[float]:
        if self.state is None:
            self.state = self.strategy.init(jax.random.key(0))
        losses = []
        for t in range(start, stop):
            self.state, metrics = self.step(self.state, self.batch(t), jax.random.key(1))
            losses.append(float(metrics["loss"]))  # one step in flight
        return losses

    def validation(self) -> float:
        evaluate = self.strategy.evaluate(functools.partial(eval_step, model=self.model))
        mask = np.ones((BATCH, T), bool)
        mask[3:] = False  # some devices have nothing to count
        text = tokens(99)
        batch = Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:], mask_BT=mask)
        nats, count = evaluate(self.state.params, self.strategy.place(batch))
        assert float(count) == 3 * T
        return float(nats)

    def compiled(self) -> str:
        key = jax.eval_shape(lambda: jax.random.key(1))
        return self.step.lower(self.strategy.state, self.strategy.batch(BATCH, T), key).compile().as_text()


def curves() -> dict:
    found = {}
    for name in STRATEGIES:
        for optimizer in ("adamw", "muon"):
            trainer = Trainer(name, optimizer)
            found[f"{name}, {optimizer}"] = {"losses": trainer.run(), "validation": trainer.validation()}
    return found


def programs() -> dict:
    return {name: Trainer(name, "adamw").compiled() for name in ("single", "pmap", "data", "fsdp", "tensor")}


def whole_arrays() -> dict:
    """Of each strategy: the parameters and moments that a device holds whole, by path."""
    found = {}
    for name in ("fsdp", "tensor", "all"):
        state = Trainer(name, "muon").strategy.state
        found[name] = [
            jax.tree_util.keystr(path)
            for path, x in jax.tree.leaves_with_path((state.params, state.opt_state))
            if x.ndim and x.sharding.shard_shape(x.shape) == x.shape
        ]
    return found


def crossings(directory: str) -> dict:
    """Half a run, saved and gone on with elsewhere: losses of the second halves."""
    found = {}
    routes = [("pmap", 8, "single", 1), ("fsdp", 8, "pmap", 4), ("all", 8, "data", 2), ("single", 1, "all", 8)]
    routes += [("pmap", 2, "fsdp", 8), ("data", 4, "pmap", 8)]
    for number, (name, devices, then, devices_then) in enumerate(routes):
        first = Trainer(name, "adamw", devices)
        first.run(0, STEPS // 2)
        checkpoints = Checkpoints(Path(directory) / str(number))
        checkpoints.save(first.strategy.to_checkpoint(first.state), STEPS // 2, None)
        checkpoints.wait()
        second = Trainer(then, "adamw", devices_then)
        second.state = second.strategy.from_checkpoint(checkpoints.restore(STEPS // 2, second.strategy.state))
        checkpoints.close()
        found[f"{name} on {devices} -> {then} on {devices_then}"] = second.run(STEPS // 2)
    return found


def places() -> dict:
    """What of it is about memory and keys: see the tests that read it."""
    bytes_made = {}
    for name in ("single", "fsdp"):
        strategy = Trainer(name, "adamw", model=dataclasses.replace(CONFIG, n_embd=64)).strategy
        analysis = strategy.init.lower(jax.random.key(0)).compile().memory_analysis()
        bytes_made[name] = [analysis.output_size_in_bytes, analysis.temp_size_in_bytes]

    dropping = dataclasses.replace(CONFIG, dropout=0.5)
    row = np.arange(T + 1, dtype=np.int32)[None] % 16
    losses = {}
    for name, devices, rows in (("pmap", 8, 16), ("pmap", 1, 2), ("all", 8, 16)):
        trainer = Trainer(name, "adamw", devices, dropping)
        text = np.repeat(row, rows, axis=0)
        batch = trainer.strategy.place(Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:]))
        state = trainer.strategy.init(jax.random.key(0))
        losses[f"{name} on {devices}"] = float(trainer.step(state, batch, jax.random.key(1))[1]["loss"])
    return {"whole": whole_arrays(), "bytes": bytes_made, "dropout": losses}


if __name__ == "__main__":
    assert jax.device_count() == 8
    what, *arguments = sys.argv[1:]
    work = {"curves": curves, "programs": programs, "places": places, "crossings": crossings}[what]
    print(json.dumps(work(*arguments)))
