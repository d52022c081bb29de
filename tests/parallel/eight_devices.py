"""Run in a process with JAX_NUM_CPU_DEVICES=8: prints, as JSON, what each strategy did. See test_strategies.py."""

import dataclasses
import functools
import json
import math
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgpt.batch import Batch
from jaxgpt.config import (
    DataConfig,
    Experiment,
    GPTConfig,
    LoraConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from jaxgpt.hf.families import GPT2, GPT_NEOX, LLAMA
from jaxgpt.hf.params import read_params, shapes_of, to_tensors
from jaxgpt.hf.safetensors_files import list_tensors, write
from jaxgpt.layers.kernels.plain import plain_attention
from jaxgpt.loss import make_loss
from jaxgpt.parallel.device import bytes_per_device
from jaxgpt.parallel.multihost import ReplicasDiffer, check_replicas
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.runs.checkpoint import Checkpoints

STEPS, BATCH, T = 20, 16, 16
SMOOTHING = 0.1
DOCUMENTS = np.array([[1] * (2 + row // 2) + [2] * (T - 2 - row // 2) for row in range(BATCH)], np.int32)
# Every axis divides over 8; dropout would draw other numbers on other devices.
CONFIG = GPTConfig(
    vocab_size=16, block_size=T, n_layer=2, n_head=4, n_embd=16, position="rope", qk_norm=True, scan_layers=True
)
STRATEGIES = {
    "single": ParallelConfig(strategy="single"),
    "accumulation": ParallelConfig(strategy="single", micro_batch_size=4),
    "pmap": ParallelConfig(strategy="pmap"),
    "data": ParallelConfig(strategy="mesh"),
    "data, in pieces": ParallelConfig(strategy="mesh", micro_batch_size=1),
    "fsdp": ParallelConfig(strategy="mesh", data=1, fsdp=-1),
    "tensor": ParallelConfig(strategy="mesh", tensor=2),
    "all": ParallelConfig(strategy="mesh", data=2, fsdp=2, tensor=2),
    "two slices": ParallelConfig(strategy="mesh", data=2, fsdp=4, slices=2),
    "one slice": ParallelConfig(strategy="mesh", data=2, fsdp=4),
    "all, in pieces": ParallelConfig(strategy="mesh", data=2, fsdp=2, tensor=2, micro_batch_size=2, loss_chunk=4),
}

# Muon's own step is on whole matrices and on cut ones; what else differs between strategies, AdamW shows.
CURVES = [(name, "adamw") for name in STRATEGIES if "slice" not in name] + [
    (name, "muon") for name in ("single", "all, in pieces")
]

NO_LORA = LoraConfig()


def tokens(step: int) -> np.ndarray:
    """Every row counts on from somewhere in strides of its own: something to learn, quickly."""
    start, stride = np.random.default_rng(step).integers(0, 16, (2, BATCH, 1))
    return ((start + (stride % 3) * np.arange(T + 1)) % 16).astype(np.int32)


class Run:
    def __init__(
        self,
        name: str,
        optimizer: str,
        devices: int = 8,
        model: GPTConfig = CONFIG,
        lora: LoraConfig = NO_LORA,
        resumed: bool = False,
    ):
        experiment = Experiment(
            name="eight",
            model=model,
            data=DataConfig(corpus="spanish-numbers.tsv" if model.n_encoder_layer else "python-docs"),
            optim=OptimConfig(name=optimizer, warmup_steps=2, learning_rate=1e-2, label_smoothing=SMOOTHING),
            train=TrainConfig(steps=STEPS, batch_size=BATCH, init_from=lora.rank and "random weights, here"),
            lora=lora,
            parallel=STRATEGIES[name],
        )
        trainer = make_trainer(experiment, jax.devices()[:devices], recorded=experiment if resumed else None)
        self.trainer, self.strategy, self.model = trainer, trainer.strategy, trainer.model
        self.init_state, self.step = trainer.init_state, trainer.train_step
        self.abstract_state, self.checksums = trainer.abstract_state, trainer.checksums
        self.state = None

    def batch(self, step: int) -> Batch:
        rows = self.strategy.local_rows(BATCH)
        text, counted = tokens(step)[rows], np.arange(T) <= rows[:, None]  # other numbers of targets on each device
        return self.strategy.shard_batch(Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:], mask_BT=counted))

    def run(self, start: int = 0, stop: int = STEPS) -> list[float]:
        if self.state is None:
            self.state = self.init_state(jax.random.key(0))
        losses = []
        for t in range(start, stop):
            self.state, metrics = self.step(self.state, self.batch(t), jax.random.key(1))
            losses.append(float(metrics["loss"]))  # one step in flight
        return losses

    def validation(self) -> float:
        mask = np.ones((BATCH, T), bool)
        mask[3:] = False  # some devices have nothing to count
        text = tokens(99)
        batch = Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:], mask_BT=mask, segments_BT=DOCUMENTS)
        nats, count = self.trainer.eval_step(self.trainer.merged_params(self.state), self.strategy.shard_batch(batch))
        assert float(count) == 3 * T
        return float(nats)

    def compiled(self) -> str:
        key, batch = jax.eval_shape(lambda: jax.random.key(1)), self.trainer.abstract_batch
        counted = jax.ShapeDtypeStruct(batch.inputs_BT.shape, bool, sharding=batch.inputs_BT.sharding)
        return self.step.lower(self.abstract_state, batch._replace(mask_BT=counted), key).compile().as_text()


