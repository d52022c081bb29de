"""Plan a training run: compile its step for this machine, a TPU slice or GPUs, and find a configuration that fits.

Memory and collectives are read from the compiled program. FLOPs follow from the shape of the model.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator

import jax

from jaxgpt.config.validate import PositiveFloat
from jaxgpt.config.words import replace_fields
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import Result
from jaxgpt.parallel.jax_setup import all_devices, configure_jax
from jaxgpt.parallel.limits import PEAKS, attention_flops, bytes_per_device, memory_of, train_flops_per_token
from jaxgpt.parallel.mesh import count_slices
from jaxgpt.parallel.trainer import Trainer, make_trainer
from jaxgpt.runs.pretrained import resolve_init_from
from jaxgpt.tools.plan.collectives import Collective, read_collectives
from jaxgpt.tools.plan.topology import INSTALL, topology_devices


class DoesNotFit(Exception):
    """The step needs more memory than a device has. The argument is how much, as text."""


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
    values = dataclasses.asdict(found)
    if price is not None:
        values["dollars"] = None if found.hours is None else found.hours * found.devices * price
    return Result(values, format_plan(found, price))


def parse_tokens(text: str) -> int:
    """Return the number of 10B, 1.5T or 300_000_000."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)([KMBT]?)", text.upper())
    if not match or not (number := round(float(match[1]) * 1000 ** " KMBT".index(match[2] or " "))):
        raise UserError(f"tokens={text!r}: needs a number such as 10B, 500M or 300_000_000")
    return number


def make_plan(
    experiment: Experiment,
    vocab_size: int,
    *,
    topology: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compile an experiment's training step and estimate its memory and speed.

    If it does not fit, smaller micro-batches, more recomputation and sharded state are tried, in this order. The first
    plan that fits is returned.

    Args:
        experiment: the experiment. The size of its vocabulary is replaced.
        topology: a TPU slice such as "v5e:4x4", which libtpu compiles for, or GPUs such as "h200:8", which JAX's CUDA
            plugin compiles for. None means this machine.
        say: receives a line of text for each attempt.

    Raises:
        UserError: nothing fits, the batch or the width is not divisible over the devices, or a compiler is missing.
    """
    devices = all_devices() if topology is None else topology_devices(topology)
    given = replace_fields(experiment, {"model.vocab_size": vocab_size})
    for variant in iter_variants(given, len(devices), count_slices(devices)):
        p, micro = variant.parallel, variant.parallel.micro_batch_size
        tried = f"remat {variant.model.remat}, {p.strategy}, fsdp={p.fsdp}"
        while micro != 0:
            smaller = replace_fields(variant, {"parallel.micro_batch_size": micro})
            try:
                trainer = make_trainer(smaller, devices)
                micro = trainer.split.micro_batch_size
                return compile_plan(smaller, trainer, topology)
            except DoesNotFit as e:
                say(f"{tried}, micro-batch {micro}: needs {e} of {format_gib(memory_of(devices[0]))}")
                assert micro is not None
                micro //= 2
            except UserError as e:  # the width or the batch is not divisible over the devices
                if smaller == given:
                    raise
                say(f"{tried}: {e}")
                break
            except RuntimeError as e:  # NotImplementedError is one, too
                # JAX asks the libraries and the GPU of this machine, not the devices that it compiles for. Without
                # cuDNN it lowers no attention. Without a GPU it lowers only heads of up to 128.
                said = str(e).partition("\n")[0]
                if "cuDNN" not in said and "head dim must be" not in said:
                    raise
                raise UserError(f"no cuDNN here ({said}): take --train.attention plain, or {INSTALL}") from None
    used = f"{len(devices)} x {devices[0].device_kind}, whatever the micro-batch, remat and fsdp"
    raise UserError(f"{experiment.name} does not fit on {used}: use more devices or a smaller model")


def iter_variants(experiment: Experiment, devices: int, slices: int = 1) -> Iterator[Experiment]:
    """Yield the experiment with more recomputation, then with its state sharded over more devices of a slice."""
    p, width = experiment.parallel, experiment.model.n_embd
    slices = max(slices, p.slices)  # only TPUs state theirs
    parallels = [p]
    for fsdp in range(max(p.fsdp, 1) + 1, devices // slices + 1):
        if p.tensor == 1 and (devices // slices) % fsdp == 0 and width % fsdp == 0:
            parallels.append(dataclasses.replace(p, strategy="mesh", data=-1, fsdp=fsdp, slices=slices))
    policies = ("none", "dots", "full")
    for parallel in parallels:
        for remat in policies[policies.index(experiment.model.remat) :]:
            yield replace_fields(experiment, {"model.remat": remat, "parallel": parallel})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Cost of one training step on one device. None means unknown."""

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
    flops_per_token: float | None  # 6 per parameter and 12 L D T. None for a user's modules
    executed_flops_per_token: float | None  # a lower bound: without masked scores, and without recomputation
    memory: int  # bytes on one device: state, batch and temporaries
    state_memory: int  # the part of `memory` for parameters and optimiser state
    available: int | None  # bytes
    fits: bool | None
    exchanges: tuple[Collective, ...]  # sums of each kind and group size
    step_seconds: float | None  # a lower bound: the executed FLOPs at the device's full rate
    tokens_per_second: float | None
    total_tokens: int  # tokens in the experiment
    hours: float | None  # for the experiment, a lower bound


def compile_plan(experiment: Experiment, trainer: Trainer, topology: str | None) -> Plan:
    """Compile a training step for the trainer's devices and estimate its cost. Raises `DoesNotFit`.

    topology=None means this machine.
    """
    train, config, used = experiment.train, experiment.model, trainer.strategy.devices
    state, available = bytes_per_device(trainer.abstract_state), memory_of(used[0])
    if available is not None and state > available:
        raise DoesNotFit(format_gib(state))
    try:
        executable = trainer.lower().compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        size = re.search(r"Used ([\d.]+)([KMG]) of", str(e))
        raise DoesNotFit(f"{size[1]} {size[2]}iB" if size else "unknown") from None
    memory = memory_of_program(executable)
    if available is not None and memory > available:
        raise DoesNotFit(format_gib(memory))

    parameters, in_adapters = trainer.parameters
    tokens = train.batch_size * config.block_size
    flops_per_token = train_flops_per_token(config, parameters, in_adapters)
    if flops_per_token is None:  # XLA counts the body of a loop once. It says nothing about an absent GPU
        of_program = (executable.cost_analysis() or {}).get("flops")
        executed = None if of_program is None else of_program * len(used) / tokens
    else:  # a mask hides at most half of the scores
        executed = flops_per_token - 3.0 * attention_flops(config)
    limits, step = PEAKS.get(used[0].device_kind), None
    if limits is not None and executed is not None:
        step = executed * tokens / len(used) / limits.flops
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
        executed_flops_per_token=executed,
        memory=memory,
        state_memory=state,
        available=available,
        fits=None if available is None else True,
        exchanges=read_collectives(executable.as_text() or ""),
        step_seconds=step,
        tokens_per_second=None if step is None else tokens / step,
        total_tokens=tokens * train.steps,
        hours=None if step is None else step * train.steps / 3600,
    )


