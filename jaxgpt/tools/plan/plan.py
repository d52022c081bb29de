"""Will it run, and how fast? The real training step, compiled ahead of time and read: for this machine or a TPU slice."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxgpt.config import Experiment, GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.layers.kernels.splash import computed_scores
from jaxgpt.parallel.device import all_devices, bytes_held, memory_of
from jaxgpt.parallel.flops import attention_flops, train_flops_per_token
from jaxgpt.parallel.peaks import collective_seconds, peaks, ring_bandwidth
from jaxgpt.parallel.strategy import split_batch
from jaxgpt.parallel.trainer import Trainer, make_trainer
from jaxgpt.tools.plan.hlo import Collective, Program, read_hlo
from jaxgpt.tools.plan.topology import tpu_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """All collectives of one kind and group size in one step."""

    kind: str
    devices: int  # in each group
    count: int
    bytes: float  # of the full buffers, all together
    seconds: float | None  # at the links' full speed; None: unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One training step on one device, as the compiler sees it. What is unknown is None, never a guess."""

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
    flops_per_token: float  # of the model: 6 per weight and 12 L D T
    executed_flops_per_token: float  # what the program does, recomputation included
    memory: int  # bytes on one device: state, batch and temporaries
    state_memory: int  # of them, parameters and optimiser state
    available: int | None  # bytes
    fits: bool | None
    exchanges: tuple[Exchange, ...]
    compute_seconds: float | None  # per step, at peak bfloat16 FLOP/s
    memory_seconds: float | None  # per step, every operand and result of a fusion read or written once
    interconnect_seconds: float | None
    step_seconds: float | None  # the longest of the three: a bound from below, all else hidden behind it
    binds: str | None  # compute, memory or interconnect
    tokens_per_second: float | None
    mfu: float | None  # the model's FLOPs, which have the scores that the mask hides, over peak
    total_tokens: int  # of the experiment
    hours: float | None


class DoesNotFit(Exception):
    """The compiler found too little memory: `needed` bytes, where it says so."""

    def __init__(self, needed: int | None):
        super().__init__(needed)
        self.needed = needed


