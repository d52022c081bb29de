"""Parse the text of a compiled program, `compiled.as_text()`: XLA's optimized HLO of one partition."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

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
    launch: tuple[Computation, Instruction] | None = None  # the outermost fusion or asynchronous start around it
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
        x, launch, times = e.instruction, e.launch, e.times
        is_launch = x.op == "fusion" or (x.is_start and x.kind not in COLLECTIVES)
        if x.op not in ("while", "call", "conditional") and not is_launch:
            return
        if x.op == "while":
            times *= self._trip_count(e.computation, x)
        if is_launch and launch is None:
            launch = e.computation, x
        is_fused = e.is_fused or x.op == "fusion"
        branches = re.findall(r"[\w.\-]+", x.attribute(r"branch_computations=\{([^}]*)\}"))
        for name in _CALLED.findall(x.text) + branches:
            inner = self.computations[name]
            for y in inner.values():
                called = {"computation": inner, "name": name, "instruction": y, "times": times}
                yield from self.executed_by(Execution(**called, launch=launch, is_fused=is_fused))

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
