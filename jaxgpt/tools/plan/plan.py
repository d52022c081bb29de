"""Plan a training run: compile its step for this machine, a TPU slice or GPUs, and find a configuration that fits.

Memory, collectives and the lower bound of a step's time are read from the compiled program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxgpt.config import Experiment, GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.layers.kernels.splash import computed_scores
from jaxgpt.parallel.device import (
    PEAKS,
    Peaks,
    all_devices,
    attention_flops,
    bytes_per_device,
    memory_of,
    train_flops_per_token,
)
from jaxgpt.parallel.mesh import count_slices
from jaxgpt.parallel.strategy import split_batch
from jaxgpt.parallel.trainer import Trainer, make_trainer
from jaxgpt.tools.plan.hlo import Collective, Program, read_program
from jaxgpt.tools.plan.topology import INSTALL, topology_devices


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTotal:
    """Total of the collectives of one kind and group size in one step."""

    kind: str
    devices: int  # in each group
    count: int
    bytes: float  # sum over the full buffers
    seconds: float | None  # at the full bandwidth of the links; None: unknown
    between_slices: bool = False  # over the data-center network; `devices` is then the number of slices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Cost of one training step on one device, read from the compiled program. None: unknown."""

    experiment: str
    topology: str  # "v5e:4x4", or "this machine"
    devices: int
    device: str
    strategy: str
    compute: str  # dtype and attention kernel
    remat: str
    micro_batch_size: int
    accumulation: int
    parameters: int
    tokens_per_step: int
    flops_per_token: float  # of the model: 6 per parameter and 12 L D T
    executed_flops_per_token: float  # of the program, recomputation included
    memory: int  # bytes on one device: state, batch and temporaries
    state_memory: int  # the part of `memory` for parameters and optimiser state
    available: int | None  # bytes
    fits: bool | None
    kernels: dict[str, int]  # launches per step, of libraries and code generators
    collectives: tuple[CollectiveTotal, ...]
    compute_seconds: float | None  # per step, at peak bfloat16 FLOP/s
    memory_seconds: float | None  # per step, if each operand and result of a fusion is read or written once
    interconnect_seconds: float | None
    network_seconds: float | None  # per step, between slices
    network_bytes: float  # that each device sends to other slices, per step
    serial_seconds: float | None  # of a GPU's kernels, each of which takes the longer of its compute and its traffic
    step_seconds: float | None  # the longest of the four, a lower bound: the others may overlap with it
    bottleneck: str | None  # compute, memory, interconnect or network
    tokens_per_second: float | None
    mfu: float | None  # upper bound: the model's FLOPs, masked scores included, over peak
    total_tokens: int  # of the experiment
    hours: float | None  # of the experiment, a lower bound

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `--json`, two of them under the names of version 0.1.0."""
        names = {"collectives": "exchanges", "bottleneck": "binds"}
        return {names.get(name, name): value for name, value in dataclasses.asdict(self).items()}


def estimate(
    experiment: Experiment,
    trainer: Trainer,
    program: Program,
    *,
    topology: str | None,
    memory: int,
    available: int | None,
) -> Plan:
    """Return the plan of an experiment from the counts of its compiled step.

    topology=None means this machine. `memory` is what the step needs on one device and `available` what the device has,
    in bytes; None means unknown.
    """
    train, config, strategy = experiment.train, experiment.model, trainer.strategy
    used = strategy.devices
    parameters, in_adapters = trainer.parameters
    tokens = train.batch_size * config.block_size
    flops_per_token = train_flops_per_token(config, parameters, in_adapters)
    flops = program.flops + program.custom_flops + _splash_flops(trainer, config, tokens / len(used), program)
    limits = PEAKS.get(used[0].device_kind)
    collectives = _total_collectives(program.collectives, used)
    seconds = _bounds(flops, program.bytes_accessed, collectives, limits)
    step = _add(list(seconds.values()), max)
    rate = tokens / step if step else None
    return Plan(
        experiment=experiment.name,
        topology=topology or "this machine",
        devices=len(used),
        device=used[0].device_kind,
        strategy=strategy.name,
        compute=trainer.options.reason,
        remat=config.remat,
        micro_batch_size=trainer.split.micro_batch_size,
        accumulation=trainer.split.grad_accum_steps,
        parameters=parameters,
        tokens_per_step=tokens,
        flops_per_token=flops_per_token,
        executed_flops_per_token=flops * len(used) / tokens,
        memory=memory,
        state_memory=bytes_per_device(trainer.abstract_state),
        available=available,
        fits=None if available is None else True,
        kernels=program.kernels,
        collectives=collectives,
        compute_seconds=seconds["compute"],
        memory_seconds=seconds["memory"],
        interconnect_seconds=seconds["interconnect"],
        network_seconds=seconds["network"],
        network_bytes=sum(_sent(c) for c in program.collectives if c.between_slices),
        serial_seconds=_serial_seconds(program, limits),
        step_seconds=step,
        bottleneck=None if step is None else max(seconds, key=lambda name: seconds[name] or 0.0),
        tokens_per_second=rate,
        mfu=None if rate is None or limits is None else rate * flops_per_token / (limits.flops * len(used)),
        total_tokens=tokens * train.steps,
        hours=None if step is None else step * train.steps / 3600,
    )


def _bounds(
    flops: float, accessed: float, collectives: Sequence[CollectiveTotal], limits: Peaks | None
) -> dict[str, float | None]:
    """Return the seconds per step that each of the device's limits demands, by its name."""
    if limits is None:
        return dict.fromkeys(("compute", "memory", "interconnect", "network"))
    return {
        "compute": flops / limits.flops,
        "memory": accessed / limits.memory_bandwidth,
        "interconnect": _add([c.seconds for c in collectives if not c.between_slices], sum),
        "network": _add([c.seconds for c in collectives if c.between_slices], sum),
    }


