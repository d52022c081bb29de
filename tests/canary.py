"""Programs that XLA on CPU has computed wrongly, and generated ones of a GPT's shapes, compared with float64.

    python -m tests.canary           the programs that failed
    python -m tests.canary 12        and 12 generated models: losses, gradients, X-ray, lenses, probes and scores

Each program is compiled, run without jit, and run without jit in float64. It prints a line of JSON for each deviation of
the compiled result that rounding does not explain, and last how many numbers it compared. `--fused` leaves the reductions
fused, as XLA has them by default, to see what the flag of `configure_jax` repairs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config import GPTConfig
from jaxgpt.interventions import lens
from jaxgpt.interventions.lens import fit_jacobian_lens, fit_probe, logit_lens
from jaxgpt.layers.block import Compute
from jaxgpt.loss import make_loss, next_token_loss
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.sample.score import _logprobs
from jaxgpt.tools.xray.activations import capture_activations

# A compiled result may be this many times as far from float64 as the one without jit is, or as far as this part of the
# largest magnitude: sums in another order. What was seen of the compiler's errors was from 0.002 of it to NaN.
TIMES, PART = 100.0, 2e-5
MANY_ROWS = 33_001  # above 2^15, where rows went wrong

Program = tuple[str, Callable[..., Any], tuple]  # name, function of arrays, float32 arguments


def known_programs() -> Iterator[Program]:
    """Programs that jaxlib 0.10.2 to 0.12.0.1 computed wrongly."""
    draw = np.random.default_rng(0)
    x_RST = draw.normal(size=(5, 60, 60)).astype(np.float32)
    for constant in (0.0, 0.5, 1.0):

        def weighted(x_RST, constant=constant):
            return jnp.sum((x_RST @ jnp.full_like(x_RST, constant)) * x_RST, axis=-1)

        yield f"sum of a product of [5, 60, 60] by {constant}", jax.jit(weighted), (x_RST,)
    rows_UD = np.stack([np.arange(32_769), np.zeros(32_769), np.zeros(32_769)], axis=1).astype(np.float32)
    squares = jax.jit(jax.vmap(lambda row_D: jnp.sum((jnp.eye(3, dtype=row_D.dtype) @ row_D) ** 2)))
    yield "squares of 32,769 mapped products (jax#39103)", squares, (rows_UD,)
    config = GPTConfig(
        vocab_size=32,
        block_size=256,
        n_layer=2,
        n_head=2,
        n_embd=16,
        norm="rmsnorm",
        norm_position="post",
        activation="swiglu",
    )
    model, params, tokens_BT = make(config, 2)
    yield "Jacobian lens of [2, 256]", lambda params: fit_jacobian_lens(model(params), params, tokens_BT), (params,)


def make(config: GPTConfig, rows: int) -> tuple[Callable[[Any], Any], Any, np.ndarray]:
    """Return (a function from parameters to a model of their dtype, random parameters, tokens)."""
    draw = np.random.default_rng(1)
    shapes = config.make_model().shapes()

    def fill(path, x):
        middle = 1.0 if path[-1].key == "scale" and not config.norm_offset else 0.0
        return (middle + 0.2 * draw.normal(size=x.shape)).astype(np.float32)

    def model(params):
        return config.make_model(Compute(jax.tree.leaves(params)[0].dtype))

    tokens_BT = draw.integers(0, config.vocab_size, (rows, config.block_size)).astype(np.int32)
    return model, jax.tree.map_with_path(fill, shapes), tokens_BT


def generated_programs(seed: int) -> Iterator[Program]:
    """What is computed of one random architecture, of odd sizes."""
    pick = random.Random(seed)
    n_head = pick.choice((1, 2, 3, 5))
    config = GPTConfig(
        vocab_size=pick.choice((11, 33, 65, 257)),
        block_size=pick.choice((7, 33, 100, 129)),
        n_layer=pick.choice((1, 2)),
        n_head=n_head,
        n_kv_head=pick.choice((1, n_head)),
        n_embd=n_head * pick.choice((2, 6, 10, 14)),
        norm=pick.choice(("layernorm", "rmsnorm")),
        norm_position=pick.choice(("pre", "post", "output", "sandwich")),
        activation=pick.choice(("gelu", "gelu_tanh", "relu2", "swiglu")),
        position=pick.choice(("learned", "rope")),
        qk_norm=pick.choice((False, True)),
        bias=pick.choice((False, True)),
        tie_embeddings=pick.choice((False, True)),
        remat=pick.choice(("none", "full")),
    )
    model, params, tokens_BT = make(config, pick.choice((1, 3, 4)))
    batch = Batch(inputs_BT=tokens_BT, targets_BT=np.roll(tokens_BT, -1, axis=1))
    size = f"{seed}: {config.n_layer} x {config.n_embd}, {list(tokens_BT.shape)}, {config.norm_position}"

    def loss(params):
        grads_of = jax.value_and_grad(lambda params: make_loss(model(params))(params, batch, None)[0])
        return jax.jit(grads_of)(params)

    def seen(params):
        found = capture_activations(model(params), params, tokens_BT[0].tolist())
        return [found.logits_V, found.weights_LNTS, found.hidden_LTF, found.start_T, found.branches, found.norms]

    def scored(params):
        wanted_BT = jnp.arange(tokens_BT.size).reshape(tokens_BT.shape) % 3 > 0
        return _logprobs(model(params), params, *map(jnp.asarray, (batch.inputs_BT, batch.targets_BT)), wanted_BT)

    def probed(x_UD):
        lens.STEPS = 4  # without jit each takes half a second
        return fit_probe(x_UD, np.arange(len(x_UD)) % 3).loss  # the weights are at the end of a search

    yield f"loss and gradients {size}", loss, (params,)
    yield f"X-ray {size}", seen, (params,)
    yield f"logit lens {size}", lambda params: logit_lens(model(params), params, tokens_BT), (params,)
    yield f"Jacobian lens {size}", lambda params: fit_jacobian_lens(model(params), params, tokens_BT), (params,)
    yield f"scores {size}", scored, (params,)
    rows = np.random.default_rng(seed).normal(size=(MANY_ROWS, pick.choice((3, 5, 13)))).astype(np.float32)
    yield f"probe of {list(rows[:300].shape)}", probed, (rows[:300],)

    @jax.jit
    def statistics(x_UD):
        """The loss of many rows as logits, its gradient, and their norms."""
        targets_BT = jnp.zeros((1, len(x_UD)), jnp.int32)
        nats = jax.value_and_grad(lambda x_UD: next_token_loss(x_UD[None], targets_BT, None)[0])(x_UD)
        return nats, jnp.linalg.norm(x_UD, axis=-1), jax.nn.softmax(x_UD @ x_UD[:7].T), jnp.var(x_UD, axis=0)

    yield f"statistics of {list(rows.shape)}", statistics, (rows,)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Compute without jit, in float64, also where the code names float32."""
    float32 = jnp.float32
    try:
        with jax.enable_x64(True), jax.disable_jit():
            jnp.float32 = jnp.float64
            yield
    finally:
        jnp.float32 = float32


