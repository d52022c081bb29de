"""Profile a training step on CPU: where its milliseconds go, compared with the limits of arithmetic and memory.

Called by `training.py --profile`. XLA's thunks come from JAX's profiler, what they compute from the compiled program.
Several thunks run at once, and some use all cores: the elapsed time of each instant is shared evenly among those that run
then, so that the parts add up to the step. A product's thunk may end before its product, which runs on in the thread pool:
the gap after it, in which no thunk runs, is the product's. GB in and out are the sizes of operands and results.
"""

import collections
import dataclasses
import itertools
import math
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

PRODUCTS, ATTENTION, ELEMENTS = "matrix products", "attention's products", "element-wise work and reductions"
MOVES, OPTIMISER = "copies, transposes, converts", "optimiser"
KINDS = (PRODUCTS, ATTENTION, ELEMENTS, MOVES, OPTIMISER)
MOVING = set(
    "bitcast bitcast-convert broadcast concatenate constant convert copy dynamic-slice dynamic-update-slice "
    "get-tuple-element iota pad parameter reshape reverse slice transpose tuple".split()
)
CONTAINERS = {"call", "conditional", "while"}  # their thunks last as long as those inside
HEAD = re.compile(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)")
ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
ROUNDS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An instruction of a compiled program, with all that a fusion contains."""

    kind: str
    shape: str
    path: str  # from JAX's metadata: transformations, flax modules, primitive
    flops: float  # of its products
    bytes: float  # its operands and its result


def read_operations(program: str) -> dict[str, Operation]:
    """Return the operations of a compiled program by name, from XLA's text; none for a loop, only for what is in it."""
    computations: dict[str, list[str]] = {}
    found: dict[str, tuple[str, str, list[str], str]] = {}
    inside: list[str] = []
    for line in program.splitlines():
        if head := HEAD.match(line):
            inside = computations[head[1]] = []
        elif match := INSTRUCTION.match(line):
            name, shape, opcode, operands, rest = match.groups()
            found[name] = (shape, opcode, re.findall(r"%([\w.\-]+)", operands), rest)
            inside.append(name)

    def within(name: str) -> Iterator[str]:
        called = re.search(r"calls=%([\w.\-]+)", found[name][3])
        yield name
        for each in computations[called[1]] if called else []:
            yield from within(each)

    operations = {}
    for name, (shape, opcode, operands, rest) in found.items():
        if opcode in CONTAINERS:
            continue
        path = re.search(r'op_name="([^"]*)"', rest)
        parts = [found[each] for each in within(name)]
        dots = [part for part in parts if part[1] == "dot"]
        operations[name] = Operation(
            kind=choose_kind(parts, "" if path is None else path[1]),
            shape=re.sub(r"\{[\d,]*\}", "", shape),
            path="" if path is None else path[1],
            flops=sum(count_flops(shape, found[operands[0]][0], rest) for shape, _, operands, rest in dots),
            bytes=count_bytes(shape) + sum(count_bytes(found[each][0]) for each in operands),
        )
    return operations


def choose_kind(parts: list[tuple[str, str, list[str], str]], path: str) -> str:
    """Return the kind of an operation, from (shape, opcode, operands, attributes) of it and of all that it contains."""
    dots = [rest for _, opcode, _, rest in parts if opcode == "dot"]
    if dots:
        return ATTENTION if any("lhs_batch_dims" in rest for rest in dots) else PRODUCTS
    if {opcode for _, opcode, _, _ in parts} <= MOVING | {"fusion"}:
        return MOVES
    return ELEMENTS if not path or "jvp(" in path else OPTIMISER  # only the model and its loss are differentiated


def dimensions(shape: str) -> list[int]:
    """Return the sizes of "f32[12,64]{1,0}"."""
    return [int(size) for size in ARRAY.match(shape)[3].split(",") if size]


