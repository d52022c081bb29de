"""Checks on several CPU devices, each run by test_strategies.py in a process: single = accumulation = pmap = mesh."""

import dataclasses
import functools
import importlib
import math
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgpt.batch import Batch
from jaxgpt.config import DataConfig, Experiment, GPTConfig, LoraConfig, OptimConfig, ParallelConfig, TrainConfig
from jaxgpt.fitting import fit
from jaxgpt.hf.families import GPT2, GPT_NEOX, LLAMA
from jaxgpt.hf.weights import list_tensors, read_params, shapes_of, to_tensors, write
from jaxgpt.layers.kernels.plain import plain_attention
from jaxgpt.loss import make_loss
from jaxgpt.parallel.device import bytes_per_device, count_parameters
from jaxgpt.parallel.multihost import ReplicasDiffer, check_replicas
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.run import load
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.metrics import MetricsFile, read_metrics
from jaxgpt.tools.plan.hlo import read_program
from jaxgpt.train import NOT_FINITE, TAKEN
from tests.conftest import REPOSITORY
from tests.helpers import tiny_experiment

sys.path.insert(0, str(REPOSITORY / "experiments" / "transformer_2017"))
encoder_decoder, pairs = importlib.import_module("encoder_decoder"), importlib.import_module("pairs")

# Sums over a batch in another order: a few units in the last place, grown over 20 steps of Adam. Seen: 3.8e-6.
CURVES_EQUAL = dict(rtol=1e-5, atol=1e-5)
# After six steps of Muon on adapters, whose small singular values it makes large. Seen: 1.02e-5.
ADAPTERS_EQUAL = dict(rtol=3e-5)

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


# The strategies that have most in common with the others; the rest by `-m slow`.
QUICK = [("pmap", "adamw"), ("all, in pieces", "adamw")]
# Muon's own step is on whole matrices and on cut ones; what else differs between strategies, AdamW shows.
REST = [(name, "adamw") for name in STRATEGIES if "slice" not in name and (name, "adamw") not in QUICK]
REST += [("all, in pieces", "muon")]
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
            data=DataConfig() if type(model) is GPTConfig else pairs.PairsConfig(),
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

    def restart(self, checkpoints: Checkpoints, step: int) -> None:
        self.state = self.strategy.from_checkpoint(checkpoints.restore(step, self.abstract_state))

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        checkpoints.save(self.strategy.to_checkpoint(self.state), step, None)
        checkpoints.wait()

    def compiled(self) -> str:
        key, batch = jax.eval_shape(lambda: jax.random.key(1)), self.trainer.abstract_batch
        counted = jax.ShapeDtypeStruct(batch.inputs_BT.shape, bool, sharding=batch.inputs_BT.sharding)
        return self.step.lower(self.abstract_state, batch._replace(mask_BT=counted), key).compile().as_text()


def assert_equal(found, expected, what: str = "", **tolerance) -> None:
    np.testing.assert_allclose(found, expected, err_msg=what, **(tolerance or CURVES_EQUAL))


def check_curves(strategies: list[tuple[str, str]]) -> None:
    """Twenty steps and a validation are those of one device; each device holds what is counted."""
    single = {optimizer: Run("single", optimizer) for optimizer in {optimizer for _, optimizer in strategies}}
    expected = {optimizer: (run.run(), run.validation()) for optimizer, run in single.items()}
    for name, optimizer in strategies:
        run, (losses, validation) = Run(name, optimizer), expected[optimizer]
        assert losses[-1] < losses[0] - 0.3  # it learns, so there is something to be equal
        assert_equal(run.run(), losses, name)
        assert_equal(run.validation(), validation, name)
        first = jax.devices()[0]
        shards = [s for x in jax.tree.leaves(run.state) for s in x.addressable_shards if s.device == first]
        assert bytes_per_device(run.abstract_state) == sum(s.data.nbytes for s in shards), name
        whole = bytes_per_device(single[optimizer].abstract_state)
        parts = {"pmap": (1, 1), "all, in pieces": (3, 4)}.get(name, (1, 8))
        assert whole / parts[1] <= bytes_per_device(run.abstract_state) <= whole / parts[0], name
    loss = jax.jit(functools.partial(make_loss(single["adamw"].model, label_smoothing=SMOOTHING), key=None))
    nats, count, _ = loss(single["adamw"].init_state(jax.random.key(0)).params, single["adamw"].batch(0))
    assert_equal(expected["adamw"][0][0], nats / count, "the first loss, smoothed", rtol=1e-6)