def curves(*wanted: str) -> dict:
    """Of each strategy and optimiser in CURVES, or of those wanted: losses, validation, bytes held."""
    found = {}
    for name, optimizer in CURVES:
        if wanted and f"{name}, {optimizer}" not in wanted:
            continue
        run = Run(name, optimizer)
        losses, first = run.run(), jax.devices()[0]
        shards = [shard for x in jax.tree.leaves(run.state) for shard in x.addressable_shards if shard.device == first]
        held = [bytes_per_device(run.abstract_state), sum(shard.data.nbytes for shard in shards)]
        found[f"{name}, {optimizer}"] = {"losses": losses, "validation": run.validation(), "held": held}
    run = Run("single", "adamw")
    loss = jax.jit(functools.partial(make_loss(run.model, label_smoothing=SMOOTHING), key=None))
    nats, count, _ = loss(run.init_state(jax.random.key(0)).params, run.batch(0))
    found["single, adamw"]["smoothed"] = float(nats / count)
    return found


def programs() -> dict:
    return {
        name: Run(name, "adamw").compiled() for name in ("single", "pmap", "data", "fsdp", "tensor", "data, in pieces")
    }


def whole_arrays() -> dict:
    """Of each strategy: the parameters and moments that a device holds whole, by path."""
    found = {}
    for name in ("fsdp", "tensor", "all"):
        state = Run(name, "muon").abstract_state
        found[name] = [
            jax.tree_util.keystr(path)
            for path, x in jax.tree.leaves_with_path((state.params, state.opt_state.inner_state))
            if x.ndim and x.sharding.shard_shape(x.shape) == x.shape
        ]
    return found


