"""How long does a compiled step take at least, if each kernel waits for its arithmetic or for its memory?

Question    where does the time of a training step go on a GPU, before there is one?
Method      the text of the compiled program has every kernel with its operands and results. Each operand and result
            counts once, at the full bandwidth of the memory, and products at the full rate of the data sheet. On a GPU
            kernels run one after another, and each takes the longer of the two. A TPU prefetches for the next.
Command     python experiments/benchmarks/traffic.py experiments/gpt2_124m.py --topology h200:8 [--FIELD VALUE]
            By group, in the table, see roofline.py, which has the same for one model and needs no experiment.
Result      a bound that is sharper than the one of `jaxgpt plan`, which knows FLOPs alone.
"""

import dataclasses
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.cli.console import report_errors
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.cli.options import parse
from jaxgpt.experiment import Experiment
from jaxgpt.files import Result
from jaxgpt.parallel.jax_setup import all_devices, configure_jax
from jaxgpt.parallel.limits import PEAKS
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.tools.plan.topology import topology_devices

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Custom calls that compute nothing.
BOOKKEEPING = {"AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone"}
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
# If they are fused, only the elements that are used count.
VIEWS = {"bitcast", "reshape", "convert", "copy", "transpose"}
FREE = {  # no traffic of their own. What they call is counted separately
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier"),
    *("partition-id", "replica-id", "while", "conditional", "call", "async-start"),
}
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that is written
# Kernels of libraries and of code generators, by a pattern in the instruction. Loops that XLA generates are not listed.
KERNELS = {
    "cuDNN attention forward": r'"__cudnn\$fmha(?!\w*Backward)',
    "cuDNN attention backward": r'"__cudnn\$fmha\w*Backward"',
    "cuBLAS product": r'"__cublas\$',
    "cuDNN fusion": r'"kind": ?"__cudnn\$fusion"',
    "Triton product": r'"kind": ?"__triton_\w*gemm',
    "Triton fusion": r'"kind": ?"__triton"',
    "Pallas": r'custom_call_target="(tpu_custom_call|__gpu\$xla\.gpu\.triton|mosaic_gpu\w*)"',
}


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
    instructions: dict[str, "Instruction"] = dataclasses.field(default_factory=dict)

    @property
    def root(self) -> "Instruction":
        """Return the instruction that gives the result of the computation."""
        return next(x for x in self.instructions.values() if x.is_root)


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction of a computation, linked to the instructions that it reads."""

    within: Computation
    op: str
    arrays: tuple[Array, ...]  # the result, flattened if it is a tuple
    inputs: list["Instruction"]
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
    within: Computation, times: int = 1, *, is_fused: bool = False
) -> Iterator[tuple[Instruction, int, bool]]:
    """Yield every instruction that runs, how often, and whether it is part of a fusion, each before those that it calls."""
    for x in within.instructions.values():
        yield x, times, is_fused
        is_launch = x.kind == "fusion" or (x.op.endswith("-start") and x.kind not in COLLECTIVES)
        if is_launch or x.op in ("while", "call", "conditional"):
            n = times * (_trip_count(x) if x.op == "while" else 1)
            for inner in x.called:
                yield from iter_executions(inner, n, is_fused=is_fused or x.kind == "fusion")


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


def count_products(text: str) -> float:
    """Return the FLOPs of the products and of cuDNN's attention in one run of a program, from `compiled.as_text()`.

    XLA's `cost_analysis()` counts the body of a loop once. Here it counts as often as it runs. Pallas kernels have none.
    """
    return sum(times * count_flops(x) for x, times, *_ in iter_executions(parse_hlo(text)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one run of a program reads, writes and launches on one device."""

    bytes_accessed: float  # read from and written to main memory. A TPU's VMEM does not count
    launches: list[list[float]]  # [times, FLOPs and bytes of one] of each instruction of the schedule
    kernels: dict[str, int]  # launches, by the names in `KERNELS`

    def serial_seconds(self, flops: float, bandwidth: float) -> float:
        """Return the seconds of all kernels in turn, at so many FLOP/s and bytes/s."""
        return math.fsum(times * max(n / flops, accessed / bandwidth) for times, n, accessed in self.launches)


def read_traffic(text: str) -> Traffic:
    """Count the traffic of one run from `compiled.as_text()`."""
    launches: list[list[float]] = []
    kernels: Counter[str] = Counter()
    for x, times, is_fused in iter_executions(parse_hlo(text)):
        if not is_fused:
            launches.append([times, 0.0, count_traffic(x)])
        launches[-1][1] += count_flops(x)
        if x.kind in ("custom-call", "fusion") and not is_fused:
            kernels.update({name: times for name, pattern in KERNELS.items() if re.search(pattern, x.text)})
    accessed = sum(times * accessed for times, _, accessed in launches)
    return Traffic(
        bytes_accessed=accessed, launches=launches, kernels={name: kernels[name] for name in KERNELS if kernels[name]}
    )


def find_parameter(within: Computation, index: int) -> Instruction:
    """Return a parameter of a computation by its index."""
    found = within.instructions.values()
    return next(x for x in found if x.op == "parameter" and x.text.startswith(f"{index})"))


def find_users(x: Instruction) -> list[tuple[Instruction, int]]:
    """Return the instructions that read x, each with the index of this operand."""
    others = x.within.instructions.values()
    return [(user, i) for user in others for i, y in enumerate(user.inputs) if y is x]