def _serial_seconds(program: Program, limits: Peaks | None) -> float | None:
    """Return the seconds of a GPU's kernels one after another; None: a TPU's memory prefetches for the next one."""
    if limits is None or limits.torus:
        return None
    return math.fsum(
        times * max(flops / limits.flops, accessed / limits.memory_bandwidth)
        for times, flops, accessed in program.launches
    )


def _splash_flops(trainer: Trainer, config: GPTConfig, tokens: float, program: Program) -> float:
    """Return the FLOPs of splash attention, which the program does not state: 2 products forward, 5 backward.

    The backward pass recomputes the scores. Scores are computed in whole blocks.
    """
    if trainer.options.attention != "splash" or config.dropout:
        return 0.0
    # One forward and one backward call per layer and micro-batch, and the forward calls that remat repeats.
    calls = program.silent_kernels
    forward = calls - config.n_layer * trainer.split.grad_accum_steps
    if forward <= 0:
        return 0.0
    T, H = config.block_size, config.explicit().head_dim
    assert H
    windows = [config.window(layer) for layer in range(config.n_layer)]
    read = sum(min(window or T, T) * T for window in windows)
    share = sum(computed_scores(T, H, window) for window in windows) / read
    products = 2 * forward / (calls - forward) + 5
    return products * attention_flops(config) * tokens * share


def _total_collectives(collectives: Sequence[Collective], devices: Sequence[jax.Device]) -> tuple[CollectiveTotal, ...]:
    """Add up the collectives of each kind and group size."""
    limits = PEAKS.get(devices[0].device_kind)
    has_switch = limits is not None and limits.torus == 0
    groups: dict[tuple[bool, str, int], list[Collective]] = defaultdict(list)
    for c in collectives:
        groups[c.between_slices, c.kind, len(c.group)].append(c)

    def seconds(c: Collective) -> float | None:
        bandwidth = ring_bandwidth(devices, c.group)
        if bandwidth is None:
            return None
        switched = has_switch or c.between_slices
        return c.times * collective_seconds(c.kind, c.bytes, len(c.group), bandwidth, switched=switched)

    return tuple(
        CollectiveTotal(
            kind=kind,
            devices=n,
            count=sum(c.times for c in members),
            bytes=sum(c.bytes * c.times for c in members),
            seconds=_add([seconds(c) for c in members], math.fsum),
            between_slices=between_slices,
        )
        for (between_slices, kind, n), members in sorted(groups.items())
    )


def ring_bandwidth(devices: Sequence[jax.Device], group: Sequence[int]) -> float | None:
    """Return the bytes/s that each device of a group can send while all of them send. None: unknown.

    `group` holds indices into `devices`, which are full slices. In a TPU's slice, each dimension in which the group
    extends adds one link, or two if the dimension is a ring that the group fills. On v5e and v6e, a dimension of 16
    chips is a ring; on v4 and v5p, every dimension is one if the slice consists of cubes of 4x4x4, which optical
    switches connect. Between slices, each chip has its share of its host's network cards.
    On GPUs, the result is the link's bandwidth within one host. Between hosts, NCCL lays several rings through the group,
    each of which leaves a host by another network card: as many cards send as the host has members of the group.
    """
    members = [devices[i] for i in group]
    limits = PEAKS.get(members[0].device_kind)
    if limits is None:
        return None
    if limits.torus == 0:
        on_host = Counter(d.process_index for d in members)
        if len(on_host) == 1:
            return limits.link_bandwidth
        network = limits.network_bandwidth
        return None if network is None else min(limits.link_bandwidth, min(on_host.values()) * network)
    if len({getattr(d, "slice_index", 0) for d in members}) > 1:
        return limits.network_bandwidth
    sizes = [len({d.coords[axis] for d in devices}) for axis in range(limits.torus)]
    cubes = limits.torus == 3 and all(size % 4 == 0 for size in sizes)
    links = 0
    for axis, size in enumerate(sizes):
        reached = len({d.coords[axis] for d in members})
        closes = cubes or (limits.torus == 2 and size == 16)
        if reached > 1:
            links += 2 if closes and reached == size else 1
    return links * limits.link_bandwidth or None  # one device, or the cores of one chip: no links


