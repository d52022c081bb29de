"""Plan a training run: compile its step for this machine, a TPU slice or GPUs, and find a configuration that fits."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator

import jax

from jaxgpt.config import Experiment
from jaxgpt.errors import UserError
from jaxgpt.parallel.device import all_devices, bytes_per_device, memory_of
from jaxgpt.parallel.slices import count_slices
from jaxgpt.parallel.strategy import split_batch
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.tools.plan.estimate import Plan, estimate, format_gib
from jaxgpt.tools.plan.gpu import INSTALL
from jaxgpt.tools.plan.program import read_program
from jaxgpt.tools.plan.topology import topology_devices


class DoesNotFit(Exception):
    """The step needs more memory than a device has: at least `needed` bytes; None: the compiler does not report them."""

    def __init__(self, needed: int | None):
        """Store the bytes."""
        super().__init__(needed)
        self.needed = needed


@contextlib.contextmanager
def _cudnn_errors() -> Iterator[None]:
    """Raise `UserError` if JAX cannot lower cuDNN's attention on this machine.

    JAX asks the libraries and the GPU of this machine, not the devices to compile for: without cuDNN it lowers no call,
    and without a GPU only heads of up to 128.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as e:
        said = str(e).partition("\n")[0]
        if not re.search("cuDNN (not found|is not detected)|head dim must be", said):
            raise
        install = f"install it with {INSTALL}, or " if "cuDNN" in said else ""
        raise UserError(
            f"JAX cannot lower cuDNN's attention on this machine ({said.rstrip('.')}): {install}take --train.attention xla"
        ) from None


@_cudnn_errors()
def make_plan(
    experiment: Experiment,
    vocab_size: int,
    *,
    topology: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compile an experiment's training step and estimate its memory and speed.

    If it does not fit, smaller micro-batches, more recomputation and sharded state are tried, in this order, and the
    fastest plan that fits is returned.

    Args:
        experiment: the experiment. The size of its vocabulary is replaced.
        vocab_size: the size of the vocabulary.
        topology: a TPU slice such as "v5e:4x4", which libtpu compiles for, or GPUs such as "h200:8", which JAX's CUDA
            plugin compiles for. None means this machine.
        say: receives a line of text for each attempt.

    Raises:
        UserError: nothing fits, the batch or the width is not divisible over the devices, or a compiler is missing.
    """
    devices = all_devices() if topology is None else topology_devices(topology)
    model = dataclasses.replace(experiment.model, vocab_size=vocab_size)
    experiment = dataclasses.replace(experiment, model=model)
    found: list[Plan] = []
    for number, variant in enumerate(_iter_variants(experiment, len(devices), count_slices(devices))):
        description = f"remat {variant.model.remat}, {_describe_layout(variant)}"
        try:
            attempts = list(_iter_micro_batches(variant, devices))
        except UserError as e:  # the width or the batch is not divisible over the devices
            if not number:
                raise
            say(f"{description}: {e}")
            continue
        for smaller in attempts:
            micro = smaller.parallel.micro_batch_size
            try:
                fitting = _compile(smaller, devices, topology)
            except DoesNotFit as e:
                available = format_gib(memory_of(devices[0]))
                say(f"{description}, micro-batch {micro}: needs {format_gib(e.needed)} of {available}")
                continue
            if not number and smaller is attempts[0]:  # the experiment as given
                return fitting
            say(f"{description}, micro-batch {micro}: fits")
            found.append(fitting)
            break
        if found and variant.model.remat == "full":  # all remat policies of one sharding have been compared
            break
    if not found:
        raise UserError(
            f"{experiment.name} does not fit on {len(devices)} x {devices[0].device_kind}, whatever the micro-batch, "
            "remat and fsdp: use more devices or a smaller model"
        )
    return min(found, key=lambda p: p.step_seconds or 0.0)


def _iter_variants(experiment: Experiment, devices: int, slices: int = 1) -> Iterator[Experiment]:
    """Yield the experiment with more recomputation, then with its state sharded over more devices of a slice."""
    slices = max(slices, experiment.parallel.slices)  # only TPUs state theirs
    parallels = [experiment.parallel]
    if experiment.parallel.tensor == 1:
        width = experiment.model.n_embd
        current = experiment.parallel.fsdp if experiment.parallel.strategy == "mesh" else 1
        largest = devices // slices
        sizes = [n for n in range(max(current, 1) + 1, largest + 1) if largest % n == 0 and width % n == 0]
        mesh = dataclasses.replace(experiment.parallel, strategy="mesh", data=-1, slices=slices)
        parallels += [dataclasses.replace(mesh, fsdp=n) for n in sizes]
    policies = ("none", "dots", "full")
    for parallel in parallels:
        for remat in policies[policies.index(experiment.model.remat) :]:
            model = dataclasses.replace(experiment.model, remat=remat)
            yield dataclasses.replace(experiment, model=model, parallel=parallel)


def _iter_micro_batches(experiment: Experiment, devices: list[jax.Device]) -> Iterator[Experiment]:
    """Yield the experiment as configured, then with the micro-batch halved repeatedly, down to one sequence."""
    trainer = make_trainer(experiment, devices)
    split = trainer.split
    while True:
        parallel = dataclasses.replace(experiment.parallel, micro_batch_size=split.micro_batch_size)
        yield dataclasses.replace(experiment, parallel=parallel)
        if split.micro_batch_size == 1:
            return
        half = dataclasses.replace(parallel, micro_batch_size=split.micro_batch_size // 2)
        split = split_batch(experiment.train.batch_size, trainer.strategy.data_parallel_size, half)


def _describe_layout(experiment: Experiment) -> str:
    p = experiment.parallel
    slices = f" slices={p.slices}" if p.slices > 1 else ""
    return p.strategy if p.strategy != "mesh" else f"data={p.data} fsdp={p.fsdp} tensor={p.tensor}{slices}"


def _compile(experiment: Experiment, devices: list[jax.Device], topology: str | None) -> Plan:
    trainer = make_trainer(experiment, devices)
    state, available = bytes_per_device(trainer.abstract_state), memory_of(devices[0])
    if available is not None and state > available:
        raise DoesNotFit(state)
    try:
        executable = trainer.lower().compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        used = re.search(r"Used ([\d.]+)([KMG]) of", str(e))
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}
        raise DoesNotFit(int(float(used[1]) * scale[used[2]]) if used else None) from None

    memory = memory_of_program(executable)
    if available is not None and memory > available:
        raise DoesNotFit(memory)
    program = read_program(executable.as_text())
    return estimate(experiment, trainer, program, topology=topology, memory=memory, available=available)


def memory_of_program(executable: jax.stages.Compiled) -> int:
    """Return the peak bytes of a program on one device: arguments, results and temporaries."""
    analysis = executable.memory_analysis()
    assert analysis is not None, "the backend does not report memory"
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes  # the new state replaces the old one
        + analysis.temp_size_in_bytes
    )
