"""What a token costs on a GPU that is not there: kernels, bytes and what waits for the host, from the compiled program."""

import argparse
import os

from roofline import compile_program

STEPS = 64
MODELS = {
    "gpt2": dict(vocab_size=50304, block_size=1024, n_layer=12, n_head=12, n_embd=768, bias=False),
    "llama-1b": dict(
        vocab_size=128256, block_size=4096, n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, head_dim=64, mlp_dim=8192,
        bias=False, activation="swiglu", norm="rmsnorm", position="rope", rope_theta=500_000.0,
    ),
}  # fmt: skip


def lower_decode(name: str, weights: str, rows: int, device, *, columns=256, live=256, form="greedy"):
    """Lower the program that draws tokens for a device. form: "greedy", "temperature", or "engine", for any request."""
    import jax
    import jax.numpy as jnp

    from jaxgpt import GPT, GPTConfig
    from jaxgpt.sample import programs
    from jaxgpt.sample.engine import BURST, MAX_STOPS
    from jaxgpt.sample.quantize import for_decoding

    model = GPT(GPTConfig(**MODELS[name]), dtype=jnp.bfloat16)

    def allocate(params):
        params = for_decoding(model, params, weights)[1]
        cache = programs.allocate_cache(model, params, rows, columns, None)
        like = jax.tree.leaves(params)[0]
        return params, programs.DecodeState(cache, programs.allocate_rows(like, rows, MAX_STOPS, 50257))

    place = jax.sharding.SingleDeviceSharding(device)
    found = jax.eval_shape(allocate, model.shapes())
    params, state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), found)
    if form != "engine":
        return programs.decode_plain.lower(model, params, state, STEPS, live, form == "greedy")
    is_layer = lambda x: isinstance(x, programs.LayerCache)  # noqa: E731
    cache = jax.tree.map(lambda x: x.replace(block=columns), state.cache, is_leaf=is_layer)
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    allowed = jax.ShapeDtypeStruct((rows, 50257 // 32 + 1), jnp.uint32, sharding=place)
    return programs.decode.lower(model, params, state.replace(cache=cache), number, BURST, allowed)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="h100:1")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--weights", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--live", type=int, default=256)
    parser.add_argument("--form", default="greedy")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxgpt.parallel.jax_setup import configure_jax

    configure_jax()
    from jaxgpt.tools.plan.topology import topology_devices

    [device] = topology_devices(args.topology)
    for rows in args.rows:
        lowered = lower_decode(args.model, args.weights, rows, device, columns=args.columns, live=args.live, form=args.form)
        program = compile_program(lowered)
        steps = STEPS if args.form != "engine" else 1
        print(args.model, args.weights, rows, args.form, args.columns, args.live,
              f"{program.launches / steps:.1f} kernels, {program.bytes / steps / 1e6:.0f} MB", program.graphs, program.others, flush=True)
        if args.list:
            for k in program.kernels:
                print(f"{k.times:4} {k.bytes / 1e6:10.3f} MB {k.flops/1e6:8.1f} MF {k.name:40} {k.where[-110:]}")


if __name__ == "__main__":
    main()