def plan(
    experiment: Experiment,
    vocab_size: int,
    *,
    topology: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compile an experiment's training step and read off what it takes.

    topology: a TPU slice such as "v5e:4x4", compiled for by libtpu; None: this machine. say: told of each attempt.
    If it does not fit, smaller micro-batches, more recomputation and sharded state are tried, in this order, and the
    fastest that fits is returned. Raises `UserError` if nothing fits, or for what does not divide.
    """
    devices = all_devices() if topology is None else tpu_devices(topology)
    model = dataclasses.replace(experiment.model, vocab_size=vocab_size)
    experiment = dataclasses.replace(experiment, model=model)
    found: list[Plan] = []
    for number, variant in enumerate(_variants(experiment, len(devices))):
        told = f"remat {variant.model.remat}, {_strategy(variant)}"
        try:
            attempts = list(_smaller(variant, devices))
        except UserError as e:  # a width, or a batch, that does not divide over so many
            if not number:
                raise
            say(f"{told}: {e}")
            continue
        for smaller in attempts:
            micro = smaller.parallel.micro_batch_size
            try:
                fitting = _compiled(smaller, devices, topology)
            except DoesNotFit as e:
                say(f"{told}, micro-batch {micro}: needs {_gib(e.needed)} of {_gib(memory_of(devices[0]))}")
                continue
            if not number and smaller is attempts[0]:  # as it is
                return fitting
            say(f"{told}, micro-batch {micro}: fits")
            found.append(fitting)
            break
        if found and variant.model.remat == "full":  # all three remat policies of one sharding have been compared
            break
    if not found:
        raise UserError(
            f"{experiment.name} does not fit on {len(devices)} x {devices[0].device_kind}, whatever the micro-batch, "
            "remat and fsdp: take more devices, or a smaller model"
        )
    return min(found, key=lambda p: p.step_seconds or 0.0)


def _variants(experiment: Experiment, devices: int) -> Iterator[Experiment]:
    """The same experiment with more recomputation, then with its state over ever more devices."""
    parallels = [experiment.parallel]
    if experiment.parallel.tensor == 1:
        width = experiment.model.n_embd
        sizes = [n for n in range(2, devices + 1) if devices % n == 0 and width % n == 0]
        current = experiment.parallel.fsdp if experiment.parallel.strategy == "mesh" else 1
        parallels += [
            dataclasses.replace(experiment.parallel, strategy="mesh", data=-1, fsdp=n, tensor=1)
            for n in sizes
            if n > current
        ]
    policies = ("none", "dots", "full")
    for parallel in parallels:
        for remat in policies[policies.index(experiment.model.remat) :]:
            model = dataclasses.replace(experiment.model, remat=remat)
            yield dataclasses.replace(experiment, model=model, parallel=parallel)


def _smaller(experiment: Experiment, devices: list[jax.Device]) -> Iterator[Experiment]:
    """With the micro-batches that the configuration gives, then with halves of them, down to one sequence."""
    split = make_trainer(experiment, devices).split
    while True:
        parallel = dataclasses.replace(experiment.parallel, micro_batch_size=split.micro_batch_size)
        yield dataclasses.replace(experiment, parallel=parallel)
        if split.micro_batch_size == 1:
            return
        half = dataclasses.replace(parallel, micro_batch_size=split.micro_batch_size // 2)
        split = split_batch(experiment.train.batch_size, split.data_parallel_size, half)


def _strategy(experiment: Experiment) -> str:
    p = experiment.parallel
    return p.strategy if p.strategy != "mesh" else f"data={p.data} fsdp={p.fsdp} tensor={p.tensor}"


def _compiled(experiment: Experiment, devices: list[jax.Device], topology: str | None) -> Plan:
    trainer = make_trainer(experiment, devices)
    lowered = trainer.lower()
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        used = re.search(r"Used ([\d.]+)([KMG]) of", str(e))
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}
        raise DoesNotFit(int(float(used[1]) * scale[used[2]]) if used else None) from None

    memory = memory_of_program(executable)
    available = memory_of(devices[0])
    if available is not None and memory > available:
        raise DoesNotFit(memory)
    return _read(experiment, topology, trainer, memory, available, read_hlo(executable.as_text()))


def memory_of_program(executable: Any) -> int:
    """Bytes on one device that a compiled program's arguments, results and temporaries take at its peak."""
    analysis = executable.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes  # the new state lies where the old one was
        + analysis.temp_size_in_bytes
    )


def _read(
    experiment: Experiment,
    topology: str | None,
    trainer: Trainer,
    memory: int,
    available: int | None,
    program: Program,
) -> Plan:
    train, config, strategy = experiment.train, experiment.model, trainer.strategy
    used = strategy.devices
    parameters, in_adapters = trainer.parameters
    tokens = train.batch_size * config.block_size
    flops_per_token = train_flops_per_token(config, parameters, in_adapters)
    flops = program.flops + program.custom_flops + _kernel_flops(trainer, config, tokens / len(used), program)
    limits = peaks(used[0].device_kind)
    exchanges = _exchanges(program.collectives, used)
    seconds: dict[str, float | None] = {"compute": None, "memory": None, "interconnect": None}
    if limits is not None:
        seconds["compute"] = flops / limits.flops
        seconds["memory"] = program.bytes_accessed / limits.memory_bandwidth
        known = [e.seconds for e in exchanges if e.seconds is not None]
        seconds["interconnect"] = sum(known) if len(known) == len(exchanges) else None
    known_seconds = {name: s for name, s in seconds.items() if s is not None}
    binds = max(known_seconds, key=lambda name: known_seconds[name]) if len(known_seconds) == 3 else None
    step = known_seconds[binds] if binds else None
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
        state_memory=bytes_held(trainer.abstract_state),
        available=available,
        fits=None if available is None else True,
        exchanges=exchanges,
        compute_seconds=seconds["compute"],
        memory_seconds=seconds["memory"],
        interconnect_seconds=seconds["interconnect"],
        step_seconds=step,
        binds=binds,
        tokens_per_second=rate,
        mfu=None if rate is None or limits is None else rate * flops_per_token / (limits.flops * len(used)),
        total_tokens=tokens * train.steps,
        hours=None if step is None else step * train.steps / 3600,
    )


