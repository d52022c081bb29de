"""Count FLOPs, memory traffic and collectives of a compiled program on one device, from its HLO text.

XLA's `cost_analysis()` counts the body of a loop once and omits collectives; here it counts as often as it runs.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from jaxgpt.tools.plan.arithmetic import count_attention_flops, count_flops
from jaxgpt.tools.plan.hlo import COLLECTIVES, Execution, Instruction, Module, parse_hlo
from jaxgpt.tools.plan.schedule import instructions_between
from jaxgpt.tools.plan.traffic import BOOKKEEPING, count_traffic

# Kernels of libraries and of code generators, by a pattern in the instruction; loops that XLA generates are not listed.
_KERNELS = {
    "cuDNN attention forward": r'"__cudnn\$fmha(?!\w*Backward)',
    "cuDNN attention backward": r'"__cudnn\$fmha\w*Backward"',
    "cuBLAS product": r'"__cublas\$',
    "cuDNN fusion": r'"kind": ?"__cudnn\$fusion"',
    "Triton product": r'"kind": ?"__triton_\w*gemm',
    "Triton fusion": r'"kind": ?"__triton"',
    "Pallas": r'custom_call_target="(tpu_custom_call|__gpu\$xla\.gpu\.triton|mosaic_gpu\w*)"',
}

# Types of the transfers between TPU slices, which go through their hosts. The compiler splits a collective over devices
# of several slices into collectives in each slice and one transfer between them, of which each device sends a part.
_TRANSFERS = {name.upper().replace("-", "_"): name for name in COLLECTIVES} | {"ONE_TO_ONE": "collective-permute"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Cost of instructions on one device."""

    flops: float = 0.0  # of matrix products, convolutions and cuDNN's attention; of [M, K] times [K, N], 2 M N K
    bytes_accessed: float = 0.0  # read from and written to main memory; a TPU's VMEM does not count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation; the start and the end of an asynchronous one count as one."""

    kind: str  # one of COLLECTIVES
    shapes: tuple[str, ...]  # full buffers, such as "f32[768,3072]": output of an all-gather, else the operands
    bytes: int  # of `shapes`, per execution
    # the first group, as positions of devices, slice after slice; the first pair of a permutation
    group: tuple[int, ...]
    times: int  # executions per run of the program: the product of the trip counts around it
    meanwhile: Work | None = None  # what runs between its start and its end, per execution. None: not asynchronous
    between_slices: bool = False  # over the data-center network, instead of the links of a slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Cost of one run of a program on one device."""

    collectives: tuple[Collective, ...]
    flops: float  # as in Work
    bytes_accessed: float
    launches: tuple[tuple[int, Work], ...]  # (times, cost of one) of each instruction of the schedule
    custom_calls: tuple[tuple[str, int], ...]  # (target, times); tpu_custom_call is a Pallas kernel
    custom_flops: float  # of custom calls that state them (Pallas's cost_estimate)
    silent_kernels: int  # calls of Pallas kernels on a TPU that do not state their FLOPs
    kernels: dict[str, int]  # launches, by the names in `_KERNELS`


def read_program(text: str) -> Program:
    """Count the cost of one run from `compiled.as_text()`. All branches of a conditional count: an upper bound."""
    module = parse_hlo(text)
    executions = list(module.executed())
    custom_calls, custom_flops, silent_kernels = [], 0.0, 0
    kernels: Counter[str] = Counter()
    for e in executions:
        x = e.instruction
        if x.op == "custom-call" and (target := x.attribute(r'custom_call_target="([^"]*)"')) not in BOOKKEEPING:
            custom_calls.append((target, e.times))
            stated = x.attribute(r'"cost_estimate":\{"flops":"(\d+)"')
            custom_flops += e.times * float(stated or 0)
            silent_kernels += e.times if target == "tpu_custom_call" and not stated else 0
        if x.op in ("custom-call", "fusion") and not e.is_fused and (kernel := _kernel_name(x)):
            kernels[kernel] += e.times
    launches = tuple(_iter_launches(module, executions))
    work = _add_work(launches)
    return Program(
        collectives=tuple(_iter_collectives(module, executions)),
        flops=work.flops,
        bytes_accessed=work.bytes_accessed,
        launches=launches,
        custom_calls=tuple(custom_calls),
        custom_flops=custom_flops,
        silent_kernels=silent_kernels,
        kernels={name: kernels[name] for name in _KERNELS if kernels[name]},
    )


def _kernel_name(x: Instruction) -> str | None:
    return next((name for name, pattern in _KERNELS.items() if re.search(pattern, x.text)), None)


def _iter_launches(module: Module, executions: Iterable[Execution]) -> Iterator[tuple[int, Work]]:
    """Yield how often each instruction of a schedule runs, and its cost, with that of what is fused into it."""
    times, flops, accessed = 0, 0.0, 0.0
    for e in executions:
        if not e.is_fused:
            yield times, Work(flops=flops, bytes_accessed=accessed)
            times, flops, accessed = e.times, 0.0, count_traffic(module, e.computation, e.instruction)
        flops += count_flops(e.computation, e.instruction) + count_attention_flops(e.instruction)
    yield times, Work(flops=flops, bytes_accessed=accessed)


