"""Count FLOPs, memory traffic and collectives of a compiled program on one device, from its HLO text.

XLA's `cost_analysis()` counts the body of a loop once and omits collectives; here it counts as often as it runs.
"""

import dataclasses
import math
import re

import numpy as np

from jaxgpt.tools.plan.hlo import (
    COLLECTIVES,
    VIEWS,
    Computation,
    Instruction,
    Module,
    find_parameter,
    find_root,
    parse_hlo,
)

FREE = {  # no traffic of their own; what they call is counted separately
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier"),
    *("partition-id", "replica-id", "while", "conditional", "call", "async-start"),
}
# Custom calls that compute nothing.
BOOKKEEPING = {"AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone"}
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that is written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation; the start and the end of an asynchronous one count as one."""

    kind: str  # one of COLLECTIVES
    shapes: tuple[str, ...]  # full buffers, such as "f32[768,3072]": output of an all-gather, else the operands
    bytes: int  # of `shapes`, per execution
    group: tuple[int, ...]  # the first group, as positions of devices; the first pair of a permutation
    times: int  # executions per run of the program: the product of the trip counts around it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Cost of one run of a program on one device."""

    collectives: tuple[Collective, ...]
    flops: float  # of matrix products and convolutions; a product of [M, K] and [K, N] is 2 M N K
    bytes_accessed: float  # read from and written to main memory; a TPU's VMEM does not count
    custom_calls: tuple[tuple[str, int], ...]  # (target, times); tpu_custom_call is a Pallas kernel
    custom_flops: float  # of custom calls that state them (Pallas's cost_estimate); others are unknown


def read_program(text: str) -> Program:
    """Count the cost of one run from `compiled.as_text()`. All branches of a conditional count: an upper bound."""
    module = parse_hlo(text)
    collectives, custom_calls = [], []
    flops = custom_flops = bytes_accessed = 0.0
    seen = set()
    for name, x, times, launcher in module.executed():
        computation = module.computations[name]
        if x.kind in COLLECTIVES:
            channel = x.attribute(r"channel_id=(\d+)")
            # A TPU splits a collective over several fusions, to overlap it with compute; they share the channel.
            is_part = launcher is not None and channel and (launcher, channel) in seen
            collective = _collective(computation, name, x, times, module.devices)
            # An axis of size 1 in the mesh leaves collectives over one device, which send nothing.
            if len(collective.group) > 1 and not is_part:
                seen.add((launcher, channel))
                collectives.append(collective)
        elif x.op == "custom-call" and (target := x.attribute(r'custom_call_target="([^"]*)"')) not in BOOKKEEPING:
            custom_calls.append((target, times))
            custom_flops += times * float(x.attribute(r'"cost_estimate":\{"flops":"(\d+)"') or 0)
        flops += times * _flops(computation, x)
        if launcher is None:
            bytes_accessed += times * _traffic(module, computation, x)
    return Program(
        collectives=tuple(collectives),
        flops=flops,
        bytes_accessed=bytes_accessed,
        custom_calls=tuple(custom_calls),
        custom_flops=custom_flops,
    )


