"""Read a compiled program, `compiled.as_text()`: FLOPs, memory traffic and collectives of one run on one device.

XLA's `cost_analysis()` counts the body of a loop once and omits collectives; here it counts as often as it runs.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# A loop fusion computes only those of their elements that are used.
VIEWS = {"bitcast", "reshape", "convert", "copy", "transpose"}

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """Type and location of an array in the program."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool  # in a TPU's VMEM instead of main memory

    @property
    def bits(self) -> int:
        """Return the bits of one element."""
        digits = re.search(r"\d+", self.dtype)  # f8e4m3fn, s4, bf16
        return 8 if self.dtype == "pred" else int(digits[0]) if digits else 0  # token and opaque have no size

    @property
    def bytes(self) -> int:
        """Return the bytes of all elements."""
        return -(-self.bits * math.prod(self.dims) // 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    op: str
    arrays: tuple[Array, ...]  # the result, flattened if it is a tuple
    operands: tuple[str, ...]
    text: str  # operands and attributes
    is_root: bool

    @property
    def kind(self) -> str:
        """Return the operation, without the suffix of an asynchronous start."""
        return self.op.removesuffix("-start")

    @property
    def is_start(self) -> bool:
        """Return whether the instruction starts an asynchronous operation."""
        return self.op.endswith("-start")

    def attribute(self, pattern: str) -> str:
        """Return what the first group of a pattern matches, or an empty string."""
        match = re.search(pattern, self.text)
        return match[1] if match else ""


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """The runs of one instruction at one place of the program."""

    computation: Computation
    name: str  # of the computation
    instruction: Instruction
    times: int
    launched: str = ""  # name of the computation with the outermost fusion or asynchronous start around it
    is_fused: bool = False  # a part of a fusion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A parsed program."""

    computations: dict[str, Computation]
    entry: str
    devices: int

    def called(self, x: Instruction) -> Computation:
        """Return the computation that a fusion calls."""
        return self.computations[_CALLED.findall(x.text)[0]]

    def executed(self) -> Iterator[Execution]:
        """Yield every instruction that runs."""
        entry = self.computations[self.entry]
        for x in entry.values():
            yield from self.executed_by(Execution(computation=entry, name=self.entry, instruction=x, times=1))

    def executed_by(self, e: Execution) -> Iterator[Execution]:
        """Yield an instruction and all those that it calls."""
        yield e
        x, launched, times = e.instruction, e.launched, e.times
        is_launch = x.op == "fusion" or (x.is_start and x.kind not in COLLECTIVES)
        if x.op not in ("while", "call", "conditional") and not is_launch:
            return
        if x.op == "while":
            times *= self._trip_count(e.computation, x)
        if is_launch:
            launched = launched or e.name
        is_fused = e.is_fused or x.op == "fusion"
        branches = re.findall(r"[\w.\-]+", x.attribute(r"branch_computations=\{([^}]*)\}"))
        for name in _CALLED.findall(x.text) + branches:
            inner = self.computations[name]
            for y in inner.values():
                called = {"computation": inner, "name": name, "instruction": y, "times": times}
                yield from self.executed_by(Execution(**called, launched=launched, is_fused=is_fused))

    def _trip_count(self, computation: Computation, loop: Instruction) -> int:
        """Return how often a loop runs: as the compiler says, else from the start and the limit of its counter."""
        if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = self.computations[loop.attribute(r"condition=%?([\w.\-]+)")]
        root = find_root(condition)
        inner = self.called(root) if root.op == "fusion" else condition  # a GPU fuses even a comparison
        compare = find_root(inner)
        limits = [_constant(inner, name) for name in compare.operands]
        counter = inner.get(compare.operands[0]) if compare.operands else None
        if counter is not None and inner is not condition and counter.op == "parameter":
            counter = condition[root.operands[int(counter.text.split(")")[0])]]
        if compare.op != "compare" or "direction=LT" not in compare.text or limits[1] is None or counter is None:
            return 1
        index = counter.attribute(r"index=(\d+)")
        start = _constant(computation, computation[loop.operands[0]].operands[int(index)]) if index else 0
        return max(limits[1] - (start or 0), 0)


def find_root(computation: Computation) -> Instruction:
    """Return the instruction whose result is that of the computation."""
    return next(x for x in computation.values() if x.is_root)


def find_parameter(computation: Computation, index: int) -> Instruction:
    """Return a parameter of the computation by its index."""
    return next(x for x in computation.values() if x.op == "parameter" and x.text.startswith(f"{index})"))


def parse_hlo(text: str) -> Module:
    """Parse the text of a program. A line that does not begin an instruction continues the previous one."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line == "}":
            lines = None
        elif lines is not None and _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += line
    instruction = functools.partial(_instruction, on_tpu=":T(" in text)  # tiled layouts; elsewhere S(1) is main memory
    return Module(
        computations={name: {x.name: x for x in map(instruction, lines)} for name, lines in computations.items()},
        entry=entry,
        devices=math.prod(map(int, re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0]))),
    )


def _instruction(line: str, *, on_tpu: bool) -> Instruction:
    match = _INSTRUCTION.match(line)
    assert match
    root, name, shape, op, text = match.groups()
    arrays = tuple(
        Array(dtype=a[1], dims=tuple(map(int, re.findall(r"\d+", a[2]))), on_chip=on_tpu and "S(" in (a[3] or ""))
        for a in _ARRAY.finditer(shape)
    )
    operands = () if op == "constant" else tuple(re.findall(r"%([\w.\-]+)", text.split(")", 1)[0]))
    return Instruction(name=name, op=op, arrays=arrays, operands=operands, text=text, is_root=bool(root))


def _constant(computation: Computation, name: str) -> int | None:
    x = computation[name]
    while x.op in VIEWS:
        x = computation[x.operands[0]]
    return int(value[0]) if x.op == "constant" and (value := re.match(r"-?\d+", x.text)) else None


FREE = {  # no traffic of their own; what they call is counted separately
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier"),
    *("partition-id", "replica-id", "while", "conditional", "call", "async-start"),
}
# Custom calls that compute nothing.
BOOKKEEPING = {"AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone"}
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that is written


def count_traffic(module: Module, computation: Computation, x: Instruction) -> float:
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
    if x.op == "custom-call":  # a Pallas kernel may read an operand several times, and states how often
        stated = x.attribute(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
        return max(read + written, float(stated or 0))
    # Every start except that of an all-reduce returns its operands with its results.
    returns_operands = x.op == "send" or (x.is_start and x.op != "all-reduce-start")
    return max(written, read) if returns_operands else read + written


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
    return [a.bytes for a in (fused[x.operands[IN_PLACE[x.op]]] if x.op in IN_PLACE else x).arrays]


def count_flops(computation: Computation, x: Instruction) -> float:
    """Return the FLOPs of a matrix product or a convolution; other instructions have none that count."""
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
    return float(total)


def _window(x: Instruction, name: str, dimension: int, default: int) -> int:
    values = x.attribute(rf"window=\{{[^}}]*\b{name}=([\d_x\-]+)")
    return int(values.split("x")[dimension].split("_")[0]) if values else default


def count_attention_flops(x: Instruction) -> float:
    """Return the FLOPs of a call of cuDNN's attention: 2 products forward, 5 backward, which computes the scores again.

    Of a causal mask, only the scores that it lets through count.
    """
    target = x.attribute(r'custom_call_target="([^"]*)"')
    scores = re.search(r'"intermediate_tensor_shape": ?\{[^\[]*"dimensions": ?\[([^\]]*)\]', x.text)
    if not target.startswith("__cudnn$fmha") or not scores:
        return 0.0
    *batch_heads, T, S = (int(n) for n in re.findall(r"\d+", scores[1]))
    seen = T * S
    if "CAUSAL" in x.attribute(r'"mask_type": ?"(\w+)"'):
        window = min(int(x.attribute(r'"sliding_window_length": ?"?(\d+)') or 0) or S, S)
        seen = window * (window + 1) // 2 + (T - window) * window
    products = 5 if target.endswith("Backward") else 2
    return products * 2.0 * math.prod(batch_heads) * seen * x.arrays[0].dims[-1]


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
class Collective:
    """A collective operation; the start and the end of an asynchronous one count as one."""

    kind: str  # one of COLLECTIVES
    shapes: tuple[str, ...]  # full buffers, such as "f32[768,3072]": output of an all-gather, else the operands
    bytes: int  # of `shapes`, per execution
    # the first group, as positions of devices, slice after slice; the first pair of a permutation
    group: tuple[int, ...]
    times: int  # executions per run of the program: the product of the trip counts around it
    between_slices: bool = False  # over the data-center network, instead of the links of a slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Cost of one run of a program on one device."""

    collectives: tuple[Collective, ...]
    flops: float  # of matrix products, convolutions and cuDNN's attention; of [M, K] times [K, N], 2 M N K
    bytes_accessed: float  # read from and written to main memory; a TPU's VMEM does not count
    launches: list[list[float]]  # [times, FLOPs and bytes of one] of each instruction of the schedule
    custom_flops: float  # of custom calls that state them (Pallas's cost_estimate)
    silent_kernels: int  # calls of Pallas kernels on a TPU that do not state their FLOPs
    kernels: dict[str, int]  # launches, by the names in `_KERNELS`


def read_program(text: str) -> Program:
    """Count the cost of one run from `compiled.as_text()`. All branches of a conditional count: an upper bound."""
    module = parse_hlo(text)
    executions = list(module.executed())
    custom_flops, silent_kernels, launches = 0.0, 0, []
    kernels: Counter[str] = Counter()
    for e in executions:
        x = e.instruction
        if not e.is_fused:
            launches.append([e.times, 0.0, count_traffic(module, e.computation, x)])
        launches[-1][1] += count_flops(e.computation, x) + count_attention_flops(x)
        if x.op == "custom-call" and (target := x.attribute(r'custom_call_target="([^"]*)"')) not in BOOKKEEPING:
            stated = x.attribute(r'"cost_estimate":\{"flops":"(\d+)"')
            custom_flops += e.times * float(stated or 0)
            silent_kernels += e.times if target == "tpu_custom_call" and not stated else 0
        if x.op in ("custom-call", "fusion") and not e.is_fused and (kernel := _kernel_name(x)):
            kernels[kernel] += e.times
    return Program(
        collectives=tuple(_iter_collectives(module, executions)),
        flops=sum(times * flops for times, flops, _ in launches),
        bytes_accessed=sum(times * accessed for times, _, accessed in launches),
        launches=launches,
        custom_flops=custom_flops,
        silent_kernels=silent_kernels,
        kernels={name: kernels[name] for name in _KERNELS if kernels[name]},
    )


def _kernel_name(x: Instruction) -> str | None:
    return next((name for name, pattern in _KERNELS.items() if re.search(pattern, x.text)), None)


def _iter_collectives(module: Module, executions: Iterable[Execution]) -> Iterator[Collective]:
    seen = set()
    for e in executions:
        x = e.instruction
        transfer = x.attribute(r'_megascale_transfer_type="(\w+)"') if x.op == "send" else None
        if x.kind not in COLLECTIVES and not transfer:
            continue
        # A TPU splits a collective over several fusions, to overlap it with compute; they share the channel.
        part = e.launched or e.name, x.attribute(r"channel_id=(\d+)")
        read = _read_transfer if transfer else _read_collective
        collective = read(e, module.devices)
        # An axis of size 1 in the mesh leaves collectives over one device, which send nothing.
        if len(collective.group) == 1 or (e.is_fused and part in seen):
            continue
        if e.is_fused and part[1]:
            seen.add(part)
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