def count_traffic(x: Instruction) -> float:
    """Return the bytes of main memory that one instruction outside fusions reads and writes."""
    if x.op in FREE or x.op.endswith(("-done", "-update")) or any(f'"{name}"' in x.text for name in BOOKKEEPING):
        return 0.0
    if x.op in ("slice-start", "dynamic-slice-start"):
        # A TPU prefetches a slice of an array. The first result is the array itself.
        source, part = x.arrays[:2]
        return sum(part.bytes for a in (source, part) if not a.on_chip)
    read = 0.0
    for i, y in enumerate(x.inputs):
        arrays = [a for a in y.arrays if not a.on_chip]
        elements = None
        if x.kind == "fusion" and len(arrays) == 1:
            elements = _elements_read(find_parameter(x.called[0], i))
        elif i == 0 and arrays:
            elements = _slice_read(x)
        whole = sum(a.bytes for a in arrays)
        read += whole if elements is None else min(whole, arrays[0].bits / 8 * elements)
    results = x.arrays
    if x.kind == "fusion":
        outputs = _bytes_written(x.called[0].root)
        if x.op == "fusion-start":  # on a GPU, in a loop. Its operands come before its results
            results = x.arrays[sum(len(y.arrays) for y in x.inputs) :]
        elif "kind=kCustom" in x.text:  # buffers of an asynchronous collective, passed through
            for index in re.findall(r"\{(\d*)\}: \(\d+, ", x.attribute(r"output_to_operand_aliasing=\{(.*?)\}, [a-z]")):
                outputs[int(index or 0)] = 0
    elif x.op in IN_PLACE:
        outputs = [sum(a.bytes for a in x.inputs[IN_PLACE[x.op]].arrays)]
    else:
        outputs = [a.bytes for a in x.arrays]
    written = sum(size for size, a in zip(outputs, results, strict=False) if not a.on_chip)
    if x.op == "custom-call":  # a Pallas kernel may read an operand several times, and states how often
        return max(read + written, float(x.attribute(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"') or 0))
    # Every start but an all-reduce's returns its operands with its results.
    returns_operands = x.op == "send" or (x.op.endswith("-start") and x.kind not in ("all-reduce", "fusion"))
    return max(written, read) if returns_operands else read + written


def _slice_read(x: Instruction) -> int | None:
    """Return the number of elements of its first operand that an instruction reads. None means all."""
    if x.op in ("dynamic-slice", "slice", "gather"):
        return math.prod(x.arrays[0].dims)
    return 0 if x.op in IN_PLACE else None


def _elements_read(x: Instruction) -> int:
    """Return the number of elements of x, a parameter of a fusion or a view of one, that the fusion reads."""
    whole = math.prod(x.arrays[0].dims)
    total = whole if x.is_root else 0
    for user, i in find_users(x):
        if user.op in VIEWS:
            total += _elements_read(user)
        elif user.op == "fusion":
            total += _elements_read(find_parameter(user.called[0], i))
        elif user.op == "tuple" or "AsyncCollectiveDone" in user.text:
            pass  # passed through
        elif user.op in COLLECTIVES and x.within.root.op == "tuple" and "all-reduce-scatter" not in user.text:
            pass  # the middle of an asynchronous collective. Its start has read x
        else:
            part = _slice_read(user) if i == 0 else None
            total += whole if part is None else part
    return total


def _bytes_written(x: Instruction) -> list[int]:
    """Return the bytes that a fusion with root x writes to each array of x. In place, only the update's bytes count."""
    if x.op == "tuple":
        return [n for y in x.inputs for n in _bytes_written(y)]
    if x.op in ("bitcast", "reshape"):
        return _bytes_written(x.inputs[0])
    if x.op == "fusion":
        return _bytes_written(x.called[0].root)
    if x.op == "parameter":
        return [0 for _ in x.arrays]
    return [a.bytes for a in (x.inputs[IN_PLACE[x.op]] if x.op in IN_PLACE else x).arrays]


def traffic(*, topology: str | None = None, experiment: Experiment) -> Result:
    """Count what a training step reads, writes and launches.

    Args:
        topology: devices, as for `jaxgpt plan`. None means this machine
    """
    if topology is not None:
        jax.config.update("jax_platforms", "cpu")  # a plugin compiles, and needs no device of this machine
        jax.config.update("jax_enable_compilation_cache", False)
    configure_jax()
    devices = all_devices() if topology is None else topology_devices(topology)
    vocab_size = experiment.model.vocab_size or experiment.data.open_dataset(experiment.model).tokenizer.vocab_size
    experiment = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, vocab_size=vocab_size))
    text = make_trainer(experiment, devices).lower().compile().as_text()
    found = read_traffic(text)
    values = {
        "gigabytes": found.bytes_accessed / 1e9,
        "launches": sum(times for times, *work in found.launches if any(work)),
    }
    if limits := PEAKS.get(devices[0].device_kind):
        values["memory_ms"] = 1e3 * found.bytes_accessed / limits.memory_bandwidth
        values["in_turn_ms"] = 1e3 * found.serial_seconds(limits.flops, limits.memory_bandwidth)
    rows = [f"{name:<12} {value:,.1f}" for name, value in values.items()]
    rows += [f"{count:,} x {name}" for name, count in found.kernels.items()]
    if limits:
        from roofline import format_groups, read_kernels  # which reads programs by the functions above

        rows.append(format_groups(read_kernels(text), limits.memory_bandwidth, limits.flops))
    return Result(values | {"kernels": found.kernels}, "\n".join(rows))


def main() -> None:
    """Run the command line."""
    words = sys.argv[1:]
    named = words.pop(0) if words and not words[0].startswith("-") else "quickstart"
    with report_errors():
        example = "python experiments/benchmarks/traffic.py experiments/gpt2_124m.py --topology h200:8"
        parse(
            traffic, words, "traffic.py", operand="[EXPERIMENT]", example=example, experiment=load_experiment(named)
        )()


if __name__ == "__main__":
    main()
