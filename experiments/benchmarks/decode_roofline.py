"""Count what a GPU that is not there launches and reads for each token that it writes, in the compiled program.

Question:  what does a GPU launch and read for each token that it draws, and when does it wait for the host?
Command:   python experiments/benchmarks/decode_roofline.py [--topology h100:1]
           (needs `pip install "jaxgpt[plan-gpu]"`, XLA's GPU compiler, and no GPU)
Method:    `decode_plain`, and `decode`, the program for all requests, are compiled for 64 tokens, with bfloat16 activations,
           keys and values, and attention to all columns. Kernels and bytes of a token are counted as in roofline.py, in
           the loop without branches of conditionals. The host launches graphs, and waits in each turn of a loop whose
           length is unknown, and for each conditional outside of a graph.
Result:    LOG.md, 2026-11-29, "a token in one CUDA graph".
"""

import argparse
import dataclasses
import os
import re

import jax
import jax.numpy as jnp
from roofline import Program, compile_program

from jaxgpt import GPT, GPTConfig
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.presets import gpt2
from jaxgpt.sample import programs
from jaxgpt.sample.engine import BURST, MAX_STOPS
from jaxgpt.sample.quantize import for_decoding
from jaxgpt.tools.plan.topology import topology_devices

MODELS = {
    "GPT-2 124M": dataclasses.replace(gpt2("124M"), vocab_size=50304, dropout=0.0, bias=False),
    "Llama 1B": GPTConfig(
        vocab_size=128256,
        block_size=4096,
        n_layer=16,
        n_head=32,
        n_kv_head=8,
        n_embd=2048,
        head_dim=64,
        mlp_dim=8192,
        bias=False,
        activation="swiglu",
        norm="rmsnorm",
        position="rope",
        rope_theta=500_000.0,
    ),
}
# model, weights, rows, columns, what is drawn
TABLE = [
    *(("GPT-2 124M", kind, 1, 256, how) for how in ("any", "greedy") for kind in ("bfloat16", "int8")),
    *(("GPT-2 124M", kind, rows, 256, "greedy") for rows in (8, 128) for kind in ("bfloat16", "int8")),
    *(("GPT-2 124M", "bfloat16", rows, 256, "temperature") for rows in (1, 8)),
    *(("GPT-2 124M", "bfloat16", rows, 1024, "greedy") for rows in (1, 8)),
    *(("Llama 1B", kind, 1, 256, "greedy") for kind in ("bfloat16", "int8")),
]


def lower(device, name: str, weights: str, rows: int, columns: int, drawn: str):
    """Lower the program that draws up to BURST tokens. drawn: greedy, temperature, or any, the program for all requests."""
    model, place = GPT(MODELS[name], dtype=jnp.bfloat16), jax.sharding.SingleDeviceSharding(device)
    known = min(50257, MODELS[name].vocab_size)

    def allocate(params):
        params = for_decoding(model, params, weights)[1]
        cache = programs.allocate_cache(model, params, rows, columns, None)
        # Elsewhere than on a CPU, `decode` reads all columns at once.
        cache = jax.tree.map(lambda x: x.replace(block=columns), cache, is_leaf=lambda x: hasattr(x, "block"))
        return params, programs.DecodeState(cache, programs.allocate_rows(jnp.zeros(1), rows, MAX_STOPS, known))

    count, allowed = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((rows, known // 32 + 1), jnp.uint32)
    arrays = *jax.eval_shape(allocate, model.shapes()), count, allowed
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays)
    params, state, count, allowed = arrays
    if drawn == "any":
        return programs.decode.lower(model, params, state, count, BURST, allowed)
    return programs.decode_plain.lower(model, params, state, BURST, columns, drawn == "greedy")


def per_token(program: Program, turns: int) -> tuple[int, int]:
    """Return the number of kernels of a token, and the bytes that they move. turns: how often the loop runs."""
    skipped = "while/cond/" if turns > 1 else "while/cond/|/cond/branch_._fun/(?!dot)"
    kernels = [k for k in program.kernels if k.times == turns and not re.search(skipped, k.where)]
    return len(kernels), sum(k.bytes for k in kernels)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h100:1")
    [device] = topology_devices(parser.parse_args().topology)
    print("| model | weights | rows | columns | drawn | kernels | MB | graphs | loops | conditionals |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in TABLE:
        program = compile_program(lower(device, *case))
        kernels, size = per_token(program, 1 if case[-1] == "any" else BURST)
        waits = program.others.count("kWhile"), program.others.count("kConditional")
        row = *case, kernels, round(size / 1e6), program.graphs, *waits
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    configure_jax()
    main()
