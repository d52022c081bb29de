"""Plan a training run: compile its step for this machine, a TPU slice or GPUs, and find a configuration that fits.

Memory, collectives and the lower bound of a step's time are read from the compiled program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxgpt.config.validate import PositiveFloat
from jaxgpt.config.words import replace_fields
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import Result
from jaxgpt.layers.kernels.splash import computed_scores
from jaxgpt.parallel.jax_setup import all_devices, configure_jax
from jaxgpt.parallel.limits import PEAKS, attention_flops, bytes_per_device, memory_of, train_flops_per_token
from jaxgpt.parallel.mesh import count_slices
from jaxgpt.parallel.trainer import Trainer, make_trainer
from jaxgpt.runs.pretrained import resolve_init_from
from jaxgpt.tools.plan.hlo import Collective, Program, read_program
from jaxgpt.tools.plan.topology import INSTALL, topology_devices


class DoesNotFit(Exception):
    """The step needs more memory than a device has. The argument is the bytes, or None if the compiler does not say."""


@contextlib.contextmanager
def _cudnn_errors() -> Iterator[None]:
    """Raise `UserError` if JAX cannot lower cuDNN's attention on this machine.

    JAX asks the libraries and the GPU of this machine, not the devices that it compiles for. Without cuDNN it lowers no
    attention call. Without a GPU it lowers only calls with a head size of up to 128.
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