def crossings(directory: str) -> dict:
    """Half a run, saved and gone on with elsewhere: losses of the second halves."""
    found = {}
    routes = [("pmap", 8, "single", 1), ("fsdp", 8, "pmap", 4), ("all", 8, "data", 2), ("single", 1, "all", 8)]
    routes += [("pmap", 2, "fsdp", 8), ("data", 4, "pmap", 8)]
    for number, (name, devices, then, devices_then) in enumerate(routes):
        first = Run(name, "adamw", devices)
        first.run(0, STEPS // 2)
        checkpoints = Checkpoints(Path(directory) / str(number))
        checkpoints.save(first.strategy.to_checkpoint(first.state), STEPS // 2, None)
        checkpoints.wait()
        second = Run(then, "adamw", devices_then)
        second.state = second.strategy.from_checkpoint(checkpoints.restore(STEPS // 2, second.abstract_state))
        checkpoints.close()
        found[f"{name} on {devices} -> {then} on {devices_then}"] = second.run(STEPS // 2)
    return found


def sliced(directory: str) -> dict:
    """Return losses on two slices, on one slice, and of a run that is saved on two and resumed on half of the devices."""
    run, whole = Run("two slices", "adamw"), Run("one slice", "adamw")
    checkpoints = Checkpoints(Path(directory))
    losses = run.run(0, 2)
    checkpoints.save(run.strategy.to_checkpoint(run.state), 2, None)
    checkpoints.wait()
    losses += run.run(2, 4)
    half = Run("two slices", "adamw", 4, resumed=True)
    half.state = half.strategy.from_checkpoint(checkpoints.restore(2, half.abstract_state))
    checkpoints.close()
    return {
        "two": losses,
        "one": whole.run(0, 4),
        "resumed": half.run(2, 4),
        "fallback": half.trainer.fallback,
    }


def made() -> dict:
    """Bytes of the result and the temporaries of making a state."""
    found = {}
    for name in ("single", "fsdp"):
        run = Run(name, "adamw", model=dataclasses.replace(CONFIG, n_embd=64))
        analysis = run.init_state.lower(jax.random.key(0)).compile().memory_analysis()
        found[name] = [analysis.output_size_in_bytes, analysis.temp_size_in_bytes]
    return found


def dropped() -> dict:
    """Losses of one step with dropout, of rows that are all alike."""
    dropping = dataclasses.replace(CONFIG, dropout=0.5)
    row = np.arange(T + 1, dtype=np.int32)[None] % 16
    losses = {}
    for name, devices, rows in (("pmap", 8, 16), ("pmap", 1, 2), ("all", 8, 16)):
        run = Run(name, "adamw", devices, dropping)
        text = np.repeat(row, rows, axis=0)
        batch = run.strategy.shard_batch(Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:]))
        state = run.init_state(jax.random.key(0))
        losses[f"{name} on {devices}"] = float(run.step(state, batch, jax.random.key(1))[1]["loss"])
    return losses


def several(*wanted: str) -> dict:
    """What each of the functions named finds."""
    return {name: WORK[name]() for name in wanted}


def kept() -> dict:
    """How many of the attention weights two devices of a mesh drop alike, which read other rows or have other heads."""
    sharded = Run("all", "adamw").strategy.shard_attention(plain_attention)
    zeros_BTNH, eye_BTNT = np.zeros((BATCH, T, 4, 4), np.float32), np.tile(np.eye(T)[None, :, None], (BATCH, 1, 4, 1))
    # Every score alike; the result is the weights.
    attention = jax.jit(functools.partial(sharded, dropout=0.5))
    weights_BTNT = attention(zeros_BTNH, zeros_BTNH, eye_BTNT, key=jax.random.key(0))
    kept_BNR = np.moveaxis(np.asarray(weights_BTNT), 2, 1)[..., *np.tril_indices(T)] > 0
    rows, heads = BATCH // 4, 2  # on each device
    return {
        "rows": float(np.mean(kept_BNR[:rows] == kept_BNR[rows : 2 * rows])),
        "heads": float(np.mean(kept_BNR[:, :heads] == kept_BNR[:, heads:])),
    }


def with_encoder() -> dict:
    """Of each strategy: losses of a model with an encoder, whose rows hold two pairs."""
    model = dataclasses.replace(CONFIG, n_encoder_layer=1, n_layer=1, scan_layers=False, norm_position="post")
    found = {}
    for name in ("single", "pmap", "all, in pieces"):
        run = Run(name, "muon", model=model)
        state, found[name] = run.init_state(jax.random.key(0)), []
        for t in range(4):
            text = tokens(t)
            pairs = Batch(
                inputs_BT=text[:, :-1],
                targets_BT=text[:, 1:],
                mask_BT=DOCUMENTS > 0,
                segments_BT=DOCUMENTS,
                source_BS=text[:, 1:],
                source_segments_BS=DOCUMENTS,
            )
            state, metrics = run.step(state, run.strategy.shard_batch(pairs), jax.random.key(1))
            found[name].append(float(metrics["loss"]))
    return found


def imported() -> dict:
    """Of each family and mesh, when weights are read straight into their parts: see the test."""
    gpt2 = dataclasses.replace(CONFIG, position="learned", qk_norm=False, scan_layers=False, n_layer=1)
    rotated = dataclasses.replace(gpt2, position="rope", rope_fraction=0.5, parallel_residual=True)
    neox = GPT_NEOX.read(GPT_NEOX.write(rotated))
    llama = dataclasses.replace(gpt2, n_kv_head=2, bias=False, norm="rmsnorm", activation="swiglu", position="rope")
    found = {}
    for family, config in ((GPT2, gpt2), (GPT_NEOX, neox), (LLAMA, llama)):
        with tempfile.TemporaryDirectory() as directory:
            rng = np.random.default_rng(0)
            flat = {path: rng.standard_normal(shape, np.float32) for path, shape in shapes_of(config).items()}
            params = unflatten_dict(flat, sep="/")
            write(Path(directory), to_tensors(params, family, config))
            for name in ("fsdp", "tensor", "all"):
                wanted = Run(name, "adamw", model=config).abstract_state.params
                places = {path: x.sharding for path, x in flatten_dict(wanted, sep="/").items()}
                read = read_params(list_tensors(Path(directory)), family, config, places=places)
                held = [0] * 8
                for x in jax.tree.leaves(read):
                    for shard in x.addressable_shards:
                        held[shard.device.id] += shard.data.nbytes
                found[f"{family.model_type}, {name}"] = {
                    "equal": jax.tree.all(
                        jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), read, params)
                    ),
                    "placed": jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, read, wanted)),
                    "held": held,
                    "parts": sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(wanted)),
                    "whole": sum(x.nbytes for x in jax.tree.leaves(params)),
                }
    return found


