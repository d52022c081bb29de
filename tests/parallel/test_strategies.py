"""single = accumulation = pmap = mesh, in losses, in checkpoints, and in what they exchange; on 8 CPU devices."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import Experiment, GPTConfig, ParallelConfig
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.parallel.mesh import GPU_OPTIONS, check_divisible, mesh_shape
from jaxgpt.parallel.multihost import checksum
from jaxgpt.parallel.strategy import split_batch
from jaxgpt.parallel.trainer import alternatives, choose_strategy
from jaxgpt.tools.plan.hlo import read_program
from jaxgpt.train import NOT_FINITE, TAKEN
from tests.helpers import run_command
from tests.parallel.eight_devices import CONFIG, CURVES

# Sums over a batch in another order: a few units in the last place, grown over 20 steps of Adam. Seen: 3.8e-6.
CURVES_EQUAL = dict(rtol=1e-5, atol=1e-5)
# After six steps of Muon on adapters, whose small singular values it makes large. Seen: 1.02e-5.
ADAPTERS_EQUAL = dict(rtol=3e-5)


def on_eight_devices(what, tmp_path_factory, *arguments):
    command = ("-m", "tests.parallel.eight_devices", what, *arguments)
    environment = {
        "JAX_NUM_CPU_DEVICES": "8",
        # Several of these compile the same steps: what one has compiled the next ones read.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.getbasetemp() / "compiled-for-eight"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    done = run_command(*command, cwd=tmp_path_factory.mktemp("eight"), deadline=500, **environment)
    assert done.returncode == 0, done.stderr
    assert "Involuntary full rematerialization" not in done.stderr  # the compiler found no way but to copy everything
    return json.loads(done.stdout.splitlines()[-1])


# The strategies that have most in common with the others; all of them by `-m slow`.
QUICK_CURVES = ("single, adamw", "pmap, adamw", "all, in pieces, adamw")


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    return on_eight_devices("curves", tmp_path_factory, *QUICK_CURVES)


@pytest.fixture(scope="module")
def all_curves(tmp_path_factory):
    return on_eight_devices("curves", tmp_path_factory)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return {name: read_program(text) for name, text in on_eight_devices("programs", tmp_path_factory).items()}


@pytest.mark.parametrize("name", [name for name in QUICK_CURVES if not name.startswith("single")])
def test_twenty_steps_are_the_same(curves, name):
    assert_same_curve(curves, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{name}, {optimizer}" for name, optimizer in CURVES if name != "single"])
def test_twenty_steps_are_the_same_everywhere(all_curves, name):
    assert_same_curve(all_curves, name)


def assert_same_curve(curves, name):
    expected, found = curves[f"single, {name.rsplit(', ')[-1]}"], curves[name]
    assert expected["losses"][-1] < expected["losses"][0] - 0.3  # it learns, so there is something to be equal
    np.testing.assert_allclose(found["losses"], expected["losses"], **CURVES_EQUAL)
    np.testing.assert_allclose(found["validation"], expected["validation"], **CURVES_EQUAL)


def test_what_a_device_holds_is_what_is_counted(curves):
    """Bytes of the state: all of it where each device has a copy, a part of it on a mesh that cuts it."""
    held = {name: found["held"] for name, found in curves.items()}
    assert all(counted == measured for counted, measured in held.values()), held
    whole = held["single, adamw"][0]
    assert held["pmap, adamw"][0] == whole > 3 * held["all, in pieces, adamw"][0]


def test_the_first_loss_is_the_smoothed_one_of_the_first_parameters(curves):
    single = curves["single, adamw"]
    assert single["losses"][0] == pytest.approx(single["smoothed"], rel=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_with_other_devices(all_curves, tmp_path_factory):
    """Saved half-way on 8, 4, 2 or 1 devices, gone on with by another strategy on as many others: one curve."""
    rest = all_curves["single, adamw"]["losses"]
    directory = str(tmp_path_factory.mktemp("checkpoints"))
    crossings = on_eight_devices("crossings", tmp_path_factory, directory)
    assert len(crossings) == 6
    for route, losses in crossings.items():
        np.testing.assert_allclose(losses, rest[len(rest) // 2 :], **CURVES_EQUAL, err_msg=route)


def bytes_of(program, *kinds):
    return sum(c.bytes * c.times for c in program.collectives if c.kind in kinds)


PARAMETERS = sum(
    x.size for x in jax.tree.leaves(jax.eval_shape(GPT(CONFIG).init, jax.random.key(0), np.zeros((1, 1), np.int32)))
)


@pytest.mark.slow
def test_one_device_exchanges_nothing(programs):
    assert programs["single"].collectives == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pmap", "data", "data, in pieces"])
def test_data_parallelism_exchanges_its_gradients_once(programs, name):
    """4 bytes for each parameter, and for a few vectors a little more; by all-reduce alone."""
    assert {c.kind for c in programs[name].collectives} == {"all-reduce"}
    assert 4 * PARAMETERS <= bytes_of(programs[name], "all-reduce") <= 4 * PARAMETERS * 1.05


@pytest.mark.slow
def test_fsdp_gathers_parameters_and_never_the_optimiser(programs):
    """Each matrix is gathered for the forward and the backward pass; moments stay where they are."""
    gathered = bytes_of(programs["fsdp"], "all-gather")
    assert 4 * PARAMETERS * 0.9 <= gathered <= 2 * 4 * PARAMETERS * 1.1
    assert "all-to-all" not in {c.kind for c in programs["fsdp"].collectives}


def test_xla_knows_the_options_for_gpus():
    """They are XLA's, which renames such options; unknown ones end the compilation on any device."""
    jax.jit(lambda: 0, compiler_options=GPU_OPTIONS).lower().compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda: 0, compiler_options={"xla_gpu_all_gather": 1}).lower().compile()


