"""Count what a training step moves and multiplies on a GPU or TPU that is not there, by group, in the compiled program.

Question:  what does a step move and multiply, and how fast could the device do each of its kernels?
Command:   python experiments/benchmarks/roofline.py [--topology h100:1] [--rows 32] [--context 1024] [--optim muon]
           (needs `pip install "jaxgpt[plan-gpu]"`, XLA's GPU compiler with cuDNN, and no GPU. `--topology v6e:1x1` needs
           `jaxgpt[tpu]` and no TPU. What it keeps in VMEM counts no bytes, and what its kernels overlap is not seen)
Method:    the step is compiled as `jaxgpt plan` compiles it, and traffic.py counts what each kernel reads, writes and
           multiplies. A kernel takes its bytes at the data sheet's bandwidth or its products at the data sheet's rate,
           whichever is longer. The sum is of kernels in turn. Those of one CUDA graph are launched by the GPU itself.
           XLA chooses tiles by timing them on a GPU: here it has none, so that fusions around products may differ.
Result:    docs/results/accelerators.md, under "The step on an H100, by group".
"""

import argparse
import collections
import dataclasses
import os
import re
import tempfile
from pathlib import Path

import jax
from traffic import FREE, count_flops, count_traffic, iter_executions, parse_hlo

# The group of a kernel that does not multiply, by the first of these that its place in the model has.
GROUPS = {
    "attention": r"attn\.attend",
    "loss": r"unembed|wte\.logits|lm_head",
    "norms": r"/ln_|_norm/",
    "activation, MLP's casts": r"/mlp/|mlp\.",
    "residual, copies, casts": r"run_blocks",
    "embedding": r"embed",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction that the device runs, as often as one step does."""

    name: str
    where: str  # its place in the model
    kind: str  # the instruction: fusion, custom-call, copy ...
    times: int
    bytes: int  # that one execution reads and writes
    flops: int  # that its products take in one execution

    @property
    def group(self) -> str:
        """Return the row of the table that it belongs to."""
        if "dot_product_attention" in self.where:
            return "attention"
        if not re.search(r"jvp|transpose\(|hidden_states", self.where):
            return "products of the optimiser" if self.flops else "optimiser, norm of gradients"
        name = next((name for name, pattern in GROUPS.items() if re.search(pattern, self.where)), "loss")
        if self.flops:
            return "products of the head" if name == "loss" else "products of the blocks"
        return name

    def seconds(self, bandwidth: float, rate: float) -> float:
        """Return how long all executions take at least."""
        return self.times * max(self.bytes / bandwidth, self.flops / rate)


def read_kernels(text: str) -> list[Kernel]:
    """Return the kernels of a compiled program, `compiled.as_text()`."""
    kernels = []
    for x, times, is_fused in iter_executions(parse_hlo(text)):
        if not is_fused and not {x.op, x.kind} & FREE and not x.op.endswith(("-done", "-update")):
            name = next(name for name, y in x.within.instructions.items() if y is x)
            kernels.append(Kernel(name, x.attribute(r'op_name="([^"]*)"'), x.kind, times, int(count_traffic(x)), 0))
        if (flops := count_flops(x)) and kernels:
            kernels[-1] = dataclasses.replace(kernels[-1], flops=kernels[-1].flops + int(flops))
    return kernels


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step: its kernels, its memory, and what the host has to do."""

    kernels: list[Kernel]
    temporaries: int  # bytes
    said: str  # the compiler's own count, which that for GPUs does not give
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


def compile_program(lowered, options: dict | None = None, *, dumps: bool = True) -> Program:
    """Compile a lowered step, and read what the host would do: XLA for GPUs writes that into a folder only."""
    with tempfile.TemporaryDirectory() as directory:
        dump = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=(dump if dumps else {}) | (options or {}))
        thunks = [path.read_text() for path in Path(directory).glob("*thunk_sequence_after_thunk_passes.txt")]
    assert len(thunks) == dumps
    launched, graph = [], None  # a graph's own lines are indented further than it is
    for indent, kind in re.findall(r"^( *)\d+: (\w+)", "".join(thunks), re.MULTILINE):
        if graph is None or len(indent) <= graph:
            launched.append(kind)
            graph = len(indent) if kind == "kCommandBuffer" else None
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    counted = f"{cost.get('bytes accessed', 0) / 1e9:.1f} GB and {cost.get('flops', 0) / 1e12:.1f} TFLOP"
    graphs = launched.count("kCommandBuffer")
    others = [kind for kind in launched if kind != "kCommandBuffer"]
    return Program(read_kernels(compiled.as_text()), memory.temp_size_in_bytes, counted if cost else "", graphs, others)


def format_groups(kernels: list[Kernel], bandwidth: float, rate: float) -> str:
    """Return the table by group, in Markdown, the longest first."""
    groups = collections.defaultdict(list)
    for kernel in kernels:
        groups[kernel.group].append(kernel)
    rows = ["| group | launches | GB | TFLOP | roofline, ms |", "|---|---|---|---|---|"]
    order = sorted(groups.items(), key=lambda item: -sum(k.seconds(bandwidth, rate) for k in item[1]))
    for name, members in [*order, ("**sum**", kernels)]:
        launches = sum(k.times for k in members)
        size, flops = sum(k.times * k.bytes for k in members), sum(k.times * k.flops for k in members)
        seconds = sum(k.seconds(bandwidth, rate) for k in members)
        rows.append(f"| {name} | {launches:,} | {size / 1e9:,.1f} | {flops / 1e12:,.1f} | {1e3 * seconds:,.2f} |")
    return "\n".join(rows)


def format_table(program: Program, bandwidth: float, rate: float) -> str:
    """Return the table of a program, and what the compiler says of it."""
    rows = [format_groups(program.kernels, bandwidth, rate)]
    rows.append(f"\n{program.temporaries / 2**30:.2f} GiB of temporaries; {program.graphs} CUDA graphs")
    if program.said:
        rows.append(f"the compiler's own count, with the body of a loop once: {program.said}")
    if program.others:
        rows.append(f"beside the graphs: {', '.join(sorted(set(program.others)))}")
    return "\n".join(rows)


def main() -> None:
    """Print the table of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h100:1")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--optim", default="adamw")
    parser.add_argument("--longest", type=int, default=0, help="also print so many of the longest kernels")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxgpt.parallel.jax_setup import configure_jax

    configure_jax()
    jax.config.update("jax_enable_compilation_cache", False)  # nothing here can load a GPU's program
    from gpu.setting import Setting
    from gpu.steps import gpt2_experiment

    from jaxgpt.parallel.limits import PEAKS
    from jaxgpt.parallel.trainer import make_trainer
    from jaxgpt.tools.plan.topology import topology_devices

    devices = topology_devices(args.topology)
    setting = Setting(tokens=args.rows * args.context, contexts=(args.context,), n_layer=args.layers)
    experiment = gpt2_experiment(setting, args.context)
    experiment = dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, name=args.optim))
    program = compile_program(make_trainer(experiment, devices).lower(), dumps=devices[0].platform != "tpu")
    peaks = PEAKS[devices[0].device_kind]
    print(format_table(program, peaks.memory_bandwidth, peaks.flops))
    for k in sorted(program.kernels, key=lambda k: -k.seconds(peaks.memory_bandwidth, peaks.flops))[: args.longest]:
        ms = 1e3 * k.seconds(peaks.memory_bandwidth, peaks.flops)
        print(f"{ms:6.3f} ms {k.times:3} x {k.bytes / 1e6:8.1f} MB {k.group:24} {k.name:32} {k.where[-90:]}")


if __name__ == "__main__":
    main()
