"""How long does a compiled step take at least, if each kernel waits for its arithmetic or for its memory?

Question    where does the time of a training step go on a GPU, before one is at hand?
Method      the text of the compiled program has every kernel with its operands and results. Each operand and result
            counts once, at the full bandwidth of the memory, and products at the full rate of the data sheet. On a GPU
            kernels run one after another, and each takes the longer of the two. A TPU prefetches for the next.
Command     python experiments/benchmarks/traffic.py experiments/gpt2_124m.py --topology h200:8 [--FIELD VALUE]
Result      a bound that is sharper than the one of `jaxgpt plan`, which knows FLOPs and links alone.
"""

import dataclasses
import math
import re
import sys
from collections import Counter

import jax

from jaxgpt.cli.console import report_errors
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.cli.options import parse
from jaxgpt.experiment import Experiment
from jaxgpt.files import Result
from jaxgpt.parallel.jax_setup import all_devices, configure_jax
from jaxgpt.parallel.limits import PEAKS
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.tools.plan.hlo import (
    BOOKKEEPING,
    COLLECTIVES,
    Computation,
    Instruction,
    count_flops,
    iter_executions,
    parse_hlo,
)
from jaxgpt.tools.plan.topology import topology_devices

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
    for x, times, _, is_fused in iter_executions(parse_hlo(text)):
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
    found = read_traffic(make_trainer(experiment, devices).lower().compile().as_text())
    values = {"gigabytes": found.bytes_accessed / 1e9, "launches": sum(times for times, *_ in found.launches)}
    if limits := PEAKS.get(devices[0].device_kind):
        values["memory_ms"] = 1e3 * found.bytes_accessed / limits.memory_bandwidth
        values["in_turn_ms"] = 1e3 * found.serial_seconds(limits.flops, limits.memory_bandwidth)
    rows = [f"{name:<12} {value:,.1f}" for name, value in values.items()]
    rows += [f"{count:,} x {name}" for name, count in found.kernels.items()]
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
