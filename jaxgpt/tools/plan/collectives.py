"""List the collectives of a compiled program, `compiled.as_text()`, and bound their time by the links."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.parallel.limits import PEAKS

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation. The start and the end of an asynchronous one count as one."""

    kind: str  # one of KINDS
    bytes: int  # the full buffers, per execution: output of an all-gather, else the operands
    # the first group, as positions of devices, slice after slice, or the first pair of a permutation
    group: tuple[int, ...]
    times: int = 1  # executions per run of the program: the product of the trip counts around it
    between_slices: bool = False  # over the data-center network, instead of the links of a slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTotal:
    """Total of the collectives of one kind and group size in one step."""

    kind: str
    devices: int  # in each group
    count: int
    bytes: int  # sum over the full buffers
    seconds: float | None  # at the full bandwidth of the links, None if unknown
    between_slices: bool = False  # over the data-center network. `devices` is then the number of slices


def read_collectives(text: str) -> list[Collective]:
    """Return the collectives of one run of a program. All branches of a conditional count."""
    bodies, body = dict[str, dict[str, Instruction]](), dict[str, Instruction]()
    times = Counter[str]()  # executions of each computation
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            bodies[header[2]] = body = {}
            times[header[2]] = int(header[1] is not None)
        elif match := _INSTRUCTION.match(line):
            name, *instruction = match.groups()
            body[name] = Instruction(*instruction)

    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
    devices = math.prod(map(int, counts))
    found, channels = [], set()
    launchers: dict[str, str] = {}  # the computation that launches the fusion around each fused one
    for name, body in reversed(bodies.items()):  # a computation follows those that it calls
        for x in body.values():
            if x.op.endswith(("-done", "-update")):  # its start has been counted
                continue
            trips = _trip_count(x, body, bodies) if x.op == "while" else 1
            for called in re.findall(r"[\w.\-]+", ",".join(_CALLED.findall(x.rest))):
                times[called] += trips * times[name]
                if name in launchers or x.op.startswith("fusion"):
                    launchers[called] = launchers.get(name, name)
            collective = _read_collective(x, name, devices)
            # An axis of size 1 in the mesh leaves collectives over one device, which send nothing.
            if collective is None or len(collective.group) == 1:
                continue
            # A TPU splits a collective over several fusions, to overlap it with compute. They share the channel.
            channel = launchers.get(name), *re.findall(r"channel_id=\d+", x.rest)
            if channel not in channels:
                found.append(dataclasses.replace(collective, times=times[name]))
            if name in launchers and len(channel) == 2:
                channels.add(channel)
    return found


def _trip_count(loop: Instruction, body: dict[str, Instruction], bodies: dict[str, dict[str, Instruction]]) -> int:
    """Return how often a loop runs: as the compiler says, else from the start and the limit of its counter."""
    if known := re.findall(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[0])
    [condition] = re.findall(r"condition=%?([\w.\-]+)", loop.rest)
    test = "\n".join(f"{x.op}({x.rest}" for x in bodies[condition].values())
    index, limit = re.search(r"index=(\d+)", test), re.search(r"^constant\((\d+)\)", test, re.MULTILINE)
    if index is None or limit is None:
        return 1
    start = body[body[loop.operands[0]].operands[int(index[1])]]
    while start.op in ("bitcast", "reshape", "convert", "copy"):
        start = body[start.operands[0]]
    return int(limit[1]) - (int(start.rest.split(")")[0]) if start.op == "constant" else 0)