def leaves(tree: Any) -> list[np.ndarray]:
    found = [np.asarray(x) for x in jax.tree.leaves(tree) if not isinstance(x, str)]
    return [x.astype(np.float64) for x in found if x.dtype.kind == "f"]


def deviations(program: Program) -> tuple[list[dict[str, Any]], int]:
    """Return the leaves of a compiled result that rounding does not explain, and how many numbers were compared."""
    name, function, arguments = program
    compiled = leaves(function(*arguments))
    with jax.disable_jit():
        plain = leaves(function(*arguments))
    with in_float64():
        exact = leaves(function(*jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arguments)))
    assert len(compiled) == len(plain) == len(exact), name
    found, scale = [], max((float(np.nanmax(np.abs(x), initial=0.0)) for x in exact), default=0.0)
    for n, (x, y, z) in enumerate(zip(compiled, plain, exact, strict=True)):
        assert x.shape == y.shape == z.shape, (name, n)
        if np.array_equal(x, z, equal_nan=True):
            continue
        largest = max(float(np.nanmax(np.abs(z), initial=0.0)), 1e-3 * scale) or 1.0
        far, plainly = (float(np.max(np.abs(np.where(np.isnan(z), 0.0, v - z)))) / largest for v in (x, y))
        if not far <= max(PART, TIMES * plainly):  # NaN is not
            found.append({"program": name, "leaf": n, "shape": list(x.shape), "deviation": far, "without jit": plainly})
    return found, sum(x.size for x in compiled)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=int, nargs="?", default=0)
    parser.add_argument("--fused", action="store_true")
    options = parser.parse_args()
    if not options.fused:
        configure_jax()
    compared = 0
    programs = [*known_programs(), *(p for seed in range(options.models) for p in generated_programs(seed))]
    for program in programs:
        found, count = deviations(program)
        compared += count
        for line in found:
            print(json.dumps(line), flush=True)
    print(json.dumps({"programs": len(programs), "numbers": compared, "flags": os.environ.get("XLA_FLAGS", "")}))


if __name__ == "__main__":
    main()