def _kernel_flops(trainer: Trainer, config: GPTConfig, tokens: float, program: Program) -> float:
    """Of attention kernels, which do not say what they compute: 2 products forward, 5 backward with the scores anew.

    Splash attention computes whole blocks of scores; others are taken to compute the half that the mask leaves.
    """
    attention = trainer.options.attention
    if attention in ("plain", "xla") or config.dropout or program.custom_flops:
        return 0.0
    calls = sum(times for target, times in program.custom_calls if target == "tpu_custom_call" or "fmha" in target)
    # One forward and one backward for each layer and micro-batch, and those that remat runs anew.
    forward = calls - config.n_layer * trainer.split.grad_accum_steps
    if forward <= 0:
        return 0.0
    share = 0.5
    if attention == "splash":
        T, H = config.block_size, config.head_size
        windows = [config.window(layer) for layer in range(config.n_layer)]
        read = sum(min(window or T, T) * T for window in windows)
        share = sum(computed_scores(T, H, window) for window in windows) / read
    products = 2 * forward / (calls - forward) + 5
    return products * attention_flops(config) * tokens * share


def _exchanges(collectives: tuple[Collective, ...], devices: Sequence[jax.Device]) -> tuple[Exchange, ...]:
    gathered: dict[tuple[str, int], list[tuple[Collective, float | None]]] = defaultdict(list)
    for c in collectives:
        bandwidth = ring_bandwidth(devices, c.group)
        limits = peaks(devices[0].device_kind)
        switched = limits is not None and limits.torus == 0
        n = len(c.group)
        one = None if bandwidth is None else collective_seconds(c.kind, c.bytes, n, bandwidth, switched=switched)
        gathered[c.kind, n].append((c, None if one is None else one * c.times))
    found = []
    for (kind, n), members in sorted(gathered.items()):
        seconds = [s for _, s in members]
        found.append(
            Exchange(
                kind=kind,
                devices=n,
                count=sum(c.times for c, _ in members),
                bytes=sum(c.bytes * c.times for c, _ in members),
                seconds=None if None in seconds else math.fsum(s for s in seconds if s is not None),
            )
        )
    return tuple(found)


def _gib(n: float | None) -> str:
    return "unknown" if n is None else f"{n / 2**30:.2f} GiB"


def table(p: Plan) -> str:
    """A plan as text, one line a fact."""

    def ms(seconds: float | None) -> str:
        return "unknown" if seconds is None else f"{seconds * 1e3:,.1f} ms"

    def number(x: float | None, unit: str = "") -> str:
        return "unknown" if x is None else f"{x:,.0f}{unit}"

    fits = {True: "fits", None: "unknown whether it fits"}[p.fits]
    batch = f"{p.tokens_per_step // p.accumulation:,} tokens at once"
    skips = " (it counts scores that the mask hides, and the kernel skips)" if (p.mfu or 0.0) > 1.0 else ""
    rows = [
        ("experiment", f"{p.experiment} on {p.topology}: {p.devices} x {p.device}, {p.compute}"),
        ("strategy", f"{p.strategy}, remat {p.remat}, micro-batch {p.micro_batch_size} x {p.accumulation}, {batch}"),
        ("parameters", f"{p.parameters:,}"),
        (
            "FLOPs per token",
            f"{p.flops_per_token:.3g} of the model, {p.executed_flops_per_token:.3g} executed",
        ),
        ("memory per device", f"{_gib(p.memory)} of {_gib(p.available)}, {_gib(p.state_memory)} of it state: {fits}"),
        *(
            ("exchanges", f"{e.count} x {e.kind} over {e.devices}: {e.bytes / 1e6:,.1f} MB, {ms(e.seconds)}")
            for e in p.exchanges
        ),
        ("compute", ms(p.compute_seconds)),
        ("memory traffic", ms(p.memory_seconds)),
        ("interconnect", ms(p.interconnect_seconds)),
        ("a step, at least", ms(p.step_seconds) + (f": {p.binds} binds" if p.binds else "")),
        ("tokens per second", number(p.tokens_per_second)),
        ("MFU, at most", "unknown" if p.mfu is None else f"{p.mfu:.1%}" + skips),
        ("the experiment", f"{p.total_tokens:,} tokens in {'unknown' if p.hours is None else f'{p.hours:,.1f}'} hours"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
