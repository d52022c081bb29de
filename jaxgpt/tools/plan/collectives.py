"""List the collectives of a compiled program, `compiled.as_text()`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|[%\w.\-]+)")


class Instruction(NamedTuple):
    """An instruction of the program's text."""

    shape: str
    op: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        """Return the names of the instructions that it reads."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])


Body = dict[str, Instruction]  # a computation of the program


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind and group size. The start and the end of an asynchronous one count as one."""

    between_slices: bool  # over the data-center network, instead of the links of a slice
    kind: str  # one of KINDS
    devices: int  # in each group, or the number of slices
    count: int  # executions per run of the program
    bytes: int  # the full buffers, summed over the executions: output of an all-gather, else the operands


def read_collectives(text: str) -> tuple[Collective, ...]:
    """Add up the collectives of one run of a program. All branches of a conditional count."""
    bodies, body = dict[str, Body](), Body()
    times = Counter[str]()  # executions of each computation
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            bodies[header[2]] = body = {}
            times[header[2]] = int(header[1] is not None)
        elif match := _INSTRUCTION.match(line):
            name, *instruction = match.groups()
            body[name] = Instruction(*instruction)

    sides = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
    all_devices = math.prod(map(int, sides))
    counts, sizes = Counter[tuple[bool, str, int]](), Counter()
    channels = set()
    launchers = {}  # the computation that launches the fusion around each fused one
    for name, body in reversed(bodies.items()):  # a computation follows those that it calls
        for x in body.values():
            if x.op.endswith(("-done", "-update")):  # its start has been counted
                continue
            trips = _trip_count(x, body, bodies) if x.op == "while" else 1
            for called in re.findall(r"[\w.\-]+", ",".join(_CALLED.findall(x.rest))):
                times[called] += trips * times[name]
                if name in launchers or x.op.startswith("fusion"):
                    launchers[called] = launchers.get(name, name)
            kind, devices = _read_collective(x, all_devices)
            if devices == 1:  # of an axis of size 1 in the mesh, which sends nothing, or no collective
                continue
            size = sum(_count_bytes(body[operand].shape) for operand in x.operands)
            full = size * devices if kind == "all-gather" else size
            # A TPU fuses an all-reduce with the slice that each device keeps. On the links it is a reduce-scatter.
            kind = "reduce-scatter" if "all-reduce-scatter" in name else kind
            # It splits a collective over several fusions, to overlap it with compute. They share the channel.
            channel = launchers.get(name), *re.findall(r"channel_id=\d+", x.rest)
            key = (x.op == "send", kind, devices)
            if channel not in channels:
                counts[key] += times[name]
                sizes[key] += times[name] * full
            if name in launchers and len(channel) == 2:
                channels.add(channel)
    return tuple(Collective(*found, counts[found], sizes[found]) for found in sorted(counts))


def _trip_count(loop: Instruction, body: Body, bodies: dict[str, Body]) -> int:
    """Return how often a loop runs: as the compiler says, else from the start and the limit of its counter."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    [condition] = re.findall(r"condition=%?([\w.\-]+)", loop.rest)
    test = "\n".join(f"{x.op}({x.rest}" for x in bodies[condition].values())
    index, limit = re.search(r"index=(\d+)", test), re.search(r"^constant\((\d+)\)", test, re.MULTILINE)
    if index is None or limit is None:
        return 1
    start = body[body[loop.operands[0]].operands[int(index[1])]]
    while start.op in ("bitcast", "reshape", "convert", "copy"):
        start = body[start.operands[0]]
    return int(limit[1]) - (_numbers(start.rest)[0] if start.op == "constant" else 0)


def _read_collective(x: Instruction, all_devices: int) -> tuple[str, int]:
    """Return the kind and the group size of a collective or a transfer between slices, and 1 of another instruction.

    The compiler splits a collective over devices of several slices into collectives in each slice and one transfer
    through the hosts. Each device sends a part of it, to targets such as {1,2}x{0:15} or {{100000,200000}}.
    """
    kind = x.op.removesuffix("-start")
    transfer = re.search(r'_megascale_target="?\{+([\d,>-]+)\}.*_megascale_transfer_type="(\w+)"', x.rest)
    if kind == "send" and transfer:
        kind = transfer[2].lower().replace("_", "-").replace("one-to-one", "collective-permute")
        return kind, len(_numbers(transfer[1]))
    return kind, _group_size(x.rest, all_devices) if kind in KINDS else 1


def _count_bytes(shape: str) -> int:
    """Return the bytes of an array or a tuple. A token has none."""
    total = 0
    for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", shape):
        bits = 8 if dtype == "pred" else (_numbers(dtype) or [0])[0]  # f8e4m3fn, s4, bf16
        total += -(-bits * math.prod(_numbers(dims)) // 8)
    return total


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _group_size(text: str, all_devices: int) -> int:
    """Return the devices in a group of {{0,1},{2,3}}, [4,2]<=[2,4]T(1,0) or mesh['a'=2,'b'=4] {'a','b':(2)2}."""
    if explicit := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", text):
        return len(_numbers(explicit[1]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])  # 'b':(2)2 is a part of b
        return math.prod(int(part or sizes[name]) for name, part in axes)
    return all_devices
