"""Reads the text of a compiled program, `compiled.as_text()`: what one execution does on one device.

The text is XLA's optimized HLO of one partition, whichever the platform. XLA's own count, `cost_analysis()`, takes
a loop's body once and says nothing of communication; here loops count as often as they run.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One communication among devices; its asynchronous halves are one."""

    kind: str  # one of KINDS
    shapes: tuple[str, ...]  # full buffers, as "f32[768,3072]": an all-gather's output, else the operands
    bytes: int  # of those shapes, once
    group: tuple[int, ...]  # the first group of devices, by position; of a permutation the first pair
    times: int  # executions per run of the program: the product of the trip counts around it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What one run of a program does on one device."""

    collectives: tuple[Collective, ...]
    flops: float  # of matrix products and convolutions; a product of [M, K] and [K, N] is 2 M N K
    bytes_accessed: float  # read from and written to main memory; what stays on a TPU's chip (VMEM) costs nothing
    custom_calls: tuple[tuple[str, int], ...]  # (target, times), such as tpu_custom_call, which is a Pallas kernel
    custom_flops: float  # of custom calls that state theirs (Pallas's cost_estimate); the others' are unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Instruction:
    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    text: str  # from the operands on
    root: bool


_Computation = dict[str, _Instruction]

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")

_FREE = {  # they move nothing, or what they call does
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier"),
    *("partition-id", "replica-id", "while", "conditional", "call", "async-start"),
}
_SAME = {"bitcast", "reshape", "convert", "copy", "transpose"}  # a loop fusion makes only those elements that are used
_BOOKKEEPING = {
    "AllocateBuffer",
    "ConcatBitcast",
    "AsyncCollectiveStart",
    "AsyncCollectiveDone",
}  # custom calls that compute nothing