@pytest.mark.slow
def test_tensor_parallelism_gathers_no_parameter(programs):
    """It sums activations: twice per layer and direction, [rows, D] each, and the gradients of what is shared."""
    for c in programs["tensor"].collectives:
        if c.kind == "all-gather":
            assert c.bytes < 4 * CONFIG.n_embd * 4 * CONFIG.n_embd, c


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_eight_devices("several", tmp_path_factory, "whole_arrays", "kept")


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return on_eight_devices(
        "several", tmp_path_factory, "with_encoder", "imported", "drift", "made", "adapters", "dropped", "guarded"
    )


def test_nothing_stays_whole_that_is_to_be_split(found):
    whole = found["whole_arrays"]
    # QK-norm's scale has the head's size: 4 numbers, which every head needs. Muon keeps the coefficients of a polynomial.
    for name in ("fsdp", "all"):
        assert [x for x in whole[name] if "_norm" not in x and "ns_coeffs" not in x] == []
    # Tensor parallelism splits heads, hidden units and vocabulary, not the vectors of the residual stream.
    assert [x for x in whole["tensor"] if "kernel" in x or "wte" in x] == []


@pytest.mark.slow
def test_an_encoder_learns_the_same_everywhere(more):
    expected = more["with_encoder"].pop("single")
    assert expected[-1] < expected[0] - 0.02 and len(more["with_encoder"]) == 2
    for name, losses in more["with_encoder"].items():
        np.testing.assert_allclose(losses, expected, **CURVES_EQUAL, err_msg=name)


@pytest.mark.slow
def test_a_state_is_made_in_parts(more):
    """What a device holds when it is made, and on the way there, is an eighth of the model."""
    for whole, part in zip(more["made"]["single"], more["made"]["fsdp"], strict=True):
        assert part < whole / 8 * 1.1


@pytest.mark.slow
def test_weights_are_read_straight_into_their_parts(more):
    """Bit for bit the same ones; each device has its part, which is that of the training state, and no more."""
    parts = {"fsdp": 8, "tensor": 2, "all": 4}
    assert len(more["imported"]) == 9
    for case, found in more["imported"].items():
        assert found["equal"] and found["placed"], case
        assert found["held"] == [found["parts"]] * 8, case
        assert found["whole"] / parts[case.split(", ")[1]] <= found["parts"] < found["whole"] * 0.6, case


@pytest.mark.slow
def test_each_device_drops_its_own(more):
    """All rows are the same text: with one key for all devices, 8 of them would lose what one does."""
    losses = more["dropped"]
    assert abs(losses["pmap on 8"] - losses["pmap on 1"]) > 1e-3
    assert abs(losses["all on 8"] - losses["pmap on 1"]) > 1e-3  # and a mesh with dropout runs