def guarded() -> dict:
    """Of each strategy: three steps, the second with one label outside the vocabulary, so that its loss is NaN."""
    found = {}
    for name in ("single", "pmap", "all, in pieces"):
        run = Run(name, "adamw")
        state, seen, told = run.init_state(jax.random.key(0)), [], []
        for t in range(3):
            text = tokens(t)
            if t == 1:
                text[-1, -1] = 16  # on the last device alone
            batch = run.strategy.shard_batch(
                Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:], segments_BT=DOCUMENTS)
            )
            state, metrics = run.step(state, batch, jax.random.key(1))
            seen.append([np.asarray(x).tobytes() for x in jax.tree.leaves((state.params, state.opt_state.inner_state))])
            told.append([int(metrics["skipped"]), float(metrics["learning_rate"]), float(metrics["loss"])])
        skipped = [[shard.data.item() for shard in state.opt_state.skipped.addressable_shards]]
        found[name] = {"same": [seen[0] == seen[1], seen[1] == seen[2]], "told": told, "skipped": skipped[0]}
    return found


def adapters() -> dict:
    """Of each strategy: losses of adapters, what became of their base, and what of theirs a device holds whole."""
    found = {}
    for name in ("single", "pmap", "all"):
        run = Run(name, "muon", lora=LoraConfig(rank=2, targets=("q", "c_fc", "c_proj")))
        given = jax.device_get(Run(name, "muon").init_state(jax.random.key(0)).params)
        run.state = run.init_state(jax.random.key(0), run.init_state(jax.random.key(0)).frozen_params)
        before = run.validation()
        losses = run.run(0, 6)
        same = jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), given, jax.device_get(run.state.frozen_params))
        whole = [
            jax.tree_util.keystr(path)
            for path, x in jax.tree.leaves_with_path((run.abstract_state.params, run.abstract_state.frozen_params))
            if x.sharding.shard_shape(x.shape) == x.shape
        ]
        found[name] = {
            "losses": losses,
            "validations": [before, run.validation()],
            "same": all(jax.tree.leaves(same)),
            "whole": whole,
        }
    return found


def drift() -> dict:
    """What is said of a state in which one bit of one copy was flipped, at once and after more steps."""
    found = {}
    for name, devices, at in (("pmap", 8, 5), ("pmap", 2, 1), ("data", 8, 5), ("all", 8, 5)):
        run = Run(name, "adamw", devices)
        run.state = run.init_state(jax.random.key(0))
        assert compare(run) == "all are equal"
        kernel = run.state.params["h"]["block"]["mlp"]["c_fc"]["kernel"]
        copies = [np.array(shard.data) for shard in sorted(kernel.addressable_shards, key=lambda s: s.device.id)]
        copies[at].view(np.uint32).flat[77] ^= 1  # the last bit of a mantissa
        shards = [jax.device_put(x, jax.devices()[i]) for i, x in enumerate(copies)]
        flipped = jax.make_array_from_single_device_arrays(kernel.shape, kernel.sharding, shards)
        run.state.params["h"]["block"]["mlp"]["c_fc"]["kernel"] = flipped
        found[f"{name} on {devices}"] = compare(run)
        if name == "pmap" and devices == 8:
            run.run(0, 2)
            found["pmap on 8, later"] = compare(run)
    assert Run("fsdp", "adamw").checksums is None and Run("single", "adamw").checksums is None
    return found


def compare(run: Run) -> str:
    try:
        check_replicas(run.checksums(run.state), run.strategy.devices, 100, 200)
    except ReplicasDiffer as e:
        return str(e)
    return "all are equal"


WORK = {
    work.__name__: work
    for work in (
        *(curves, crossings, sliced, programs, several),
        *(kept, whole_arrays, made, dropped, guarded, drift, adapters, with_encoder, imported),
    )
}

if __name__ == "__main__":
    assert jax.device_count() == 8
    what, *arguments = sys.argv[1:]
    print(json.dumps(WORK[what](*arguments)))