def collective_seconds(kind: str, size: int, n: int, bandwidth: float, *, switched: bool = False) -> float:
    """Return the seconds that one collective takes if bandwidth is the only limit.

    Each device sends n - 1 of n parts; an all-reduce is a reduce-scatter and an all-gather
    (jax-ml.github.io/scaling-book/sharding). In an all-to-all, half of what half of the devices hold crosses the
    middle: n * size / 4 bytes, over the one link of a line or the two of a ring; on a torus of more dimensions this is
    an upper bound. A permutation is assumed to use all links; between neighbours it uses one. Latency, about a
    microsecond per link, is not included.

    Args:
        kind: name of the collective in HLO, such as "all-reduce".
        size: bytes, as in `hlo.Collective`.
        n: number of devices in the group.
        bandwidth: bytes/s, from `ring_bandwidth`.
        switched: every device reaches every other directly, as GPUs do.
    """
    if n == 1:
        return 0.0
    share = (n - 1) / n
    parts = {
        "all-gather": share,
        "reduce-scatter": share,
        "all-reduce": 2 * share,
        "all-to-all": share if switched else max(share, n / 4),
        "collective-permute": 1.0,
    }
    return parts[kind] * size / bandwidth


def _sent(c: Collective) -> float:
    """Return the bytes that each device sends in one step, over a switch."""
    return c.times * collective_seconds(c.kind, c.bytes, len(c.group), 1.0, switched=True)


def _add(values: Sequence[float | None], add: Callable[[Sequence[float]], float]) -> float | None:
    """Return the sum of the values, or what else `add` makes of them. None: one of them is unknown."""
    known = [value for value in values if value is not None]
    return add(known) if len(known) == len(values) else None


def format_gib(n: float | None) -> str:
    """Return a number of bytes as text, in GiB."""
    return "unknown" if n is None else f"{n / 2**30:.2f} GiB"


def format_ms(seconds: float | None) -> str:
    """Return a time as text, in milliseconds."""
    return "unknown" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _format_collective(c: CollectiveTotal) -> str:
    text = f"{c.count} x {c.kind} over {c.devices}: {c.bytes / 1e6:,.1f} MB"
    return text if c.seconds is None else f"{text}, {format_ms(c.seconds)}"


def format_plan(p: Plan) -> str:
    """Return a plan as text: the verdict, then one fact per line. A time is the longest of all that are known."""
    bounds = [(p.step_seconds or 0.0, f"{p.bottleneck}-bound"), (p.serial_seconds or 0.0, "its kernels in turn")]
    step, why = max(bounds)
    hours = p.total_tokens / p.tokens_per_step * step / 3600
    mfu = p.mfu and p.mfu * (p.step_seconds or 0.0) / step
    fits = "fits" if p.fits else "unknown whether it fits"
    verdict = f"{fits}: {format_gib(p.memory)} of {format_gib(p.available)} per device"
    verdict += f"; at least {format_ms(step)} per step, {hours:,.1f} hours for all" if step else ""
    skips = " (it counts masked scores, which the kernel skips)" if (mfu or 0.0) > 1.0 else ""
    batch = f"{p.tokens_per_step // p.accumulation:,} tokens each"
    network = f"{p.network_bytes / 1e6:,.1f} MB sent to other slices by each device"
    times = {"compute": p.compute_seconds, "memory traffic": p.memory_seconds, "interconnect": p.interconnect_seconds}
    unknown = ", ".join([name for name, seconds in times.items() if seconds is None] + ["speed"] * (not step))
    rows = [
        ("verdict", verdict),
        ("experiment", f"{p.experiment} on {p.topology}: {p.devices} x {p.device}, {p.compute}"),
        ("strategy", f"{p.strategy}, remat {p.remat}, micro-batch {p.micro_batch_size} x {p.accumulation}, {batch}"),
        ("parameters", f"{p.parameters:,}, {format_gib(p.state_memory)} of state per device"),
        ("FLOPs per token", f"{p.flops_per_token:.3g} of the model, {p.executed_flops_per_token:.3g} executed"),
        *([("kernels", ", ".join(f"{n:,} x {name}" for name, n in p.kernels.items()))] if p.kernels else []),
        *(("between slices" if c.between_slices else "collectives", _format_collective(c)) for c in p.collectives),
        *((name, format_ms(s)) for name, s in times.items() if s is not None),
        *([("network", f"{format_ms(p.network_seconds)}, {network}")] if p.network_bytes else []),
        *([("kernels in turn", format_ms(p.serial_seconds))] if p.serial_seconds else []),
        *([("unknown", f"{unknown}: no rates of {p.device} are on record")] if unknown else []),
    ]
    if step:
        rows += [
            ("step", f"at least {format_ms(step)}: {why}"),
            ("tokens per second", f"at most {p.tokens_per_step / step:,.0f}"),
            *([("MFU", f"at most {mfu:.1%}{skips}")] if mfu else []),
        ]
    rows.append(("full run", f"{p.total_tokens:,} tokens" + (f" in at least {hours:,.1f} hours" if step else "")))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