def memory_of_program(executable: jax.stages.Compiled) -> int:
    """Return the peak bytes of a program on one device: arguments, results and temporaries."""
    found = executable.memory_analysis()
    assert found is not None, "the backend does not report memory"
    new = found.output_size_in_bytes - found.alias_size_in_bytes  # the new state replaces the old one
    return found.argument_size_in_bytes + new + found.temp_size_in_bytes


def format_gib(n: float | None) -> str:
    """Return a number of bytes as text, in GiB."""
    return "unknown" if n is None else f"{n / 2**30:.2f} GiB"


def format_plan(p: Plan, price: float | None = None) -> str:
    """Return a plan as text: a verdict, then one fact per line. What is not known has no line.

    price: dollars per device and hour.
    """
    micro = f"micro-batch {p.micro_batch_size} x {p.accumulation}"
    rows = [
        ("experiment", f"{p.experiment} on {p.topology}: {p.devices} x {p.device}, {p.compute}"),
        ("strategy", f"{p.strategy}, remat {p.remat}, {micro}, {p.tokens_per_step // p.accumulation:,} tokens each"),
        ("parameters", f"{p.parameters:,}, {format_gib(p.state_memory)} of state per device"),
    ]
    if p.flops_per_token is not None:
        rows.append(("FLOPs per token", f"{p.flops_per_token:.3g}, at least {p.executed_flops_per_token:.3g} executed"))
    for c in p.exchanges:
        name = "between slices" if c.between_slices else "collectives"
        rows.append((name, f"{c.count} x {c.kind} over {c.devices}: {c.bytes / 1e6:,.1f} MB"))
    if p.available is None:
        verdict = f"may fit: {format_gib(p.memory)} per device"
    else:
        verdict = f"fits: {format_gib(p.memory)} of {format_gib(p.available)} per device"
    run = f"{p.total_tokens:,} tokens"
    if p.step_seconds is None or p.hours is None:
        verdict += f"; its speed is unknown: no rates of {p.device} are on record"
    else:
        rows += [
            ("assumed", "products at the full rate of the data sheet hide everything else; nothing between steps"),
            ("by group", "python experiments/benchmarks/traffic.py, from a clone, with the same arguments"),
            ("step", f"at least {p.step_seconds * 1e3:,.1f} ms"),
            ("tokens per second", f"at most {p.tokens_per_second:,.0f}"),
        ]
        least = f"at least {p.hours / 24:,.1f} days" if p.hours >= 48 else f"at least {p.hours:,.1f} hours"
        if price is not None:
            least += f" and {p.hours * p.devices * price:,.0f} dollars at {price:g} dollars per device-hour"
        verdict += f"; {least}"
        run += f" in {least}"
    rows.append(("full run", run))
    width = max(len(name) for name, _ in rows)
    return "\n".join([verdict, *(f"{name:<{width}}  {value}" for name, value in rows)])