def plan(
    *,
    topology: str | None = None,
    tokens: str | None = None,
    price: PositiveFloat | None = None,
    experiment: Experiment,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Compile a training step and estimate its memory and speed.

    The step is not run. EXPERIMENT is as for `jaxgpt train`.

    Args:
        topology: devices, such as v5e-8, v5p:2x2x4, 2xv5e:16x16, 8xh100 or 4x8xh200. None means this machine
        tokens: tokens to train on, such as 10B. None means train.steps
        price: USD per device-hour. None means no price
        say: receives a line of text for each attempt
    """
    if topology is not None:
        jax.config.update("jax_platforms", "cpu")  # a plugin compiles, and needs no device of this machine
        jax.config.update("jax_enable_compilation_cache", False)  # JAX cannot read back programs of absent devices
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of what does not fit, and so does the plan
    configure_jax()
    full, _ = resolve_init_from(experiment)
    if tokens is not None:
        steps = -(-parse_tokens(tokens) // (full.train.batch_size * full.model.block_size))
        full = replace_fields(full, {"train.steps": steps})
    vocab_size = full.model.vocab_size or full.data.open_dataset(full.model).tokenizer.vocab_size
    found = make_plan(full, vocab_size, topology=topology, say=say)
    dollars = {} if price is None else {"dollars": cost(found, price)}
    return Result(found.to_json() | dollars, format_plan(found, price))


def parse_tokens(text: str) -> int:
    """Return the number of 10B, 1.5T or 300_000_000."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)([KMBT]?)", text.upper())
    if not match or not (number := round(float(match[1]) * 1000 ** " KMBT".index(match[2] or " "))):
        raise UserError(f"tokens={text!r}: needs a number such as 10B, 500M or 300_000_000")
    return number


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
        topology: a TPU slice such as "v5e:4x4", which libtpu compiles for, or GPUs such as "h200:8", which JAX's CUDA
            plugin compiles for. None means this machine.
        say: receives a line of text for each attempt.

    Raises:
        UserError: nothing fits, the batch or the width is not divisible over the devices, or a compiler is missing.
    """
    devices = all_devices() if topology is None else topology_devices(topology)
    model = dataclasses.replace(experiment.model, vocab_size=vocab_size)
    given = dataclasses.replace(experiment, model=model)
    found: list[Plan] = []
    for number, variant in enumerate(iter_variants(given, len(devices), count_slices(devices))):
        p, micro = variant.parallel, variant.parallel.micro_batch_size
        layout = f"data={p.data} fsdp={p.fsdp} tensor={p.tensor}" + f" slices={p.slices}" * (p.slices > 1)
        description = f"remat {variant.model.remat}, {layout if p.strategy == 'mesh' else p.strategy}"
        while micro != 0:
            smaller = dataclasses.replace(variant, parallel=dataclasses.replace(p, micro_batch_size=micro))
            try:
                trainer = make_trainer(smaller, devices)
            except UserError as e:  # the width or the batch is not divisible over the devices
                if not number:
                    raise
                say(f"{description}: {e}")
                break
            micro = trainer.split.micro_batch_size
            try:
                fitting = compile_plan(smaller, trainer, topology)
            except DoesNotFit as e:
                available = format_gib(memory_of(devices[0]))
                say(f"{description}, micro-batch {micro}: needs {format_gib(e.args[0])} of {available}")
                micro //= 2
                continue
            if smaller == given:
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


def iter_variants(experiment: Experiment, devices: int, slices: int = 1) -> Iterator[Experiment]:
    """Yield the experiment with more recomputation, then with its state sharded over more devices of a slice."""
    given, model = experiment.parallel, experiment.model
    slices = max(slices, given.slices)  # only TPUs state theirs
    parallels = [given]
    if given.tensor == 1:
        least = max(given.fsdp if given.strategy == "mesh" else 1, 1) + 1
        largest = devices // slices
        mesh = dataclasses.replace(given, strategy="mesh", data=-1, slices=slices)
        sizes = [n for n in range(least, largest + 1) if largest % n == 0 and model.n_embd % n == 0]
        parallels += [dataclasses.replace(mesh, fsdp=n) for n in sizes]
    policies = ("none", "dots", "full")
    for parallel in parallels:
        for remat in policies[policies.index(model.remat) :]:
            yield dataclasses.replace(experiment, model=dataclasses.replace(model, remat=remat), parallel=parallel)


def compile_plan(experiment: Experiment, trainer: Trainer, topology: str | None) -> Plan:
    """Compile a training step for the trainer's devices and estimate its cost. Raises `DoesNotFit`."""
    state, available = bytes_per_device(trainer.abstract_state), memory_of(trainer.strategy.devices[0])
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
    found = executable.memory_analysis()
    assert found is not None, "the backend does not report memory"
    new = found.output_size_in_bytes - found.alias_size_in_bytes  # the new state replaces the old one
    return found.argument_size_in_bytes + new + found.temp_size_in_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTotal:
    """Total of the collectives of one kind and group size in one step."""

    kind: str
    devices: int  # in each group
    count: int
    bytes: float  # sum over the full buffers
    seconds: float | None  # at the full bandwidth of the links, None if unknown
    between_slices: bool = False  # over the data-center network. `devices` is then the number of slices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Cost of one training step on one device, read from the compiled program. None means unknown."""

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
    flops_per_token: float | None  # the model's: 6 per parameter and 12 L D T. None if it has modules of a user's own
    executed_flops_per_token: float  # the program's, recomputation included
    memory: int  # bytes on one device: state, batch and temporaries
    state_memory: int  # the part of `memory` for parameters and optimiser state
    available: int | None  # bytes
    fits: bool | None
    collectives: tuple[CollectiveTotal, ...]
    compute_seconds: float | None  # per step, at peak bfloat16 FLOP/s
    interconnect_seconds: float | None
    network_seconds: float | None  # per step, between slices
    network_bytes: float  # what each device sends to other slices, per step
    step_seconds: float | None  # the longest of the three that are known, a lower bound: the others may overlap with it
    bottleneck: str | None  # compute, interconnect or network
    tokens_per_second: float | None
    mfu: float | None  # upper bound: the model's FLOPs, masked scores included, over peak
    total_tokens: int  # tokens in the experiment
    hours: float | None  # for the experiment, a lower bound

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
    in bytes. None means unknown.
    """
    train, config, used = experiment.train, experiment.model, trainer.strategy.devices
    parameters, in_adapters = trainer.parameters
    tokens = train.batch_size * config.block_size
    flops_per_token = train_flops_per_token(config, parameters, in_adapters)
    flops = program.flops + program.custom_flops + splash_flops(experiment, trainer, program.silent_kernels)
    collectives = total_collectives(program.collectives, used)
    seconds: dict[str, float | None] = dict.fromkeys(("compute", "interconnect", "network"))
    if limits := PEAKS.get(used[0].device_kind):
        seconds |= {
            "compute": flops / limits.flops,
            "interconnect": _add([c.seconds for c in collectives if not c.between_slices], sum),
            "network": _add([c.seconds for c in collectives if c.between_slices], sum),
        }
    known = {name: n for name, n in seconds.items() if n is not None}
    step = max(known.values(), default=None)
    rate = tokens / step if step else None
    return Plan(
        experiment=experiment.name,
        topology=topology or "this machine",
        devices=len(used),
        device=used[0].device_kind,
        strategy=trainer.strategy.name,
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
        collectives=collectives,
        compute_seconds=seconds["compute"],
        interconnect_seconds=seconds["interconnect"],
        network_seconds=seconds["network"],
        # over a switch, at 1 byte/s
        network_bytes=sum(_seconds(c, 1.0, switched=True) for c in program.collectives if c.between_slices),
        step_seconds=step,
        bottleneck=max(known, key=known.__getitem__, default=None),
        tokens_per_second=rate,
        mfu=rate * flops_per_token / (limits.flops * len(used)) if rate and limits and flops_per_token else None,
        total_tokens=tokens * train.steps,
        hours=None if step is None else step * train.steps / 3600,
    )


def splash_flops(experiment: Experiment, trainer: Trainer, calls: int) -> float:
    """Return the FLOPs of `calls` calls of splash attention, which do not state them.

    A forward call has 2 products. A backward call has 5, since it recomputes the scores. Scores are computed in whole blocks.
    """
    config = experiment.model
    if trainer.options.attention != "splash" or config.dropout:
        return 0.0
    # One forward and one backward call per layer and micro-batch, and the forward calls that remat repeats.
    forward = calls - config.n_layer * trainer.split.grad_accum_steps
    if forward <= 0:
        return 0.0
    T, H = config.block_size, config.shape.head_dim
    windows = [config.window(layer) for layer in range(config.n_layer)]
    read = sum(min(window or T, T) * T for window in windows)
    share = sum(computed_scores(T, H, window) for window in windows) / read
    products = 2 * forward / (calls - forward) + 5
    tokens = experiment.train.batch_size * T / len(trainer.strategy.devices)
    return products * attention_flops(config) * tokens * share


def total_collectives(collectives: Sequence[Collective], devices: Sequence[jax.Device]) -> tuple[CollectiveTotal, ...]:
    """Add up the collectives of each kind and group size."""
    limits = PEAKS.get(devices[0].device_kind)
    groups: dict[tuple[bool, str, int], list[Collective]] = defaultdict(list)
    for c in collectives:
        groups[c.between_slices, c.kind, len(c.group)].append(c)
    totals = []
    for (between_slices, kind, n), members in sorted(groups.items()):
        switched = between_slices or (limits is not None and limits.torus == 0)
        rates = [ring_bandwidth(devices, c.group) for c in members]
        seconds = [rate and _seconds(c, rate, switched=switched) for c, rate in zip(members, rates, strict=True)]
        totals.append(
            CollectiveTotal(
                kind=kind,
                devices=n,
                count=sum(c.times for c in members),
                bytes=sum(c.bytes * c.times for c in members),
                seconds=_add(seconds, math.fsum),
                between_slices=between_slices,
            )
        )
    return tuple(totals)


def _seconds(c: Collective, bandwidth: float, *, switched: bool) -> float:
    return c.times * collective_seconds(c.kind, c.bytes, len(c.group), bandwidth, switched=switched)


def ring_bandwidth(devices: Sequence[jax.Device], group: Sequence[int]) -> float | None:
    """Return the bytes/s that each device of a group can send while all of them send, or None if unknown.

    `group` holds indices into `devices`, which are full slices. In a TPU's slice, each dimension in which the group
    extends adds one link, or two if the dimension is a ring that the group fills. On v5e and v6e, a dimension of 16
    chips is a ring. On v4 and v5p, every dimension is one if the slice consists of cubes of 4x4x4, which optical
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
    sizes, reached = ([len({d.coords[axis] for d in ds}) for axis in range(limits.torus)] for ds in (devices, members))
    cubes = limits.torus == 3 and all(size % 4 == 0 for size in sizes)
    closes = [cubes or (limits.torus == 2 and size == 16) for size in sizes]
    ways = zip(closes, sizes, reached, strict=True)
    links = sum(2 if ring and n == size else 1 for ring, size, n in ways if n > 1)
    return links * limits.link_bandwidth or None  # one device, or the cores of one chip: no links


