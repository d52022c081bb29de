"""Checks on several CPU devices, each run by test_strategies.py in a process: single = accumulation = pmap = mesh."""

import dataclasses
import functools
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgpt.batch import Batch
from jaxgpt.experiment import Experiment, ParallelConfig, TrainConfig
from jaxgpt.hf.families import GPT2, GPT_NEOX
from jaxgpt.hf.weights import list_tensors, read_params, shapes_of, to_tensors, write
from jaxgpt.layers.kernels.plain import Scores, plain_attention
from jaxgpt.lora import LoraConfig
from jaxgpt.loss import make_loss
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.parallel.limits import bytes_per_device, count_parameters
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.tools.plan.collectives import read_collectives
from jaxgpt.training import Training, fit
from tests.helpers import chat_file, tiny_experiment

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
    "all, in pieces": ParallelConfig(strategy="mesh", data=2, fsdp=2, tensor=2, micro_batch_size=2, loss_chunk=4),
}


# Muon's own step is on whole matrices and on cut ones; what else differs between strategies, AdamW shows.
ALL = [*((name, "adamw") for name in STRATEGIES), ("all, in pieces", "muon")]
NO_LORA = LoraConfig()


def tokens(step: int) -> np.ndarray:
    """Every row counts on from somewhere in strides of its own: something to learn, quickly."""
    start, stride = np.random.default_rng(step).integers(0, 16, (2, BATCH, 1))
    return ((start + (stride % 3) * np.arange(T + 1)) % 16).astype(np.int32)


class Run:
    def __init__(self, name: str, optimizer: str, devices: int = 8, model=CONFIG, lora=NO_LORA):
        experiment = Experiment(
            name="eight",
            model=model,
            optim=OptimConfig(name=optimizer, warmup_steps=2, learning_rate=1e-2, label_smoothing=SMOOTHING),
            train=TrainConfig(steps=STEPS, batch_size=BATCH, init_from=lora.rank and "random weights, here"),
            lora=lora,
            parallel=STRATEGIES[name],
        )
        self.trainer = make_trainer(experiment, jax.devices()[:devices])
        self.strategy, self.abstract_state = self.trainer.strategy, self.trainer.abstract_state
        self.state = None

    def init(self):
        self.state = self.trainer.init_state(jax.random.key(0))
        return self.state

    def batch(self, step: int) -> Batch:
        rows = self.strategy.local_rows(BATCH)
        text, counted = tokens(step)[rows], np.arange(T) <= rows[:, None]  # other numbers of targets on each device
        return self.rows(text[:, :-1], text[:, 1:], counted)

    def run(self, start: int = 0, stop: int = STEPS) -> list[float]:
        if self.state is None:
            self.init()
        losses = []
        for t in range(start, stop):
            losses.append(float(self.step(self.batch(t))["loss"]))
        return losses

    def step(self, batch: Batch) -> dict:
        self.state, metrics = self.trainer.train_step(self.state, batch, jax.random.key(1))
        return jax.device_get(metrics)

    def rows(self, *arrays, **more) -> Batch:
        return self.strategy.shard_batch(Batch(*arrays, **more))

    def validation(self) -> float:
        mask, text = np.ones((BATCH, T), bool), tokens(99)
        mask[3:] = False  # some devices have nothing to count
        batch = self.rows(text[:, :-1], text[:, 1:], mask, DOCUMENTS)
        nats, count = self.trainer.eval_step(self.trainer.merged_params(self.state), batch)
        assert float(count) == 3 * T
        return float(nats)

    def hand_over(self, other: "Run", step: int) -> None:
        """By a checkpoint."""
        with tempfile.TemporaryDirectory() as directory:
            checkpoints = Checkpoints(Path(directory))
            checkpoints.save(self.strategy.to_checkpoint(self.state), step, None)
            checkpoints.wait()
            other.state = other.strategy.from_checkpoint(checkpoints.restore(step, other.abstract_state))
            checkpoints.close()

    def collectives(self):
        key, batch = jax.eval_shape(lambda: jax.random.key(1)), self.trainer.abstract_batch
        counted = jax.ShapeDtypeStruct(batch.inputs_BT.shape, bool, sharding=batch.inputs_BT.sharding)
        step = self.trainer.train_step.lower(self.abstract_state, batch._replace(mask_BT=counted), key)
        return read_collectives(step.compile().as_text())