def test_each_device_of_a_mesh_drops_its_own_attention_weights(found):
    """As two draws of a half agree by half, whether devices have other rows or other heads."""
    for what, alike in found["kept"].items():
        assert 0.4 < alike < 0.6, what


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "pmap", "all, in pieces"])
def test_a_bad_step_is_skipped_by_all_devices_alike(more, name):
    """One row of one device is bad: no device moves, and all of them go on. Rows hold two documents each."""
    here = more["guarded"][name]
    assert here["same"] == [True, False]
    skipped, rates, losses = zip(*here["told"], strict=True)
    np.testing.assert_allclose(losses, [told[2] for told in more["guarded"]["single"]["told"]], **CURVES_EQUAL)
    assert skipped == (TAKEN, NOT_FINITE, TAKEN)
    assert rates[0] < rates[1] == rates[2]  # warm-up; the rate that was not used is used next
    assert here["skipped"] == [1] * (1 if name == "single" else 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "pmap", "all"])
def test_adapters_are_the_same_everywhere(more, name):
    """They alone move, and on a mesh they lie as the matrices do that they are of."""
    here, expected = more["adapters"][name], more["adapters"]["single"]
    np.testing.assert_allclose(here["losses"], expected["losses"], **CURVES_EQUAL)
    np.testing.assert_allclose(here["validations"], expected["validations"], **ADAPTERS_EQUAL)
    before, after = here["validations"]
    assert here["same"] and after < before
    if name == "all":
        assert [x for x in here["whole"] if "_norm" not in x] == []


@pytest.mark.slow
def test_one_flipped_bit_of_one_copy_is_found(more):
    """Of parameters that pmap, or the mesh's axis `data`, keeps on several devices; it does not heal by training."""
    for which, said in more["drift"].items():
        assert "were equal at step 100" in said and "from then to step 200 cannot be trusted" in said
        if which.startswith("pmap on 2"):  # which of two is wrong nobody knows
            assert "at least one of cpu:0 of process 0, cpu:1 of process 0 is wrong" in said
        elif not which.startswith("all"):
            assert ": cpu:5 of process 0 differs from the others" in said
        else:  # two copies of each of four parts
            assert "at least one of cpu:1 of process 0, cpu:5 of process 0 is wrong" in said


def test_a_checksum_sees_every_bit_and_every_place():
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    tree = {"a": x, "b": x.astype(jnp.bfloat16), "c": np.arange(5), "d": np.array([True, False])}
    sums = {int(checksum(tree))}
    for bit in range(32):
        flipped = x.copy()
        flipped.view(np.uint32)[63] ^= np.uint32(1 << bit)
        sums.add(int(checksum(tree | {"a": flipped})))
    sums.add(int(checksum(tree | {"a": np.roll(x, 1)})))
    sums.add(int(checksum(tree | {"d": np.array([False, True])})))
    sums.add(int(checksum(tree | {"b": np.roll(tree["b"], 1)})))
    assert len(sums) == 1 + 32 + 3


# Bad input, on the one device of this process: sizes are checked before anything is compiled.


