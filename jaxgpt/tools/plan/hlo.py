"""Read a compiled program, `compiled.as_text()`: FLOPs and collectives of one run on one device.

XLA's `cost_analysis()` counts the body of a loop once and omits collectives. Here it counts as often as it runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Custom calls that compute nothing.
BOOKKEEPING = {"AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone"}
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")


class Array(NamedTuple):
    """Type and location of an array in the program."""

    bits: int  # bits of one element
    dims: tuple[int, ...]
    on_chip: bool  # in a TPU's VMEM instead of main memory

    @property
    def bytes(self) -> int:
        """Return the bytes of all elements."""
        return -(-self.bits * math.prod(self.dims) // 8)


@dataclasses.dataclass(eq=False)
class Computation:
    """A function of the program: the entry, the body of a loop, a fusion."""

    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """Return the instruction that gives the result of the computation."""
        return next(x for x in self.instructions.values() if x.is_root)


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction of a computation, linked to the instructions that it reads."""

    within: Computation
    op: str
    arrays: tuple[Array, ...]  # the result, flattened if it is a tuple
    inputs: list[Instruction]
    called: list[Computation]
    text: str  # operands and attributes
    is_root: bool

    @property
    def kind(self) -> str:
        """Return the operation, without the suffix of an asynchronous start."""
        return self.op.removesuffix("-start")

    def attribute(self, pattern: str) -> str:
        """Return what the first group of a pattern matches, or an empty string."""
        match = re.search(pattern, self.text)
        return match[1] if match else ""


def parse_hlo(text: str) -> Computation:
    """Parse the text of a program and return its entry. Callees come first. Other lines continue an instruction."""
    bodies: dict[str, list[str]] = {}
    entry, body = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            body = bodies[header[2]] = []
            entry = header[2] if header[1] else entry
        elif _INSTRUCTION.match(line):
            body.append(line)
        elif body and line != "}":
            body[-1] += line

    on_tpu = ":T(" in text  # tiled layouts. Elsewhere S(1) is main memory
    computations = {name: Computation(name) for name in bodies}
    for name, within in computations.items():
        for match in map(_INSTRUCTION.match, bodies[name]):
            assert match
            is_root, name, shape, op, rest = match.groups()
            arrays = tuple(
                Array(_bits(dtype), tuple(map(int, re.findall(r"\d+", dims))), on_tpu and "S(" in layout)
                for dtype, dims, layout in _ARRAY.findall(shape)
            )
            operands = [] if op == "constant" else re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0])
            inputs = [within.instructions[operand] for operand in operands]
            branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
            called = _CALLED.findall(rest) + (re.findall(r"[\w.\-]+", branches[1]) if branches else [])
            callees = [computations[name] for name in called if name in computations]
            within.instructions[name] = Instruction(within, op, arrays, inputs, callees, rest, bool(is_root))
    return computations[entry]


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)  # f8e4m3fn, s4, bf16
    return 8 if dtype == "pred" else int(digits[0]) if digits else 0  # token and opaque have no size


def iter_executions(
    within: Computation, times: int = 1, launched: str = "", *, is_fused: bool = False
) -> Iterator[tuple[Instruction, int, str, bool]]:
    """Yield every instruction that runs, how often, and where, each followed by those that it calls.

    `launched` is the name of the computation with the outermost fusion or asynchronous start around it, or empty.
    `is_fused` says whether the instruction is a part of a fusion.
    """
    for x in within.instructions.values():
        yield x, times, launched, is_fused
        is_launch = x.kind == "fusion" or (x.op.endswith("-start") and x.kind not in COLLECTIVES)
        if is_launch or x.op in ("while", "call", "conditional"):
            n = times * (_trip_count(x) if x.op == "while" else 1)
            launcher = launched or (within.name if is_launch else "")
            for inner in x.called:
                yield from iter_executions(inner, n, launcher, is_fused=is_fused or x.kind == "fusion")