def check_quick_curves() -> None:
    check_curves(QUICK)


def check_other_curves() -> None:
    check_curves(REST)


def check_collectives() -> None:
    """What the compiled steps exchange."""
    found = {}
    for name in ("single", "pmap", "data", "data, in pieces", "fsdp", "tensor"):
        run = Run(name, "adamw")
        found[name] = read_program(run.compiled()).collectives
    parameters = 4 * count_parameters(run.abstract_state.params)

    def total(name: str, kind: str) -> float:
        return sum(c.bytes * c.times for c in found[name] if c.kind == kind)

    assert found["single"] == ()
    for name in ("pmap", "data", "data, in pieces"):  # the gradients once, and a little more for a few vectors
        assert {c.kind for c in found[name]} == {"all-reduce"}
        assert parameters <= total(name, "all-reduce") <= 1.05 * parameters
    # Each matrix is gathered for the forward and the backward pass; moments stay where they are.
    assert 0.9 * parameters <= total("fsdp", "all-gather") <= 2.2 * parameters and not total("fsdp", "all-to-all")
    # Activations are summed, and no parameter is gathered.
    assert all(c.bytes < 4 * CONFIG.n_embd * 4 * CONFIG.n_embd for c in found["tensor"] if c.kind == "all-gather")


def paths_of_whole(tree) -> list[str]:
    return [
        jax.tree_util.keystr(path)
        for path, x in jax.tree.leaves_with_path(tree)
        if x.ndim and x.sharding.shard_shape(x.shape) == x.shape
    ]


def check_mesh() -> None:
    """Nothing stays whole that is to be split, and devices with other rows or heads drop other attention weights."""
    for name in ("fsdp", "tensor", "all"):
        state = Run(name, "muon").abstract_state
        whole = paths_of_whole((state.params, state.opt_state.inner_state))
        if name == "tensor":  # splits heads, hidden units and vocabulary, not the vectors of the residual stream
            assert [x for x in whole if "kernel" in x or "wte" in x] == []
        else:  # QK-norm's scale has the head's size, which every head needs. Muon keeps the coefficients of a polynomial.
            assert [x for x in whole if "_norm" not in x and "ns_coeffs" not in x] == [], name

    sharded = Run("all", "adamw").strategy.shard_attention(plain_attention)
    zeros_BTNH, eye_BTNT = np.zeros((BATCH, T, 4, 4), np.float32), np.tile(np.eye(T)[None, :, None], (BATCH, 1, 4, 1))
    # Every score alike; the result is the weights.
    attention = jax.jit(functools.partial(sharded, dropout=0.5))
    weights_BTNT = attention(zeros_BTNH, zeros_BTNH, eye_BTNT, key=jax.random.key(0))
    kept_BNR = np.moveaxis(np.asarray(weights_BTNT), 2, 1)[..., *np.tril_indices(T)] > 0
    rows, heads = BATCH // 4, 2  # on each device
    # Two draws of a half agree by half.
    assert 0.4 < np.mean(kept_BNR[:rows] == kept_BNR[rows : 2 * rows]) < 0.6
    assert 0.4 < np.mean(kept_BNR[:, :heads] == kept_BNR[:, heads:]) < 0.6