def _read_collective(x: Instruction, within: str, devices: int) -> Collective | None:
    """Return the collective that an instruction is, or the transfer between slices of so many devices, if it is one.

    The compiler splits a collective over devices of several slices into collectives in each slice and one transfer
    through the hosts. Each device sends a part of it, to targets such as {1,2}x{0:15} or {{100000,200000}}.
    """
    kind = x.op.removesuffix("-start")
    sizes = [_count_bytes(*array) for array in re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", x.shape)]
    if kind in KINDS:
        group = _group(x.rest, devices)
        if x.op == "collective-permute-start":
            sizes = sizes[:1]
        elif x.op == "all-gather-start" or x.shape.startswith("(("):  # it returns its operands before its results
            sizes = sizes[len(sizes) // 2 :]
        if kind == "reduce-scatter":
            sizes = [len(group) * size for size in sizes]
        # A TPU fuses an all-reduce with the slice that each device keeps. On the links it is a reduce-scatter.
        kind = "reduce-scatter" if "all-reduce-scatter" in within else kind
        return Collective(kind=kind, bytes=sum(sizes), group=group)
    transfer = re.findall(r'_megascale_transfer_type="(\w+)"', x.rest)
    if x.op != "send" or not transfer:
        return None
    kind = "collective-permute" if transfer == ["ONE_TO_ONE"] else transfer[0].lower().replace("_", "-")
    [target] = re.findall(r'_megascale_target="?\{+([\d,]+|\d+->\d+)\}', x.rest)
    # Slices count from 1, with 100,000 ids for each.
    slices = [(int(n) // 100_000 or int(n)) - 1 for n in re.split(",|->", target)]
    size = sizes[0] * (len(slices) if kind == "all-gather" else 1)
    return Collective(kind=kind, bytes=size, group=tuple(n * devices for n in slices), between_slices=True)


def _count_bytes(dtype: str, dims: str) -> int:
    digits = re.search(r"\d+", dtype)  # f8e4m3fn, s4, bf16. Tokens have no size
    bits = 8 if dtype == "pred" else int(digits[0]) if digits else 0
    return -(-bits * math.prod(map(int, re.findall(r"\d+", dims))) // 8)


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


def total_collectives(collectives: Sequence[Collective], devices: Sequence[jax.Device]) -> tuple[CollectiveTotal, ...]:
    """Add up the collectives of each kind and group size."""
    groups: dict[tuple[bool, str, int], list[Collective]] = defaultdict(list)
    for c in collectives:
        groups[c.between_slices, c.kind, len(c.group)].append(c)
    totals = []
    for (between_slices, kind, n), members in sorted(groups.items()):
        seconds: float | None = 0.0
        for c in members:
            rate = find_bandwidth(devices, c.group)
            known = None if rate is None else c.times * collective_seconds(kind, c.bytes, n, rate)
            seconds = None if seconds is None or known is None else seconds + known
        totals.append(
            CollectiveTotal(
                kind=kind,
                devices=n,
                count=sum(c.times for c in members),
                bytes=sum(c.bytes * c.times for c in members),
                seconds=seconds,
                between_slices=between_slices,
            )
        )
    return tuple(totals)


def find_bandwidth(devices: Sequence[jax.Device], group: Sequence[int]) -> float | None:
    """Return the most bytes/s that each device of a group can send while all of them send, or None if unknown.

    `group` holds indices into `devices`. In a TPU's slice, each dimension in which the group extends adds two links, as
    if it were a ring. Between slices, each chip has its share of its host's network cards. On GPUs it is the link's
    bandwidth within one host. Between hosts, NCCL lays several rings through the group, each of which leaves a host by
    another network card: as many cards send as the host has members of the group.
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
    dimensions = [len({d.coords[axis] for d in members}) > 1 for axis in range(limits.torus)]
    return 2 * sum(dimensions) * limits.link_bandwidth or None  # the cores of one chip: no links


def collective_seconds(kind: str, size: int, n: int, bandwidth: float) -> float:
    """Return the least seconds of one collective over n devices, each of which sends `bandwidth` bytes/s at most.

    Each device sends n - 1 of n parts. An all-reduce is a reduce-scatter and an all-gather
    (jax-ml.github.io/scaling-book/sharding). Latency, about a microsecond per link, is left out.
    """
    share = (n - 1) / n
    return {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share) * size / bandwidth