def count_bytes(shape: str) -> float:
    """Return the bytes of an array, or of a tuple of arrays, as XLA writes its shape. A predicate has a byte."""
    return sum(
        max(1, int(bits or 8) // 8) * math.prod(int(size) for size in sizes.split(",") if size)
        for _, bits, sizes in ARRAY.findall(shape)
    )


def count_flops(result: str, left: str, attributes: str) -> float:
    """Return the FLOPs of a product, from the shapes of its result and left operand."""
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)[1]
    return 2 * math.prod(dimensions(result)) * math.prod(dimensions(left)[int(i)] for i in contracted.split(",") if i)


def share_time(events: Iterable[tuple[float, float, str]], products: Container[str] = ()) -> dict[str, float]:
    """Share the elapsed time of each instant evenly among the events that run then.

    Args:
        events: (begin, end, name) of each.
        products: names of those that may run on in the thread pool when their event has ended. A gap in which nothing
            runs is theirs if one of them ended last.

    Returns:
        Time by name. The sum is the length of the union of all intervals, and of those gaps.
    """
    edges = sorted(edge for begin, end, name in events for edge in ((begin, 1, name), (end, -1, name)))
    running: collections.Counter[str] = collections.Counter()
    shares: collections.Counter[str] = collections.Counter()
    for (at, change, name), (until, _, _) in itertools.pairwise(edges):
        running[name] += change
        count = running.total()
        if not count and name in products:
            shares[name] += until - at
        for each, number in running.items():
            if number:
                shares[each] += (until - at) * number / count
    return dict(shares)