def assert_equal(found, expected, what: str = "", **tolerance) -> None:
    np.testing.assert_allclose(found, expected, err_msg=what, **(tolerance or CURVES_EQUAL))


def compare_curves(strategies: list[tuple[str, str]], model: GPTConfig = CONFIG) -> tuple[Run, float]:
    """Twenty steps and a validation are those of one device; each device holds what is counted."""
    single = {optimizer: Run("single", optimizer, model=model) for _, optimizer in strategies}
    expected = {optimizer: (run.run(), run.validation()) for optimizer, run in single.items()}
    for name, optimizer in strategies:
        run, (losses, validation) = Run(name, optimizer, model=model), expected[optimizer]
        assert losses[-1] < losses[0] - 0.3  # it learns, so there is something to be equal
        assert_equal(run.run(), losses, name)
        assert_equal(run.validation(), validation, name)
        first = jax.devices()[0]
        shards = [s for x in jax.tree.leaves(run.state) for s in x.addressable_shards if s.device == first]
        held, whole = (bytes_per_device(r.abstract_state) for r in (run, single[optimizer]))
        assert held == sum(s.data.nbytes for s in shards), name
        most, least = {"pmap": (1, 1), "all, in pieces": (3, 4)}.get(name, (1, 8))
        assert whole / least <= held <= whole / most, name
    return single["adamw"], expected["adamw"][0][0]


def check_quick() -> None:
    """By the strategies that have most in common with the others, and a model that is compiled in half the time."""
    small = dataclasses.replace(CONFIG, n_layer=1, scan_layers=False, qk_norm=False)
    single, first_loss = compare_curves([("pmap", "adamw"), ("all, in pieces", "adamw")], small)
    loss = jax.jit(functools.partial(make_loss(single.trainer.model, label_smoothing=SMOOTHING), key=None))
    nats, count, _ = loss(single.init().params, single.batch(0))
    assert_equal(first_loss, nats / count, "the first loss, smoothed", rtol=1e-6)
    check_mesh()


def check_all_curves() -> None:
    compare_curves(ALL)


def check_collectives() -> None:
    """What the compiled steps exchange."""
    found = {
        name: Run(name, "adamw").collectives()
        for name in ("single", "pmap", "data", "data, in pieces", "fsdp", "tensor")
    }
    parameters = 4 * count_parameters(Run("single", "adamw").abstract_state.params)

    def total(name: str, kind: str) -> float:
        return sum(c.bytes for c in found[name] if c.kind == kind)

    assert not found["single"]
    for name in ("pmap", "data", "data, in pieces"):  # the gradients once, and a little more for a few vectors
        assert {c.kind for c in found[name]} == {"all-reduce"}
        assert parameters <= total(name, "all-reduce") <= 1.05 * parameters
    # Each matrix is gathered for the forward and the backward pass; moments stay where they are.
    assert 0.9 * parameters <= total("fsdp", "all-gather") <= 2.2 * parameters and not total("fsdp", "all-to-all")
    # Activations are summed, and no parameter is gathered.
    assert all(
        c.bytes < c.count * 4 * CONFIG.n_embd * 4 * CONFIG.n_embd for c in found["tensor"] if c.kind == "all-gather"
    )


def paths_of_whole(tree) -> list[str]:
    return [
        jax.tree_util.keystr(path)
        for path, x in jax.tree.leaves_with_path(tree)
        if x.ndim and x.sharding.shard_shape(x.shape) == x.shape
    ]