def collective_seconds(kind: str, size: int, n: int, bandwidth: float, *, switched: bool = False) -> float:
    """Return the seconds that one collective over n devices takes if bandwidth, in bytes/s, is the only limit.

    Each device sends n - 1 of n parts. An all-reduce is a reduce-scatter and an all-gather
    (jax-ml.github.io/scaling-book/sharding). In an all-to-all, each half of the devices sends half of its data to the
    other. These n * size / 4 bytes cross one link of a line or two of a ring. On a torus of more dimensions this is an
    upper bound. Where devices are switched, as GPUs are, each reaches every other directly. A permutation is assumed to
    use all links, but between neighbours it uses one. Latency, about a microsecond per link, is left out.
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


def _add(values: Sequence[float | None], add: Callable[[Sequence[float]], float]) -> float | None:
    """Return the sum of the values, or what else `add` makes of them, or None if one of them is unknown."""
    known = [value for value in values if value is not None]
    return add(known) if len(known) == len(values) else None


def format_gib(n: float | None) -> str:
    """Return a number of bytes as text, in GiB."""
    return "unknown" if n is None else f"{n / 2**30:.2f} GiB"


def format_plan(p: Plan, price: float | None = None) -> str:
    """Return a plan as text: a verdict, then one fact per line. What is not known has no line.

    price: dollars per device and hour.
    """

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:,.1f} ms"

    batch = f"{p.tokens_per_step // p.accumulation:,} tokens each"
    of_model = "" if p.flops_per_token is None else f"{p.flops_per_token:.3g} of the model, "
    rows = [
        ("experiment", f"{p.experiment} on {p.topology}: {p.devices} x {p.device}, {p.compute}"),
        ("strategy", f"{p.strategy}, remat {p.remat}, micro-batch {p.micro_batch_size} x {p.accumulation}, {batch}"),
        ("parameters", f"{p.parameters:,}, {format_gib(p.state_memory)} of state per device"),
        ("FLOPs per token", f"{of_model}{p.executed_flops_per_token:.3g} executed"),
    ]
    for c in p.collectives:
        text = f"{c.count} x {c.kind} over {c.devices}: {c.bytes / 1e6:,.1f} MB"
        text += "" if c.seconds is None else f", {ms(c.seconds)}"
        rows.append(("between slices" if c.between_slices else "collectives", text))
    times = {"compute": p.compute_seconds, "interconnect": p.interconnect_seconds}
    times |= {"network": p.network_seconds if p.network_bytes else None}
    sent = {"network": f", {p.network_bytes / 1e6:,.1f} MB sent to other slices by each device"}
    rows += [(name, ms(time) + sent.get(name, "")) for name, time in times.items() if time is not None]
    of_available = f" of {format_gib(p.available)}" if p.fits else ""
    verdict = f"{'fits' if p.fits else 'may fit'}: {format_gib(p.memory)}{of_available} per device"
    run = f"{p.total_tokens:,} tokens"
    if p.step_seconds and p.tokens_per_second and p.hours is not None:
        rows += [
            ("assumed", "full rates of the data sheets; the longest time hides the others; nothing between steps"),
            ("step", f"at least {ms(p.step_seconds)}: {p.bottleneck}-bound"),
            ("tokens per second", f"at most {p.tokens_per_second:,.0f}"),
        ]
        if p.mfu:
            skips = " (it counts masked scores, which the kernel skips)" if p.mfu > 1.0 else ""
            rows.append(("MFU", f"at most {p.mfu:.1%}{skips}"))
            verdict += f"; at most {p.mfu:.0%} MFU"
        least = f"at least {p.hours / 24:,.1f} days" if p.hours >= 48 else f"at least {p.hours:,.1f} hours"
        if price is not None:
            least += f" and {cost(p, price):,.0f} dollars at {price:g} dollars per device-hour"
        verdict, run = f"{verdict}; {least}", f"{run} in {least}"
    else:
        verdict += f"; its speed is unknown: no rates of {p.device} are on record"
    rows.append(("full run", run))
    width = max(len(name) for name, _ in rows)
    return "\n".join([verdict, *(f"{name:<{width}}  {value}" for name, value in rows)])


def cost(p: Plan, price: float) -> float | None:
    """Return the least dollars of the experiment, at a price per device and hour, or None if unknown."""
    return None if p.hours is None else p.hours * p.devices * price