def read_hlo(text: str) -> Program:
    """Count what `compiled.as_text()` does in one run. Branches of a conditional all count, so it bounds from above."""
    program, entry = _parse(text)
    on_tpu = ":T(" in text  # tiled layouts; elsewhere S(1) is main memory as well
    devices = math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0]))
    collectives, custom_calls = [], []
    flops = custom_flops = bytes_accessed = 0.0
    seen = set()
    for name, x, times, launcher in _executed(program, entry):
        kind = x.op.removesuffix("-start")
        if kind in KINDS:
            channel = re.search(r"channel_id=(\d+)", x.text)
            # A TPU splits one collective over several fusions, so as to compute meanwhile; the channel is the same.
            key = (launcher, channel and channel[1])
            found = _collective(program[name], name, x, kind, times, devices)
            # One device with itself, which the partitioner leaves where an axis of the mesh has one, exchanges nothing.
            if len(found.group) > 1 and (launcher is None or channel is None or key not in seen):
                seen.add(key)
                collectives.append(found)
        elif x.op == "custom-call" and (target := _attribute(r'custom_call_target="([^"]*)"', x)) not in _BOOKKEEPING:
            custom_calls.append((target, times))
            custom_flops += times * float(_attribute(r'"cost_estimate":\{"flops":"(\d+)"', x) or 0)
        flops += times * _flops(program[name], x)
        if launcher is None:
            bytes_accessed += times * _traffic(program, program[name], x, on_tpu)
    return Program(
        collectives=tuple(collectives),
        flops=flops,
        bytes_accessed=bytes_accessed,
        custom_calls=tuple(custom_calls),
        custom_flops=custom_flops,
    )


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """-> (computations by name, the entry's name). A line that begins nothing continues the instruction before it."""
    program: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = program[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line == "}":
            lines = None
        elif lines is not None and _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += line
    return {name: {x.name: x for x in map(_instruction, lines)} for name, lines in program.items()}, entry


def _instruction(line: str) -> _Instruction:
    match = _INSTRUCTION.match(line)
    assert match
    root, name, shape, op, text = match.groups()
    operands = () if op == "constant" else tuple(re.findall(r"%([\w.\-]+)", text.split(")", 1)[0]))
    return _Instruction(name=name, shape=shape, op=op, operands=operands, text=text, root=bool(root))


def _executed(
    program: dict[str, _Computation], name: str, times: int = 1, launcher: str | None = None
) -> Iterator[tuple[str, _Instruction, int, str | None]]:
    """Every instruction that runs, as (its computation, itself, how often, the computation that launches its fusion)."""
    for x in program[name].values():
        yield name, x, times, launcher
        if x.op in ("while", "call", "conditional", "fusion") or x.op.endswith("-start"):
            often = times * _trip_count(program, program[name], x) if x.op == "while" else times
            branches = re.findall(r"[\w.\-]+", _attribute(r"branch_computations=\{([^}]*)\}", x))
            for callee in [] if x.op.removesuffix("-start") in KINDS else _CALLED.findall(x.text) + branches:
                yield from _executed(program, callee, often, (launcher or name) if x.op == "fusion" else launcher)


def _trip_count(program: dict[str, _Computation], computation: _Computation, loop: _Instruction) -> int:
    """How often a while loop runs. A TPU's text does not say it, so: from the start to what the condition compares with."""
    if known := _attribute(r'"known_trip_count":\{"n":"(\d+)"', loop):
        return int(known)
    condition = program[_attribute(r"condition=%?([\w.\-]+)", loop)]
    compare = _root(condition)
    limits = [_constant(condition, name) for name in compare.operands]
    counter = condition.get(compare.operands[0]) if compare.operands else None
    if compare.op != "compare" or "direction=LT" not in compare.text or limits[1] is None or counter is None:
        return 1
    start = None
    if index := _attribute(r"index=(\d+)", counter):
        start = _constant(computation, computation[loop.operands[0]].operands[int(index)])
    return max(limits[1] - (start or 0), 0)


def _constant(computation: _Computation, name: str) -> int | None:
    x = computation[name]
    while x.op in _SAME:
        x = computation[x.operands[0]]
    return int(value[0]) if x.op == "constant" and (value := re.match(r"-?\d+", x.text)) else None


def _collective(
    computation: _Computation, name: str, x: _Instruction, kind: str, times: int, devices: int
) -> Collective:
    arrays = [a for operand in x.operands for a in _ARRAY.finditer(computation[operand].shape)]
    if kind == "all-gather":  # the started one returns its operands before its results
        arrays = list(_ARRAY.finditer(x.shape))[len(arrays) if x.op.endswith("-start") else 0 :]
    return Collective(
        # A TPU scatters a sum by an all-reduce that it fuses with each device's slice; on the wire it is a scatter.
        kind="reduce-scatter" if "all-reduce-scatter" in name else kind,
        shapes=tuple(f"{a[1]}[{a[2]}]" for a in arrays),
        bytes=sum(map(_bytes, arrays)),
        group=_group(x.text, devices),
        times=times,
    )


def _group(text: str, devices: int) -> tuple[int, ...]:
    """The first of the replica groups {{0,1},{2,3}}, [4,2]<=[2,4]T(1,0) or mesh['a'=2,'b'=4] {'a'}; none is all."""
    if explicit := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", text):
        return tuple(map(int, explicit[1].split(",")))
    if iota := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return tuple(_ids(iota[1])[0].tolist())
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:,? *device_ids=\(([^ ]*)\))? *\{([^}]*)\}", text):
        varying = {name: (before, size) for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[3])}
        shape, index = [], []
        for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1]):
            before, part = (int(n or d) for n, d in zip(varying.get(name, (1, 1)), (1, size), strict=True))
            shape += [before, part, int(size) // before // part]  # 'a':(2)4 is the part of 4 behind a part of 2
            index += [0, slice(None), 0]
        ids = np.arange(math.prod(shape)) if not mesh[2] else _ids(mesh[2])
        return tuple(ids.reshape(shape)[tuple(index)].ravel().tolist())
    return tuple(range(devices))


def _ids(text: str) -> np.ndarray:
    """Numbers from 0 in another order: [4,2]<=[2,4]T(1,0) or [2,4]T(1,0), or a list of them."""
    match = re.fullmatch(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not match:
        return np.array(text.split(","), int)
    shape, source, axes = ([int(n) for n in (part or "").split(",") if n] for part in match.groups())
    ids = np.arange(math.prod(source)).reshape(source).transpose(axes or None)
    return ids.reshape(shape or -1)


def _flops(computation: _Computation, x: _Instruction) -> float:
    contracting = _attribute(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)", x)  # a dot's, a cuBLAS call's
    if x.op == "dot" or (x.op == "custom-call" and contracting and "__cublas" in x.text):
        lhs = _dims(computation[x.operands[0]].shape)
        return 2.0 * math.prod(_dims(x.shape)) * math.prod(lhs[int(i)] for i in re.findall(r"\d+", contracting))
    if x.op != "convolution":
        return 0.0
    lhs_labels, rhs_labels, out_labels = re.split("_|->", _attribute(r"dim_labels=(\S+?)(?:,|$| )", x))
    lhs, rhs, out = (_dims(shape) for shape in (*(computation[o].shape for o in x.operands[:2]), x.shape))
    total = 2.0 * out[out_labels.index("b")] * out[out_labels.index("f")] * rhs[rhs_labels.index("i")]
    for d in range(len(lhs) - 2):  # a TPU writes batched products so, with windows that mostly meet padding or holes
        n, taps, outs = (
            s[labels.index(str(d))] for s, labels in ((lhs, lhs_labels), (rhs, rhs_labels), (out, out_labels))
        )
        stride, dilate, rhs_dilate = (_window(x, name, d, 1) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        at = np.arange(outs)[:, None] * stride + np.arange(taps) * rhs_dilate - _window(x, "pad", d, 0)
        total *= np.count_nonzero((at >= 0) & (at <= (n - 1) * dilate) & (at % dilate == 0))
    return total


def _window(x: _Instruction, name: str, dimension: int, default: int) -> int:
    values = _attribute(rf"window=\{{[^}}]*\b{name}=([\d_x\-]+)", x)
    return int(values.split("x")[dimension].split("_")[0]) if values else default


def _traffic(program: dict[str, _Computation], computation: _Computation, x: _Instruction, on_tpu: bool) -> float:
    """Bytes of main memory that one instruction outside fusions reads and writes."""
    if x.op in _FREE or x.op.endswith(("-done", "-update")) or any(f'"{name}"' in x.text for name in _BOOKKEEPING):
        return 0.0
    if x.op.removesuffix("-start") in ("slice", "dynamic-slice") and x.op.endswith("-start"):
        # A TPU fetches parts of an array ahead of time: what it returns begins with the array, whole.
        source, part = list(_ARRAY.finditer(x.shape))[:2]
        return sum(_bytes(part) for a in (source, part) if not (on_tpu and "S(" in (a[3] or "")))
    callee = program[_CALLED.findall(x.text)[0]] if x.op == "fusion" else None
    outputs = list(_ARRAY.finditer(x.shape))
    held = [on_tpu and "S(" in (a[3] or "") for a in outputs]
    read = 0.0
    for i, operand in enumerate(x.operands):
        arrays = [a for a in _ARRAY.finditer(computation[operand].shape) if not (on_tpu and "S(" in (a[3] or ""))]
        whole = sum(map(_bytes, arrays))
        if callee and len(arrays) == 1:
            parameter = next(p for p in callee.values() if p.op == "parameter" and p.text.startswith(f"{i})"))
            whole = min(whole, _bits(arrays[0][1]) / 8 * _elements_read(program, callee, parameter))
        elif i == 0 and arrays:
            part = _part_read(x)
            whole = whole if part is None else min(whole, _bits(arrays[0][1]) / 8 * part)
        read += whole
    in_place = {"dynamic-update-slice": 1, "scatter": 2}
    if callee:
        written = _written(program, callee, _root(callee))
        for index in re.findall(r"\{(\d*)\}: \(\d+, ", _attribute(r"output_to_operand_aliasing=\{(.*?)\}, [a-z]", x)):
            if x.text.find("kind=kCustom") >= 0:  # an asynchronous collective's buffers, passed along
                written[int(index or 0)] = 0
    elif x.op in in_place:
        written = [sum(map(_bytes, _ARRAY.finditer(computation[x.operands[in_place[x.op]]].shape)))]
    else:
        written = [_bytes(a) for a in outputs]
    total = sum(n for n, on_chip in zip(written, held, strict=False) if not on_chip)
    # What is started returns its operands as well as its results, but for an all-reduce.
    return max(total, read) if x.op.endswith("-start") and x.op != "all-reduce-start" else read + total


def _part_read(x: _Instruction) -> int | None:
    """Elements of the first operand that are read; None: all of them."""
    if x.op in ("dynamic-slice", "slice", "gather"):
        return math.prod(_dims(x.shape))
    return 0 if x.op in ("dynamic-update-slice", "scatter") else None


def _elements_read(program: dict[str, _Computation], fused: _Computation, x: _Instruction) -> int:
    """Elements of x, a parameter or a view of one, that a fusion reads."""
    total = math.prod(_dims(x.shape)) if x.root else 0
    for user in fused.values():
        for i in (i for i, name in enumerate(user.operands) if name == x.name):
            if user.op in _SAME:
                total += _elements_read(program, fused, user)
            elif user.op == "fusion":
                inner = program[_CALLED.findall(user.text)[0]]
                parameter = next(p for p in inner.values() if p.op == "parameter" and p.text.startswith(f"{i})"))
                total += _elements_read(program, inner, parameter)
            elif user.op == "tuple" or "AsyncCollectiveDone" in user.text:
                pass  # handed on
            elif user.op in KINDS and _root(fused).op == "tuple" and "all-reduce-scatter" not in user.text:
                pass  # the middle of an asynchronous collective, whose start has read it
            else:
                part = _part_read(user) if i == 0 else None
                total += math.prod(_dims(x.shape)) if part is None else part
    return total


def _written(program: dict[str, _Computation], fused: _Computation, x: _Instruction) -> list[int]:
    """Bytes that a fusion writes of each array of x, its root: of an update in place the update."""
    if x.op == "tuple":
        return [n for name in x.operands for n in _written(program, fused, fused[name])]
    if x.op in ("bitcast", "reshape"):
        return _written(program, fused, fused[x.operands[0]])
    if x.op == "parameter":
        return [0 for _ in _ARRAY.finditer(x.shape)]
    if x.op == "fusion":
        inner = program[_CALLED.findall(x.text)[0]]
        return _written(program, inner, _root(inner))
    source = fused[x.operands[1]].shape if x.op == "dynamic-update-slice" else x.shape
    return [_bytes(a) for a in _ARRAY.finditer(source)]


def _root(computation: _Computation) -> _Instruction:
    return next(x for x in computation.values() if x.root)


def _attribute(pattern: str, x: _Instruction) -> str:
    """What the pattern's first group matches, or an empty text."""
    match = re.search(pattern, x.text)
    return match[1] if match else ""


def _dims(shape: str) -> list[int]:
    """Of the first array of a shape."""
    match = _ARRAY.search(shape)
    return [int(n) for n in re.findall(r"\d+", match[2])] if match else []


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)  # f8e4m3fn, s4, bf16
    return int(digits[0]) if digits else 0  # token, opaque


def _bytes(array: re.Match) -> int:
    return -(-_bits(array[1]) * math.prod(int(n) for n in re.findall(r"\d+", array[2])) // 8)