def trace_thunks(run: Callable[[int], float], steps: int) -> list[tuple[float, float, str]]:
    """Run some steps and return (begin, end, name) of their thunks, in seconds."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run(steps)
        (path,) = Path(directory).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        events = (event for plane in planes for line in plane.lines for event in line.events)
        return [
            (event.start_ns / 1e9, event.end_ns / 1e9, event.name)
            for event in events
            if any(name == "hlo_op" for name, _ in event.stats)
        ]


def time_host(trainer, batches: Iterator, steps: int) -> tuple[float, float]:
    """Return the median seconds of the next batch, and of the call of `train_step` on an idle device."""
    import jax

    state, key, times = trainer.init_state(jax.random.key(0)), jax.random.key(1), []
    for _ in range(steps):
        began = time.perf_counter()
        batch = trainer.strategy.shard_batch(next(batches))
        fetched = time.perf_counter()
        state, metrics = trainer.train_step(state, batch, key)
        times.append((fetched - began, time.perf_counter() - fetched))
        jax.block_until_ready((state, metrics))
    fetching, calling = zip(*times, strict=True)
    return statistics.median(fetching), statistics.median(calling)


def time_call(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def best_seconds(work: Callable[[], object]) -> float:
    """Return the least seconds of five calls, after one that compiles."""
    work()
    return min(time_call(work) for _ in range(5))


def measure_limits(sides: tuple[int, ...] = (1024, 2048, 4096), numbers: int = 2**27) -> tuple[float, float, float]:
    """Return FLOP/s of the best product of square matrices, and bytes/s of a sum and of a negation in place, float32."""
    import jax
    import jax.numpy as jnp

    squares, x = [jnp.ones((side, side)) for side in sides], jnp.ones(numbers)
    multiply, add = jax.jit(jnp.matmul), jax.jit(jnp.sum)
    negate = jax.jit(jnp.negative, donate_argnums=0)

    def negate_in_place() -> None:
        nonlocal x
        x = negate(x).block_until_ready()

    products = (
        2 * len(square) ** 3 / best_seconds(lambda square=square: multiply(square, square).block_until_ready())
        for square in squares
    )
    summed = best_seconds(lambda: add(x).block_until_ready())
    return max(products), x.nbytes / summed, 2 * x.nbytes / best_seconds(negate_in_place)


def shorten(path: str) -> str:
    """Return the path of an operation without what all have, and with one name for all layers."""
    path = re.sub(r"jit\(\w+\)/|GPT\.\w+/", "", path)
    path = path.replace("transpose(jvp(GPT))", "backward").replace("jvp(GPT)", "forward")
    return re.sub(r"h_\d+", "h_*", path) or "not known"


def print_profile(trainer, batches: Iterator, run: Callable[[int], float], turn: float) -> None:
    """Measure the steps of a trainer, and print the tables.

    Args:
        trainer: jaxgpt's.
        batches: its batches.
        run: runs some of its steps with several in flight.
        turn: seconds of each measurement.
    """
    compiled = trainer.lower().compile()
    operations = read_operations(compiled.as_text())
    run(3)
    steps = max(2, round(turn / time_call(lambda: run(1))))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rounds = sorted(time_call(lambda: run(steps)) / steps for _ in range(ROUNDS))
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / (ROUNDS * steps)
    events = trace_thunks(run, steps)
    if not events:
        raise SystemExit("the trace has no thunks: this profile needs JAX_PLATFORMS=cpu")
    fetching, calling = time_host(trainer, batches, min(steps, 20))
    elapsed = (max(end for _, end, _ in events) - min(begin for begin, _, _ in events)) / steps
    products = {name for name, each in operations.items() if each.flops}
    shares = {name: seconds / steps for name, seconds in share_time(events, products).items() if name in operations}
    calls = {name: n / steps for name, n in collections.Counter(name for _, _, name in events).items()}
    print(
        f"\nA step takes {1e3 * statistics.median(rounds):.1f} ms ({1e3 * rounds[0]:.1f} to {1e3 * rounds[-1]:.1f}, "
        f"{ROUNDS} rounds of {steps} steps), with {faults:.0f} page faults; while traced "
        f"{1e3 * elapsed:.1f} ms, of which\n"
    )
    print_kinds(operations, shares, calls, elapsed)
    product, summed, negated = measure_limits()
    counted = compiled.cost_analysis().get("bytes accessed", math.nan)
    print(
        f"\nThe host: {1e3 * fetching:.2f} ms for the next batch; train_step returns after {1e3 * calling:.2f} ms, which is the "
        f"whole step where JAX runs it in the calling thread.\n"
        f"Limits, measured in this process: {product / 1e9:.0f} GFLOP/s in the best product of square matrices, "
        f"{summed / 1e9:.1f} GB/s in a sum and {negated / 1e9:.1f} GB/s in a negation of 512 MiB.\n"
        f"XLA's cost analysis counts {counted / 1e9:.2f} GB a step, {1e3 * counted / max(summed, negated):.1f} ms of memory "
        f"traffic, if nothing stays in the cache.\n"
    )
    print_longest(operations, shares)


def print_kinds(operations: dict[str, Operation], shares: dict[str, float], calls: dict[str, float], elapsed: float):
    """Print milliseconds, arithmetic and memory traffic of a step by kind."""
    print("| kind | ms | share | thunks | GFLOP | GFLOP/s | GB in and out | GB/s |\n|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        names = [name for name in shares if operations[name].kind == kind]
        seconds = sum(shares[name] for name in names)
        flops = sum(operations[name].flops * calls[name] for name in names)
        traffic = sum(operations[name].bytes * calls[name] for name in names)
        rate = f"{flops / 1e9:.2f} | {flops / seconds / 1e9:.0f}" if flops else " | "
        print(
            f"| {kind} | {1e3 * seconds:.2f} | {seconds / elapsed:.0%} | {sum(calls[name] for name in names):.0f} | {rate} "
            f"| {traffic / 1e9:.3f} | {traffic / max(seconds, 1e-9) / 1e9:.1f} |"
        )
    idle = elapsed - sum(shares.values())
    print(f"| dispatch and idle | {1e3 * idle:.2f} | {idle / elapsed:.0%} | | | | | |")


def print_longest(operations: dict[str, Operation], shares: dict[str, float], count: int = 10) -> None:
    """Print the operations that take longest, those of all layers together."""
    groups: dict[tuple[str, ...], list[float]] = collections.defaultdict(list)
    for name, seconds in shares.items():
        each = operations[name]
        groups[re.sub(r"[.\d]+$", "", name), each.shape, shorten(each.path)].append(seconds)
    print("| ms | operations | kind of operation | result | where |\n|---|---|---|---|---|")
    for (name, shape, path), times in sorted(groups.items(), key=lambda group: -sum(group[1]))[:count]:
        print(f"| {1e3 * sum(times):.2f} | {len(times)} | {name} | {shape} | {path} |")
