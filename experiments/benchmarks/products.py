"""Time the product of a few rows and a large matrix, as in decoding, by dtype, form and number of rows, on CPU.

Question:  bytes of weights per second in a chain of products 768 <-> 3072 (GPT-2's MLP) that do not fit in the cache.
Command:   python experiments/benchmarks/products.py
Method:    all forms in turns, the best of --rounds by the clock; and the lower quartile of the processor time of all
           cores, divided by their number, which a busy machine does not disturb. The last line is the speed of a sum.
Result:    LOG.md, 2026-11-23, "products of a few rows on CPU".
"""

import argparse
import os
import statistics
import time

import jax
import jax.numpy as jnp

from jaxgpt.sample.quantize import DecodeMatrix

WIDTH, HIDDEN, LAYERS = 768, 3072, 12
FORMS = ("float32", "bfloat16", "int8")


def products(multiply):
    """Return the jitted chain of all layers' products."""

    def run(x_UD: jax.Array, layers: list) -> jax.Array:
        for up, down in layers:
            x_UD = x_UD + 0.1 * multiply(down, jax.nn.relu(multiply(up, x_UD)))
        return x_UD

    return jax.jit(run)


def main() -> None:
    """Measure all forms in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    plain = [
        (jax.random.normal(up, (HIDDEN, WIDTH)) * 0.02, jax.random.normal(down, (WIDTH, HIDDEN)) * 0.02)
        for up, down in zip(keys[::2], keys[1::2], strict=True)
    ]
    forms = {"float32, x @ matrix.T": (products(lambda matrix_FD, x_UD: x_UD @ matrix_FD.T), plain)}
    for dtype in FORMS:
        packed = [tuple(DecodeMatrix.quantize(matrix_FD, dtype) for matrix_FD in layer) for layer in plain]
        forms[dtype] = (products(DecodeMatrix.matmul), packed)
    ones = jnp.ones(2**25)
    add = jax.jit(jnp.sum)
    forms["a sum"] = (lambda _, ones: add(ones), ones)
    found = {}
    for rows in options.rows:
        x_UD = jnp.ones((rows, WIDTH))
        for name, (run, weights) in forms.items():
            run(x_UD, weights).block_until_ready()  # compiles
            found[name, rows] = []
        for _ in range(options.rounds):
            for name, (run, weights) in forms.items():
                began, used = time.perf_counter(), time.process_time()
                run(x_UD, weights).block_until_ready()
                cores = (time.process_time() - used) / len(os.sched_getaffinity(0))
                found[name, rows].append((time.perf_counter() - began, cores))
    print(f"| GB/s by the clock (by processor time) | {' | '.join(f'{rows} rows' for rows in options.rows)} |")
    print("|---" * (len(options.rows) + 1) + "|")
    for name, (_, weights) in forms.items():
        size = sum(x.nbytes for x in jax.tree.leaves(weights)) / 1e9
        cells = []
        for rows in options.rows:
            clock, cores = zip(*found[name, rows], strict=True)
            cells.append(f"{size / min(clock):.1f} ({size / statistics.quantiles(cores)[0]:.1f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