def _add_work(launches: Iterable[tuple[int, Work]]) -> Work:
    work = [(times * w.flops, times * w.bytes_accessed) for times, w in launches]
    return Work(flops=sum(flops for flops, _ in work), bytes_accessed=sum(accessed for _, accessed in work))


def _iter_collectives(module: Module, executions: Iterable[Execution]) -> Iterator[Collective]:
    seen = set()
    for e in executions:
        x = e.instruction
        transfer = x.attribute(r'_megascale_transfer_type="(\w+)"') if x.op == "send" else None
        if x.kind not in COLLECTIVES and not transfer:
            continue
        computation, start = e.launch or (e.computation, x)
        # A TPU splits a collective over several fusions, to overlap it with compute; they share the channel.
        part = id(computation), x.attribute(r"channel_id=(\d+)")
        read = _read_transfer if transfer else _read_collective
        collective = read(e, module.devices)
        # An axis of size 1 in the mesh leaves collectives over one device, which send nothing.
        if len(collective.group) == 1 or (e.is_fused and part in seen):
            continue
        if e.is_fused and part[1]:
            seen.add(part)
        between = instructions_between(module, computation, start)
        if between is not None:
            run = (Execution(computation=computation, name="", instruction=y, times=1) for y in between)
            inner = (e for outer in run for e in module.executed_by(outer))
            work = _add_work(_iter_launches(module, inner))
            collective = dataclasses.replace(collective, meanwhile=work)
        yield collective


def _read_collective(e: Execution, devices: int) -> Collective:
    x = e.instruction
    arrays = [a for operand in x.operands for a in e.computation[operand].arrays]
    if x.kind == "all-gather":  # all-gather-start returns its operands before its results
        arrays = x.arrays[len(arrays) if x.is_start else 0 :]
    return Collective(
        # A TPU fuses an all-reduce with the slice that each device keeps; on the links it is a reduce-scatter.
        kind="reduce-scatter" if "all-reduce-scatter" in e.name else x.kind,
        shapes=tuple(f"{a.dtype}[{','.join(map(str, a.dims))}]" for a in arrays),
        bytes=sum(a.bytes for a in arrays),
        group=_group(x.text, devices),
        times=e.times,
    )


def _read_transfer(e: Execution, devices: int) -> Collective:
    """Read a transfer between slices, whose targets are {1,2}x{0:15} or the ids {{100000,200000}}.

    devices: the number of devices in a slice.
    """
    x = e.instruction
    kind = _TRANSFERS[x.attribute(r'_megascale_transfer_type="(\w+)"')]
    ids = re.split(",|->", x.attribute(r'_megascale_target="?\{+([\d,]+|\d+->\d+)\}'))
    slices = [(int(n) // 100_000 or int(n)) - 1 for n in ids]  # slices count from 1; each begins another 100,000 ids
    part = x.arrays[0]
    return Collective(
        kind=kind,
        shapes=(f"{part.dtype}[{','.join(map(str, part.dims))}]",),
        bytes=part.bytes * (len(slices) if kind == "all-gather" else 1),
        group=tuple(n * devices for n in slices),
        times=e.times,
        between_slices=True,
    )


def _group(text: str, devices: int) -> tuple[int, ...]:
    """Return the first group of {{0,1},{2,3}}, [4,2]<=[2,4]T(1,0) or mesh['a'=2,'b'=4] {'a'}, all devices if absent."""
    if explicit := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", text):
        return tuple(map(int, explicit[1].split(",")))
    if iota := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return tuple(_ids(iota[1])[0].tolist())
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:,? *device_ids=\(([^ ]*)\))? *\{([^}]*)\}", text):
        varying = {name: (before, size) for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[3])}
        shape, index = [], []
        for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1]):
            before, part = (int(n or d) for n, d in zip(varying.get(name, (1, 1)), (1, size), strict=True))
            shape += [before, part, int(size) // before // part]  # 'a':(2)4 has size 4 after a factor of 2
            index += [0, slice(None), 0]
        ids = np.arange(math.prod(shape)) if not mesh[2] else _ids(mesh[2])
        return tuple(ids.reshape(shape)[tuple(index)].ravel().tolist())
    return tuple(range(devices))


def _ids(text: str) -> np.ndarray:
    """Return the device ids of [4,2]<=[2,4]T(1,0) or [2,4]T(1,0), an iota transposed and reshaped, or of a list."""
    match = re.fullmatch(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not match:
        return np.array(text.split(","), int)
    shape, source, axes = ([int(n) for n in (part or "").split(",") if n] for part in match.groups())
    ids = np.arange(math.prod(source)).reshape(source).transpose(axes or None)
    return ids.reshape(shape or -1)