def check_crossings() -> None:
    """Saved half-way on 8, 4, 2 or 1 devices, gone on with by another strategy on as many others: one curve."""
    rest = Run("single", "adamw").run()[STEPS // 2 :]
    routes = [("pmap", 8, "single", 1), ("fsdp", 8, "pmap", 4), ("all", 8, "data", 2), ("single", 1, "all", 8)]
    for name, devices, then, devices_then in (*routes, ("pmap", 2, "fsdp", 8), ("data", 4, "pmap", 8)):
        first, second = Run(name, "adamw", devices), Run(then, "adamw", devices_then)
        first.run(0, STEPS // 2)
        with tempfile.TemporaryDirectory() as directory:
            checkpoints = Checkpoints(Path(directory))
            first.save(checkpoints, STEPS // 2)
            second.restart(checkpoints, STEPS // 2)
            checkpoints.close()
        assert_equal(second.run(STEPS // 2), rest, f"{name} on {devices} -> {then} on {devices_then}")


def check_slices() -> None:
    """Two slices of 4 devices take the steps of one of 8, bit for bit; saved, they go on as one slice of 4."""
    run, whole, half = (
        Run("two slices", "adamw"),
        Run("one slice", "adamw"),
        Run("two slices", "adamw", 4, resumed=True),
    )
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(Path(directory))
        losses, expected = run.run(0, 2), whole.run(0, 4)
        run.save(checkpoints, 2)
        half.restart(checkpoints, 2)
        checkpoints.close()
    assert losses + run.run(2, 4) == expected
    assert_equal(half.run(2, 4), expected[2:])
    assert half.trainer.fallback.startswith(
        "mesh of data=1 x fsdp=4 x tensor=1 instead of the recorded strategy, which does not fit here: "
    )


def check_init() -> None:
    """What a device holds when a state is made, and on the way there, is an eighth of the model."""
    found = []
    for name in ("single", "fsdp"):
        run = Run(name, "adamw", model=dataclasses.replace(CONFIG, n_embd=64))
        found.append(run.init_state.lower(jax.random.key(0)).compile().memory_analysis())
    whole, part = found
    assert part.output_size_in_bytes < whole.output_size_in_bytes / 8 * 1.1
    assert part.temp_size_in_bytes < whole.temp_size_in_bytes / 8 * 1.1


def check_dropout() -> None:
    """All rows are the same text: with one key for all devices, 8 of them would lose what one does."""
    row, losses = np.arange(T + 1, dtype=np.int32)[None] % 16, []
    for name, devices, rows in (("pmap", 1, 2), ("pmap", 8, 16), ("all", 8, 16)):
        run = Run(name, "adamw", devices, dataclasses.replace(CONFIG, dropout=0.5))
        text = np.repeat(row, rows, axis=0)
        batch = run.strategy.shard_batch(Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:]))
        losses.append(float(run.step(run.init_state(jax.random.key(0)), batch, jax.random.key(1))[1]["loss"]))
    one, *others = losses
    assert all(abs(loss - one) > 1e-3 for loss in others), losses


def check_encoder() -> None:
    """A model with an encoder, whose rows hold two pairs, learns the same everywhere."""
    fields = dataclasses.asdict(CONFIG) | dict(n_layer=1, scan_layers=False, norm_position="post")
    model = encoder_decoder.EncoderDecoderConfig(**fields, n_encoder_layer=1)
    expected = None
    for name in ("single", "pmap", "all, in pieces"):
        run = Run(name, "muon", model=model)
        state, losses = run.init_state(jax.random.key(0)), []
        for t in range(4):
            text = tokens(t)
            source = {"source_BS": text[:, 1:], "source_segments_BS": DOCUMENTS}
            batch = Batch(text[:, :-1], text[:, 1:], DOCUMENTS > 0, DOCUMENTS, source)
            state, metrics = run.step(state, run.strategy.shard_batch(batch), jax.random.key(1))
            losses.append(float(metrics["loss"]))
        expected = expected or losses
        assert_equal(losses, expected, name)
    assert expected[-1] < expected[0] - 0.02


def check_imports() -> None:
    """Weights are read straight into their parts, bit for bit: each device has that of the training state, no more."""
    gpt2 = dataclasses.replace(CONFIG, position="learned", qk_norm=False, scan_layers=False, n_layer=1)
    rotated = dataclasses.replace(gpt2, position="rope", rope_fraction=0.5, parallel_residual=True)
    neox = GPT_NEOX.read(GPT_NEOX.write(rotated))
    llama = dataclasses.replace(gpt2, n_kv_head=2, bias=False, norm="rmsnorm", activation="swiglu", position="rope")
    for family, config in ((GPT2, gpt2), (GPT_NEOX, neox), (LLAMA, llama)):
        with tempfile.TemporaryDirectory() as directory:
            rng = np.random.default_rng(0)
            flat = {path: rng.standard_normal(shape, np.float32) for path, shape in shapes_of(config).items()}
            params = unflatten_dict(flat, sep="/")
            write(Path(directory), to_tensors(params, family, config))
            for name, parts in (("fsdp", 8), ("tensor", 2), ("all", 4)):
                wanted = Run(name, "adamw", model=config).abstract_state.params
                places = {path: x.sharding for path, x in flatten_dict(wanted, sep="/").items()}
                read = read_params(list_tensors(Path(directory)), family, config, places=places)
                jax.tree.map(np.testing.assert_array_equal, read, params)
                assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, read, wanted))
                held = [0] * 8
                for x in jax.tree.leaves(read):
                    for shard in x.addressable_shards:
                        held[shard.device.id] += shard.data.nbytes
                part = sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(wanted))
                whole = sum(x.nbytes for x in jax.tree.leaves(params))
                assert held == [part] * 8 and whole / parts <= part < whole * 0.6, (family.model_type, name)


def check_bad_step() -> None:
    """A label outside the vocabulary in one row of one device: no device moves, and all of them go on."""
    expected = None
    for name in ("single", "pmap", "all, in pieces"):
        run = Run(name, "adamw")
        state, seen, told = run.init_state(jax.random.key(0)), [], []
        for t in range(3):
            text = tokens(t)
            if t == 1:
                text[-1, -1] = 16  # on the last device alone
            batch = Batch(inputs_BT=text[:, :-1], targets_BT=text[:, 1:], segments_BT=DOCUMENTS)
            state, metrics = run.step(state, run.strategy.shard_batch(batch), jax.random.key(1))
            seen.append([np.asarray(x).tobytes() for x in jax.tree.leaves((state.params, state.opt_state.inner_state))])
            told.append([float(metrics[key]) for key in ("skipped", "learning_rate", "loss")])
        assert seen[0] == seen[1] != seen[2], name
        skipped, rates, losses = zip(*told, strict=True)
        expected = expected or losses
        assert_equal(losses, expected, name)
        assert skipped == (TAKEN, NOT_FINITE, TAKEN)
        assert rates[0] < rates[1] == rates[2]  # warm-up; the rate that was not used is used next
        assert {shard.data.item() for shard in state.opt_state.skipped.addressable_shards} == {1}


def check_adapters() -> None:
    """They alone move, and on a mesh they lie as the matrices do that they are of."""
    expected = None
    for name in ("single", "pmap", "all"):
        run = Run(name, "muon", lora=LoraConfig(rank=2, targets=("q", "c_fc", "c_proj")))
        run.state = run.init_state(jax.random.key(0))
        given = jax.device_get(run.state.frozen_params)
        before = run.validation()
        losses = run.run(0, 6)
        jax.tree.map(np.testing.assert_array_equal, given, jax.device_get(run.state.frozen_params))
        after = run.validation()
        expected = expected or (losses, [before, after])
        assert_equal(losses, expected[0], name)
        assert_equal([before, after], expected[1], name, **ADAPTERS_EQUAL)
        assert after < before
        if name == "all":
            whole = paths_of_whole((run.abstract_state.params, run.abstract_state.frozen_params))
            assert [x for x in whole if "_norm" not in x] == []


def check_drift() -> None:
    """One flipped bit of one copy of parameters is found, by pmap and by `data`; it does not heal by training."""

    def compare() -> str:
        try:
            check_replicas(run.checksums(run.state), run.strategy.devices, 100, 200)
        except ReplicasDiffer as e:
            return str(e)
        return "all are equal"

    said = {
        ("pmap", 8, 5): ": cpu:5 of process 0 differs from the others",
        ("data", 8, 5): ": cpu:5 of process 0 differs from the others",
        ("pmap", 2, 1): "at least one of cpu:0 of process 0, cpu:1 of process 0 is wrong",  # which of two, nobody knows
        ("all", 8, 5): "at least one of cpu:1 of process 0, cpu:5 of process 0 is wrong",  # two copies of four parts
    }
    for (name, devices, at), words in said.items():
        run = Run(name, "adamw", devices)
        run.state = run.init_state(jax.random.key(0))
        assert compare() == "all are equal"
        mlp = run.state.params["h"]["block"]["mlp"]["c_fc"]
        kernel = mlp["kernel"]
        copies = [np.array(shard.data) for shard in sorted(kernel.addressable_shards, key=lambda s: s.device.id)]
        copies[at].view(np.uint32).flat[77] ^= 1  # the last bit of a mantissa
        shards = [jax.device_put(x, jax.devices()[i]) for i, x in enumerate(copies)]
        mlp["kernel"] = jax.make_array_from_single_device_arrays(kernel.shape, kernel.sharding, shards)
        found = compare()
        assert words in found and "were equal at step 100" in found and "from then to step 200 cannot be" in found
        if name == "pmap":
            run.run(0, 2)
            assert words in compare()
    assert Run("fsdp", "adamw").checksums is None and Run("single", "adamw").checksums is None


class Left(BaseException):
    """Leaves the loop as a kill would: with no farewell save."""


def check_resumed(text: str) -> None:
    """A run left after step 3 of 6, its checkpoint being of step 2, goes on bit for bit; with dropout, on 4 devices."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "val_loss")
    write_line = MetricsFile.write

    def leave(self: MetricsFile, **values: object) -> None:
        if values["step"] == 4:
            raise Left
        write_line(self, **values)

    def lines(directory: Path) -> list[tuple]:
        return [tuple(line.get(k) for k in keys) for line in read_metrics(directory / "metrics.jsonl")]

    for parallel in (
        ParallelConfig(strategy="single", micro_batch_size=2),
        ParallelConfig(strategy="pmap", micro_batch_size=1),
        ParallelConfig(strategy="mesh", data=2, fsdp=2, micro_batch_size=1),
    ):
        plain = tiny_experiment(Path(text), batch_size=8)
        model = dataclasses.replace(plain.model, n_layer=1, n_head=2, dropout=0.2, vocab_size=32)
        experiment = dataclasses.replace(plain, model=model, parallel=parallel)
        with tempfile.TemporaryDirectory() as directory:
            whole, again = Path(directory) / "whole", Path(directory) / "again"
            fit(experiment, whole, progress=False)
            MetricsFile.write = leave  # type: ignore[method-assign]
            try:
                fit(experiment, again, progress=False)
                raise AssertionError("it was not left")
            except Left:
                MetricsFile.write = write_line  # type: ignore[method-assign]
            assert lines(again)[-1][0] == 3
            fit(experiment, again, progress=False)
            assert len(lines(whole)) == 8 and lines(whole) == lines(again), parallel
            one, other = (load(d, which="last") for d in (whole, again))
            assert one.step == other.step == 6
            jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    {name: check for name, check in globals().items() if name.startswith("check_")}[what](*arguments)