def _collective(computation: Computation, name: str, x: Instruction, times: int, devices: int) -> Collective:
    arrays = [a for operand in x.operands for a in computation[operand].arrays]
    if x.kind == "all-gather":  # all-gather-start returns its operands before its results
        arrays = x.arrays[len(arrays) if x.is_start else 0 :]
    return Collective(
        # A TPU fuses an all-reduce with the slice that each device keeps; on the links it is a reduce-scatter.
        kind="reduce-scatter" if "all-reduce-scatter" in name else x.kind,
        shapes=tuple(f"{a.dtype}[{','.join(map(str, a.dims))}]" for a in arrays),
        bytes=sum(a.bytes for a in arrays),
        group=_group(x.text, devices),
        times=times,
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


def _flops(computation: Computation, x: Instruction) -> float:
    contracting = x.attribute(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)")  # of a dot, of a cuBLAS call
    is_cublas = x.op == "custom-call" and contracting and "__cublas" in x.text
    if x.op != "convolution" and x.op != "dot" and not is_cublas:
        return 0.0
    lhs, rhs = (computation[operand].arrays[0].dims for operand in x.operands[:2])
    out = x.arrays[0].dims
    if x.op != "convolution":
        return 2.0 * math.prod(out) * math.prod(lhs[int(i)] for i in re.findall(r"\d+", contracting))
    lhs_labels, rhs_labels, out_labels = re.split("_|->", x.attribute(r"dim_labels=(\S+?)(?:,|$| )"))
    total = 2.0 * out[out_labels.index("b")] * out[out_labels.index("f")] * rhs[rhs_labels.index("i")]
    for d in range(len(lhs) - 2):  # on a TPU also batched products, whose windows mostly read padding or holes
        n, taps, outs = (
            s[labels.index(str(d))] for s, labels in ((lhs, lhs_labels), (rhs, rhs_labels), (out, out_labels))
        )
        stride, dilate, rhs_dilate = (_window(x, name, d, 1) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        at = np.arange(outs)[:, None] * stride + np.arange(taps) * rhs_dilate - _window(x, "pad", d, 0)
        total *= np.count_nonzero((at >= 0) & (at <= (n - 1) * dilate) & (at % dilate == 0))
    return total


def _window(x: Instruction, name: str, dimension: int, default: int) -> int:
    values = x.attribute(rf"window=\{{[^}}]*\b{name}=([\d_x\-]+)")
    return int(values.split("x")[dimension].split("_")[0]) if values else default


def _traffic(module: Module, computation: Computation, x: Instruction) -> float:
    """Return the bytes of main memory that one instruction outside fusions reads and writes."""
    if x.op in FREE or x.op.endswith(("-done", "-update")) or any(f'"{name}"' in x.text for name in BOOKKEEPING):
        return 0.0
    if x.op in ("slice-start", "dynamic-slice-start"):
        # A TPU prefetches a slice of an array; the first result is the array itself.
        source, part = x.arrays[:2]
        return sum(part.bytes for a in (source, part) if not a.on_chip)
    read = sum(_bytes_read(module, computation, x, i) for i in range(len(x.operands)))
    if x.op == "fusion":
        outputs = _bytes_written(module, module.called(x), find_root(module.called(x)))
        if "kind=kCustom" in x.text:  # buffers of an asynchronous collective, passed through
            for index in re.findall(r"\{(\d*)\}: \(\d+, ", x.attribute(r"output_to_operand_aliasing=\{(.*?)\}, [a-z]")):
                outputs[int(index or 0)] = 0
    elif x.op in IN_PLACE:
        outputs = [sum(a.bytes for a in computation[x.operands[IN_PLACE[x.op]]].arrays)]
    else:
        outputs = [a.bytes for a in x.arrays]
    written = sum(size for size, a in zip(outputs, x.arrays, strict=False) if not a.on_chip)
    # Every start except that of an all-reduce returns its operands with its results.
    return max(written, read) if x.is_start and x.op != "all-reduce-start" else read + written


def _bytes_read(module: Module, computation: Computation, x: Instruction, i: int) -> float:
    """Return the bytes of main memory that an instruction reads from its operand i."""
    arrays = [a for a in computation[x.operands[i]].arrays if not a.on_chip]
    whole, elements = sum(a.bytes for a in arrays), None
    if x.op == "fusion" and len(arrays) == 1:
        fused = module.called(x)
        elements = _elements_read(module, fused, find_parameter(fused, i))
    elif i == 0 and arrays:
        elements = _slice_read(x)
    return whole if elements is None else min(whole, arrays[0].bits / 8 * elements)


def _slice_read(x: Instruction) -> int | None:
    """Return the number of elements of its first operand that an instruction reads. None means all."""
    if x.op in ("dynamic-slice", "slice", "gather"):
        return math.prod(x.arrays[0].dims)
    return 0 if x.op in IN_PLACE else None


def _elements_read(module: Module, fused: Computation, x: Instruction) -> int:
    """Return the number of elements of x, a parameter or a view of one, that a fusion reads."""
    whole = math.prod(x.arrays[0].dims)
    total = whole if x.is_root else 0
    uses = [(user, i) for user in fused.values() for i, name in enumerate(user.operands) if name == x.name]
    for user, i in uses:
        if user.op in VIEWS:
            total += _elements_read(module, fused, user)
        elif user.op == "fusion":
            inner = module.called(user)
            total += _elements_read(module, inner, find_parameter(inner, i))
        elif user.op == "tuple" or "AsyncCollectiveDone" in user.text:
            pass  # passed through
        elif user.op in COLLECTIVES and find_root(fused).op == "tuple" and "all-reduce-scatter" not in user.text:
            pass  # the middle of an asynchronous collective; its start has read x
        else:
            part = _slice_read(user) if i == 0 else None
            total += whole if part is None else part
    return total


def _bytes_written(module: Module, fused: Computation, x: Instruction) -> list[int]:
    """Return the bytes that a fusion with root x writes to each array of x; in place, only those of the update."""
    if x.op == "tuple":
        return [n for name in x.operands for n in _bytes_written(module, fused, fused[name])]
    if x.op in ("bitcast", "reshape"):
        return _bytes_written(module, fused, fused[x.operands[0]])
    if x.op == "fusion":
        return _bytes_written(module, module.called(x), find_root(module.called(x)))
    if x.op == "parameter":
        return [0 for _ in x.arrays]
    return [a.bytes for a in (fused[x.operands[1]] if x.op == "dynamic-update-slice" else x).arrays]