def check_mesh() -> None:
    """Nothing stays whole that is to be split, more columns go where their rows do, and devices with other rows or heads drop other attention weights."""
    for name in ("fsdp", "tensor", "all"):
        state = Run(name, "muon").abstract_state
        whole = paths_of_whole((state.params, state.opt_state))
        if name == "tensor":  # splits heads, hidden units and vocabulary, not the vectors of the residual stream
            assert [x for x in whole if "kernel" in x or "wte" in x] == []
        else:  # QK-norm's scale has the head's size, which every head needs. Muon keeps the coefficients of a polynomial.
            assert [x for x in whole if "_norm" not in x and "ns_coeffs" not in x] == [], name

    rows = Run("all", "adamw").rows(tokens(0), tokens(0), extras={"source_BS": tokens(0)})
    assert rows.extras["source_BS"].sharding == rows.inputs_BT.sharding
    sharded = Run("all", "adamw").strategy.shard_attention(plain_attention)
    zeros_BTNH, eye_BTNT = np.zeros((BATCH, T, 4, 4), np.float32), np.tile(np.eye(T)[None, :, None], (BATCH, 1, 4, 1))
    # Every score alike; the result is the weights.
    attention = jax.jit(functools.partial(sharded, scores=Scores(dropout=0.5)))
    weights_BTNT = attention(zeros_BTNH, zeros_BTNH, eye_BTNT, key=jax.random.key(0))
    kept_BNR = np.moveaxis(np.asarray(weights_BTNT), 2, 1)[..., *np.tril_indices(T)] > 0
    rows, heads = BATCH // 4, 2  # on each device
    # Two draws of a half agree by half.
    assert 0.4 < np.mean(kept_BNR[:rows] == kept_BNR[rows : 2 * rows]) < 0.6
    assert 0.4 < np.mean(kept_BNR[:, :heads] == kept_BNR[:, heads:]) < 0.6


