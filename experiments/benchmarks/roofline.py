"""The roofline of a training step on a GPU that is not there: launches, bytes and FLOPs by group, from the compiled program.

Question:  what does a step move and multiply, and how fast could the GPU do each of its kernels?
Command:   python experiments/benchmarks/roofline.py [--topology h100:1] [--rows 32] [--context 1024] [--optim muon]
           (needs `pip install "jaxgpt[plan-gpu]"`, XLA's GPU compiler with cuDNN, and no GPU)
Method:    the step is compiled as `jaxgpt plan` compiles it. Each kernel reads its operands and writes its results once, at
           the data sheet's bandwidth, or computes its products at the data sheet's rate, if that takes longer. "In turn"
           is their sum: no kernel overlaps another. Kernels of one graph are launched by the GPU itself.
           Gathers and slices count what they read, scatters and updates in place what they write. XLA chooses tiles of
           products by timing them on a GPU: here it has none, so that a few fusions around products may differ.
Result:    see docs/results.md, "The step on an H100, by group".
"""

import argparse
import collections
import dataclasses
import math
import os
import re
import tempfile
from pathlib import Path

from jaxgpt.tools.plan.collectives import Body, Instruction, count_bytes, read_bodies

# The group of a kernel, by the first of these that its place in the model has, and whether it multiplies.
GROUPS = {
    "attention": r"attn\.attend",
    "head": r"unembed|wte\.logits|lm_head",
    "norms": r"/ln_|_norm/",
    "activation": r"/mlp/|mlp\.",
    "residual, q, k, v": r"run_blocks",
    "embedding": r"embed",
    "loss": r"hidden_states|jvp|transpose|loss|while",
}
NOT_LAUNCHED = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional"}
NOT_LAUNCHED |= {"after-all", "opt-barrier", "partition-id", "replica-id"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction that the device runs, as often as one step does."""

    name: str
    group: str
    where: str  # its place in the model
    times: int
    bytes: int  # of one execution, read and written
    flops: int  # of its products, likewise

    def seconds(self, bandwidth: float, rate: float) -> float:
        """Return how long all executions take at least."""
        return self.times * max(self.bytes / bandwidth, self.flops / rate)


def read_kernels(text: str) -> list[Kernel]:
    """Return the kernels of a compiled program, `compiled.as_text()`."""
    bodies, times = read_bodies(text)
    fused = {called for body in bodies.values() for x in body.values() if x.op == "fusion" for called in x.called}
    found = []
    for computation, body in bodies.items():
        inlined = computation in fused or not times[computation]
        for name, x in body.items():
            if inlined or x.op in NOT_LAUNCHED or x.op.endswith("-done") or _is_reducer(body):
                continue
            parts = [bodies[called] for called in x.called if x.op == "fusion"]
            where = next(iter(re.findall(r'op_name="([^"]*)"', x.rest)), "")
            flops = sum(_product_flops(y, part) for part in parts or [{name: x} | body] for y in _own(part, x, parts))
            flops += _attention_flops(x, body)
            size = _moved(x, body, parts[0] if parts else None)
            found.append(Kernel(name, _group(x, where, flops), where, times[computation], size, flops))
    return found


def _own(part: Body, x: Instruction, parts: list[Body]) -> list[Instruction]:
    return list(part.values()) if parts else [x]


def _is_reducer(body: Body) -> bool:
    """Return whether a computation is the scalar function of a reduction, a sort or a scatter."""
    return all(re.match(r"\(?\w+\[\]", x.shape) for x in body.values())


def _group(x: Instruction, where: str, flops: int) -> str:
    if "cudnn" in x.rest and x.op == "custom-call" and "fmha" in x.rest:
        return "attention"
    if "jvp" not in where and "transpose" not in where and "hidden_states" not in where:
        return "products of the optimiser" if flops else "optimiser, norm of gradients"
    name = next((name for name, pattern in GROUPS.items() if re.search(pattern, where)), "other")
    if flops:
        return "products of the head" if name == "head" else "products of the blocks"
    return {"head": "loss", "residual, q, k, v": "residual, copies, casts"}.get(name, name)


def _sizes(shape: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", re.findall(r"\[([\d,]*)\]", shape)[0])]


def _product_flops(x: Instruction, body: Body) -> int:
    """Return the FLOPs of a product, 2 for each pair that it multiplies. 0 of another instruction."""
    is_call = x.op == "custom-call" and "__cublas" in x.rest
    if x.op != "dot" and not is_call:
        return 0
    left = _sizes(body[x.operands[0]].shape)
    contracted = re.findall(r'lhs_contracting_dim\w*[="\[:{]*([\d,"]*)', x.rest)
    axes = [int(n) for n in re.findall(r"\d+", contracted[0])]
    return 2 * math.prod(_sizes(x.shape)) * math.prod(left[axis] for axis in axes)


def _attention_flops(x: Instruction, body: Body) -> int:
    """Return the FLOPs of cuDNN's attention: 2 products forward and 5 backward, of which the causal mask needs half."""
    if x.op != "custom-call" or "__cudnn$fmha" not in x.rest:
        return 0
    B, T, N, H = _sizes(body[x.operands[0]].shape)
    products = 5 if "Backward" in x.rest else 2
    return products * B * N * T * T * H


def _moved(x: Instruction, body: Body, part: Body | None) -> int:
    """Return the bytes that a kernel reads and writes."""
    written = count_bytes(x.shape)
    operands = list(dict.fromkeys(x.operands))
    if part is None:
        return written + sum(count_bytes(body[name].shape) for name in operands)
    read = 0
    parameters = {int(y.rest.split(")")[0]): name for name, y in part.items() if y.op == "parameter"}
    in_place = {"dynamic-update-slice", "scatter"}
    for number, operand in enumerate(x.operands):
        if operand not in operands:
            continue
        operands.remove(operand)
        name, users = parameters[number], []
        names = {name}
        for inner, y in part.items():  # through bitcasts
            if names & set(y.operands):
                (names.add(inner) if y.op == "bitcast" else users.append((y, names & set(y.operands))))
        whole = count_bytes(body[operand].shape)
        if users and all(y.op in ("dynamic-slice", "gather") and y.operands[0] in names for y, _ in users):
            read += min(whole, sum(count_bytes(y.shape) for y, _ in users))
        elif users and all(y.op in in_place and y.operands[0] in names for y, _ in users):
            updates = sum(count_bytes(part[y.operands[-1 if y.op == "scatter" else 1]].shape) for y, _ in users)
            written += 2 * updates - whole  # what it adds to is read and written
        else:
            read += whole
    return read + written


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler says of a step."""

    kernels: list[Kernel]
    temporaries: int  # bytes
    graphs: int  # CUDA graphs that the host launches
    others: list[str]  # what the host launches or waits for besides, by its kind

    @property
    def bytes(self) -> int:
        """Return the bytes that a step moves."""
        return sum(k.times * k.bytes for k in self.kernels)

    @property
    def launches(self) -> int:
        """Return the kernels that a step runs."""
        return sum(k.times for k in self.kernels)


def compile_program(lowered, options: dict | None = None) -> Program:
    """Compile a lowered step, and read what the host would do: XLA writes that into a folder only."""
    with tempfile.TemporaryDirectory() as directory:
        dump = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=dump | (options or {}))
        [thunks] = Path(directory).glob("*thunk_sequence_after_thunk_passes.txt")
        top = [line.split()[1] for line in thunks.read_text().splitlines() if re.match(r"\d+: ", line)]
    memory = compiled.memory_analysis()
    graphs = top.count("kCommandBuffer")
    others = [kind for kind in top if kind != "kCommandBuffer"]
    return Program(read_kernels(compiled.as_text()), memory.temp_size_in_bytes, graphs, others)


def format_table(program: Program, bandwidth: float, rate: float) -> str:
    """Return the table by group, in Markdown."""
    groups = collections.defaultdict(list)
    for kernel in program.kernels:
        groups[kernel.group].append(kernel)
    rows = ["| group | launches | GB | TFLOP | roofline, ms |", "|---|---|---|---|---|"]
    order = sorted(groups.items(), key=lambda item: -sum(k.seconds(bandwidth, rate) for k in item[1]))
    for name, kernels in [*order, ("**sum**", program.kernels)]:
        launches, size = (sum(k.times * x for k, x in pairs) for pairs in _pairs(kernels))
        flops = sum(k.times * k.flops for k in kernels)
        seconds = sum(k.seconds(bandwidth, rate) for k in kernels)
        rows.append(f"| {name} | {launches} | {size / 1e9:.1f} | {flops / 1e12:.1f} | {1e3 * seconds:.2f} |")
    rows.append(f"\n{program.temporaries / 2**30:.2f} GiB of temporaries; {program.graphs} CUDA graphs")
    if program.others:
        rows.append(f"beside the graphs: {', '.join(sorted(set(program.others)))}")
    return "\n".join(rows)


def _pairs(kernels: list[Kernel]):
    return [(k, 1) for k in kernels], [(k, k.bytes) for k in kernels]


def main() -> None:
    """Print the table of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h100:1")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--optim", default="adamw")
    parser.add_argument("--longest", type=int, default=0, help="also print so many of the longest kernels")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxgpt.parallel.jax_setup import configure_jax

    configure_jax()
    from gpu.setting import Setting
    from gpu.steps import gpt2_experiment
    from jaxgpt.parallel.limits import PEAKS
    from jaxgpt.parallel.trainer import make_trainer
    from jaxgpt.tools.plan.topology import topology_devices

    devices = topology_devices(args.topology)
    setting = Setting(tokens=args.rows * args.context, contexts=(args.context,))
    experiment = gpt2_experiment(setting, args.context)
    experiment = dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, name=args.optim))
    program = compile_program(make_trainer(experiment, devices).lower())
    peaks = PEAKS[devices[0].device_kind]
    print(format_table(program, peaks.memory_bandwidth, peaks.flops))
    for k in sorted(program.kernels, key=lambda k: -k.seconds(peaks.memory_bandwidth, peaks.flops))[: args.longest]:
        ms = 1e3 * k.seconds(peaks.memory_bandwidth, peaks.flops)
        print(f"{ms:6.3f} ms {k.times:3} x {k.bytes / 1e6:8.1f} MB {k.group:24} {k.name:32} {k.where[-90:]}")


if __name__ == "__main__":
    main()