def mesh(config, **sizes):
    shape = {"data": 1, "fsdp": 1, "tensor": 1} | sizes
    return check_divisible(config, jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mesh_shape(8, 3, 1, 1), r"data=3 x fsdp=1 x tensor=1 does not make the 8 devices.*\[1, 2, 4, 8\]"),
        (lambda: mesh_shape(8, -1, 3, 1), "data=-1 x fsdp=3 x tensor=1 does not make the 8 devices"),
        (lambda: mesh_shape(8, -1, 4, 1, 4), "slices=4 does not divide parallel.data=2: take data from multiples of 4"),
        (lambda: choose(ParallelConfig(slices=2)), "slices=2 needs --parallel.strategy mesh, not auto: .* pmap splits"),
        (lambda: ParallelConfig(slices=0), "slices=0: needs at least 1"),
        (
            lambda: mesh(GPTConfig(), tensor=8),
            r"n_head=12 does not divide over parallel.tensor=8: take.*\[1, 2, 3, 4, 6\]",
        ),
        (lambda: mesh(GPTConfig(n_kv_head=2), tensor=4), "n_kv_head=2 does not divide over parallel.tensor=4"),
        (lambda: mesh(GPTConfig(vocab_size=103), tensor=2), "vocab_size=103 .* take model.vocab_size=102 or 104"),
        (
            lambda: mesh(GPTConfig(n_head=8), fsdp=256, tensor=8),
            "a bias or scale of n_head x head size = 768 .* = 2048",
        ),
        (lambda: mesh(GPTConfig(n_head=8, bias=False, qkv_bias=True), fsdp=256, tensor=8), "n_head x head size = 768"),
        (lambda: mesh(GPTConfig(), fsdp=512), r"n_embd=768 does not divide over parallel.fsdp=512"),
        (lambda: split_batch(12, 8, ParallelConfig()), "batch_size=12 does not divide over 8 devices: .* 8 or 16"),
        (lambda: split_batch(4, 8, ParallelConfig()), "batch_size=4 does not divide over 8 devices: .* 8,"),
        (lambda: ParallelConfig(strategy="ddp"), "strategy='ddp': needs one of auto, single, pmap, mesh"),
        (lambda: in_chunks(48), "loss_chunk=48 does not divide model.block_size=1024: take 32 or 64"),
        (lambda: in_chunks(600), "loss_chunk=600 .* take 512 or 1024"),
        (lambda: ParallelConfig(tensor=0), "tensor=0: needs counts of devices"),
        (lambda: ParallelConfig(coordinator="a:1"), "give all three"),
        (lambda: ParallelConfig(coordinator="a:1", processes=2, process_id=2), "process_id=2: needs less than"),
        (lambda: choose(ParallelConfig(fsdp=2)), "need --parallel.strategy mesh"),
        (lambda: choose(ParallelConfig(strategy="mesh", fsdp=2)), "does not make the 1 devices"),
    ],
)
def test_bad_sizes_are_told(call, message):
    with pytest.raises(UserError, match=message):
        call()


def in_chunks(n):
    return Experiment(name="chunks", parallel=ParallelConfig(loss_chunk=n))


def choose(config):
    return choose_strategy(config, CONFIG)


def test_auto_takes_one_device_plainly():
    assert choose(ParallelConfig()).name == "one device"


@pytest.mark.parametrize(
    ("batch", "shards", "micro", "expected"),
    [(480, 1, 12, (12, 40)), (480, 8, 12, (12, 5)), (480, 16, 12, (10, 3)), (480, 8, None, (60, 1)), (8, 8, 4, (1, 1))],
)
def test_accumulation_follows_from_the_batch_and_the_devices(batch, shards, micro, expected):
    found = split_batch(batch, shards, ParallelConfig(micro_batch_size=micro))
    assert (found.micro_batch_size, found.grad_accum_steps) == expected
    assert found.micro_batch_size * shards * found.grad_accum_steps == batch


def test_a_mesh_is_resumed_on_other_devices_as_sharded_as_it_was():
    """Without a pass by pmap, where each device would hold the whole state; on one device nothing is sharded."""
    kept = ParallelConfig(strategy="mesh", data=2, fsdp=4, tensor=2, micro_batch_size=3)
    sizes = [(c.strategy, c.data, c.fsdp, c.tensor, c.micro_batch_size) for c in alternatives(kept, 4)]
    last = [("auto", -1, 1, 1, 3), ("single", -1, 1, 1, 3)]
    assert sizes == [("mesh", 1, -1, 2, 3), ("mesh", 1, -1, 1, 3), *last]
    copies = alternatives(ParallelConfig(strategy="mesh", data=8), 4)
    assert (copies[0].data, copies[0].fsdp) == (-1, 1)
    assert [c.strategy for c in alternatives(kept, 1)] == [c.strategy for c in alternatives(ParallelConfig(), 8)]


def test_a_mesh_is_resumed_on_other_slices():
    """It keeps its axes on as many devices, else its kind of sharding; only data extends over several slices."""
    two = ParallelConfig(strategy="mesh", data=2, fsdp=16, slices=2)
    sizes = [(c.strategy, c.data, c.fsdp, c.slices) for c in alternatives(two, 32, 1)]
    assert sizes[:2] == [("mesh", 2, 16, 1), ("mesh", 1, -1, 1)] and sizes[-1] == ("single", -1, 1, 1)
    one = dataclasses.replace(two, data=1, slices=1)
    assert [(c.data, c.fsdp, c.slices) for c in alternatives(one, 32, 2)][:2] == [(1, 16, 2), (2, -1, 2)]