def check_crossings() -> None:
    """Saved half-way on 8, 4, 2 or 1 devices, gone on with by another strategy on as many others: one curve."""
    rest = Run("single", "adamw").run()[STEPS // 2 :]
    for name, devices, then, devices_then in (
        *(("pmap", 8, "single", 1), ("fsdp", 8, "pmap", 4), ("all", 8, "data", 2), ("single", 1, "all", 8)),
        *(("pmap", 2, "fsdp", 8), ("data", 4, "pmap", 8), ("two slices", 8, "pmap", 4)),
    ):
        first, second = Run(name, "adamw", devices), Run(then, "adamw", devices_then)
        first.run(0, STEPS // 2)
        first.hand_over(second, STEPS // 2)
        assert_equal(second.run(STEPS // 2), rest, f"{name} on {devices} -> {then} on {devices_then}")


def check_dropout() -> None:
    """All rows are the same text: with one key for all devices, 8 of them would lose what one does."""
    row, losses = np.arange(T + 1, dtype=np.int32)[None] % 16, []
    for name, devices, rows in (("pmap", 1, 2), ("pmap", 8, 16), ("all", 8, 16)):
        run = Run(name, "adamw", devices, dataclasses.replace(CONFIG, dropout=0.5))
        text, _ = np.repeat(row, rows, axis=0), run.init()
        losses.append(float(run.step(run.rows(text[:, :-1], text[:, 1:]))["loss"]))
    one, *others = losses
    assert all(abs(loss - one) > 1e-3 for loss in others), losses


def check_imports() -> None:
    """Weights are read straight into their parts, bit for bit: each device has that of the training state, no more."""
    gpt2 = dataclasses.replace(CONFIG, position="learned", qk_norm=False, scan_layers=False, n_layer=1)
    rotated = dataclasses.replace(gpt2, position="rope", rope_fraction=0.5, parallel_residual=True)
    for family, config in ((GPT2, gpt2), (GPT_NEOX, GPT_NEOX.read(GPT_NEOX.write(rotated)))):
        rng = np.random.default_rng(0)
        flat = {path: rng.standard_normal(shape, np.float32) for path, shape in shapes_of(config).items()}
        params, directory = unflatten_dict(flat, sep="/"), Path(family.model_type)
        directory.mkdir()
        write(directory, to_tensors(params, family, config))
        for name, parts in (("fsdp", 8), ("tensor", 2), ("all", 4)):
            wanted = Run(name, "adamw", model=config).abstract_state.params
            places = {path: x.sharding for path, x in flatten_dict(wanted, sep="/").items()}
            read = read_params(list_tensors(directory), family, config, places=places)
            jax.tree.map(np.testing.assert_array_equal, read, params)
            assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, read, wanted))
            part, whole = bytes_per_device(wanted), sum(x.nbytes for x in jax.tree.leaves(params))
            assert whole / parts <= part < whole * 0.6, (family.model_type, name)


def check_fit() -> None:
    """A thread compiles the step: a run and its continuation end as by `train_step`, to the last bit. Shards need no kernel."""
    model = dataclasses.replace(CONFIG, vocab_size=32, block_size=112, dropout=0.1)
    ways = Training.start_compiling, lambda self, start: self.trainer.train_step
    origin, four_bits = None, LoraConfig(rank=2, targets=("q", "c_proj"), frozen="int4")
    for name, lora in (("pmap", NO_LORA), ("all", four_bits)):
        ends = []
        for Training.start_compiling in ways:
            directory = Path(tempfile.mkdtemp())
            for steps in (2, 4):
                made = tiny_experiment(chat_file(directory), batch_size=BATCH, steps=steps, init_from=origin)
                made = dataclasses.replace(made, model=model, parallel=STRATEGIES[name], lora=lora)
                run = fit(made, directory / "run", extend=True, progress=False)
            ends.append(run.params)
        jax.tree.map(np.testing.assert_array_equal, *ends)
        origin = str(directory / "run")
    for name in ("pmap", "data", "fsdp"):
        trainer = Run(name, "adamw").trainer
        with trainer.draw_by_kernel():
            traced = trainer.init_state.trace(jax.eval_shape(jax.random.key, 0), None)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("@cu_threefry" in text) == (name != "fsdp"), name


def check_bad_step() -> None:
    """A label outside the vocabulary in one row of one device: no device moves, and all of them go on."""
    expected = None
    for name in ("single", "pmap", "all, in pieces"):
        run, seen, told = Run(name, "adamw"), [], []
        run.init()
        for t in range(3):
            text = tokens(t)
            if t == 1:
                text[-1, -1] = 16  # on the last device alone
            metrics, state = run.step(run.rows(text[:, :-1], text[:, 1:], segments_BT=DOCUMENTS)), run.state
            seen.append([np.asarray(x).tobytes() for x in jax.tree.leaves((state.params, state.opt_state))])
            told.append([float(metrics[key]) for key in ("skipped_in_a_row", "learning_rate", "loss")])
        assert seen[0] == seen[1] != seen[2], name
        skipped_in_a_row, rates, losses = zip(*told, strict=True)
        expected = expected or losses
        assert_equal(losses, expected, name)
        assert skipped_in_a_row == (0, 1, 0)
        assert rates[0] < rates[1] == rates[2]  # warm-up; the rate that was not used is used next
        assert {shard.data.item() for shard in state.skipped.addressable_shards} == {1}


def check_adapters() -> None:
    """They alone move, and on a mesh they lie as the matrices do that they are of."""
    expected = None
    for name in ("single", "pmap", "all"):
        run = Run(name, "muon", lora=LoraConfig(rank=2, targets=("q", "c_fc", "c_proj")))
        given, before = jax.device_get(run.init().frozen_params), run.validation()
        losses, after = run.run(0, 6), run.validation()
        jax.tree.map(np.testing.assert_array_equal, given, jax.device_get(run.state.frozen_params))
        expected = expected or [*losses, before, after]
        assert_equal([*losses, before, after], expected, name, **ADAPTERS_EQUAL)
        assert after < before
    whole = paths_of_whole((run.abstract_state.params, run.abstract_state.frozen_params))
    assert [x for x in whole if "_norm" not in x] == []


if __name__ == "__main__":
    globals()[sys.argv[1]]()