def _trip_count(loop: Instruction) -> int:
    """Return how often a loop runs: as the compiler says, else from the start and the limit of its counter."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    compare = outer = next(c for c in loop.called if c.name == loop.attribute(r"condition=%?([\w.\-]+)")).root
    if outer.op == "fusion":  # a GPU fuses even a comparison
        compare = outer.called[0].root
    if compare.op != "compare" or "direction=LT" not in compare.text:
        return 1
    counter, limit = compare.inputs
    if counter.op == "parameter" and compare is not outer:
        counter = outer.inputs[int(counter.text.split(")")[0])]
    index = counter.attribute(r"index=(\d+)")
    start, stop = _constant(loop.inputs[0].inputs[int(index)]) if index else 0, _constant(limit)
    return 1 if stop is None else max(stop - (start or 0), 0)


def _constant(x: Instruction) -> int | None:
    while x.op in ("bitcast", "reshape", "convert", "copy", "transpose"):
        x = x.inputs[0]
    return int(value[0]) if x.op == "constant" and (value := re.match(r"-?\d+", x.text)) else None


def count_flops(x: Instruction) -> float:
    """Return the FLOPs of a product, a convolution or a call of cuDNN's attention. Others have none that count.

    Attention has 2 products forward and 5 backward, which computes the scores again. With a causal mask, only the scores
    that it lets through count.
    """
    target = x.attribute(r'custom_call_target="([^"]*)"')
    scores = re.search(r'"intermediate_tensor_shape": ?\{[^\[]*"dimensions": ?\[([^\]]*)\]', x.text)
    if target.startswith("__cudnn$fmha") and scores:
        *batch_heads, T, S = (int(n) for n in re.findall(r"\d+", scores[1]))
        seen = T * S
        if "CAUSAL" in x.attribute(r'"mask_type": ?"(\w+)"'):
            window = min(int(x.attribute(r'"sliding_window_length": ?"?(\d+)') or 0) or S, S)
            seen = window * (window + 1) // 2 + (T - window) * window
        products = 5 if target.endswith("Backward") else 2
        return products * 2.0 * math.prod(batch_heads) * seen * x.arrays[0].dims[-1]
    contracting = x.attribute(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)")  # a dot's, a cuBLAS call's
    if x.op == "dot" or (target.startswith("__cublas") and contracting):
        lhs = x.inputs[0].arrays[0].dims
        return 2.0 * math.prod(x.arrays[0].dims) * math.prod(lhs[int(i)] for i in re.findall(r"\d+", contracting))
    if x.op != "convolution":
        return 0.0
    lhs, rhs, out = (a.dims for a in (x.inputs[0].arrays[0], x.inputs[1].arrays[0], x.arrays[0]))
    lhs_labels, rhs_labels, out_labels = re.split("_|->", x.attribute(r"dim_labels=(\S+?)(?:,|$| )"))
    total = 2.0 * out[out_labels.index("b")] * out[out_labels.index("f")] * rhs[rhs_labels.index("i")]

    def window(name: str, dimension: int, default: int) -> int:
        values = x.attribute(rf"window=\{{[^}}]*\b{name}=([\d_x\-]+)")
        return int(values.split("x")[dimension].split("_")[0]) if values else default

    for d in range(len(lhs) - 2):  # on a TPU also batched products, with windows that mostly read padding or holes
        n, taps, outs = (
            s[labels.index(str(d))] for s, labels in ((lhs, lhs_labels), (rhs, rhs_labels), (out, out_labels))
        )
        stride, dilate, rhs_dilate = (window(name, d, 1) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        at = np.arange(outs)[:, None] * stride + np.arange(taps) * rhs_dilate - window("pad", d, 0)
        total *= np.count_nonzero((at >= 0) & (at <= (n - 1) * dilate) & (at % dilate == 0))
    return float(total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation. The start and the end of an asynchronous one count as one."""

    kind: str  # one of COLLECTIVES
    bytes: int  # the full buffers, per execution: output of an all-gather, else the operands
    # the first group, as positions of devices, slice after slice, or the first pair of a permutation
    group: tuple[int, ...]
    times: int  # executions per run of the program: the product of the trip counts around it
    between_slices: bool = False  # over the data-center network, instead of the links of a slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Cost of one run of a program on one device."""

    collectives: tuple[Collective, ...]
    flops: float  # by matrix products, convolutions and cuDNN's attention: [M, K] times [K, N] has 2 M N K
    custom_flops: float  # by custom calls that state them (Pallas's cost_estimate)
    silent_kernels: int  # calls of Pallas kernels on a TPU that do not state their FLOPs


def read_program(text: str) -> Program:
    """Count the cost of one run from `compiled.as_text()`. All branches of a conditional count: an upper bound."""
    devices = math.prod(map(int, re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])))
    flops, custom_flops, silent_kernels = 0.0, 0.0, 0
    collectives: list[Collective] = []
    seen = set()
    for x, times, launched, is_fused in iter_executions(parse_hlo(text)):
        flops += times * count_flops(x)
        target = x.attribute(r'custom_call_target="([^"]*)"')
        if x.op == "custom-call" and target not in BOOKKEEPING:
            stated = x.attribute(r'"cost_estimate":\{"flops":"(\d+)"')
            custom_flops += times * float(stated or 0)
            silent_kernels += times if target == "tpu_custom_call" and not stated else 0
        # An axis of size 1 in the mesh leaves collectives over one device, which send nothing.
        if (found := _read_collective(x, times, devices)) is None or len(found.group) == 1:
            continue
        # A TPU splits a collective over several fusions, to overlap it with compute. They share the channel.
        part = launched or x.within.name, x.attribute(r"channel_id=(\d+)")
        if not is_fused or not part[1] or part not in seen:
            collectives.append(found)
            seen |= {part} if is_fused else set()
    return Program(
        collectives=tuple(collectives), flops=flops, custom_flops=custom_flops, silent_kernels=silent_kernels
    )


def _read_collective(x: Instruction, times: int, devices: int) -> Collective | None:
    """Return the collective that an instruction is, or the transfer between slices of so many devices, if it is one.

    The compiler splits a collective over devices of several slices into collectives in each slice and one transfer
    through the hosts. Each device sends a part of it, to targets such as {1,2}x{0:15} or {{100000,200000}}.
    """
    if x.kind in COLLECTIVES:
        arrays = [a for y in x.inputs for a in y.arrays]
        if x.kind == "all-gather":  # all-gather-start returns its operands before its results
            arrays = x.arrays[len(arrays) if x.op.endswith("-start") else 0 :]
        # A TPU fuses an all-reduce with the slice that each device keeps. On the links it is a reduce-scatter.
        kind = "reduce-scatter" if "all-reduce-scatter" in x.within.name else x.kind
        return Collective(kind=kind, bytes=sum(a.bytes for a in arrays), group=_group(x.text, devices), times=times)
    if x.op != "send" or not (transfer := x.attribute(r'_megascale_transfer_type="(\w+)"')):
        return None
    kind = "collective-permute" if transfer == "ONE_TO_ONE" else transfer.lower().replace("_", "-")
    ids = re.split(",|->", x.attribute(r'_megascale_target="?\{+([\d,]+|\d+->\d+)\}'))
    slices = [(int(n) // 100_000 or int(n)) - 1 for n in ids]  # counted from 1, with 100,000 ids for each
    part = x.arrays[0]
    return Collective(
        kind=kind,
        bytes=part.bytes * (len(slices) if kind == "all-gather" else 1),
        group=tuple(n * devices for n in slices),
        times=times,
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
