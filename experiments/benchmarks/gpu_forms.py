"""How far from float32 are losses, gradients and a training in bfloat16, with the forms for GPUs and without them?

Question:  does a step that moves a quarter fewer bytes compute as well?
Command:   python experiments/benchmarks/gpu_forms.py [--text shakespeare.txt] [--steps 500] [--seeds 5]
Method:    on a CPU, which rounds to bfloat16 and float16 where a GPU does, but for the scores inside cuDNN's attention.
           1. Logits of 768 numbers and 50,304 tokens around three values, against float64: the shift of the mean loss,
              the root of the mean square error per token, and the error of the logits' gradient, as norms.
           2. Gradients of nanoGPT's small CPU model (4 layers, 128 wide, characters) at its initial values, of some
              seeds: the norm of the difference from float32's over the norm of float32's.
           3. The losses of one training in float32, in bfloat16, and in bfloat16 with the forms: same values, same batches.
Result:    LOG.md, 2026-11-29, "what a step of GPT-2 124M moves on an H100, form by form".
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt import Experiment, GPTConfig, OptimConfig
from jaxgpt.batch import Batch
from jaxgpt.layers.block import Compute
from jaxgpt.layers.gpu import float16_logits
from jaxgpt.layers.linear import float32_logits
from jaxgpt.parallel.jax_setup import configure_jax, device_name
from jaxgpt.parallel.trainer import make_losses
from jaxgpt.train import init_state, train_step

U, D, V = 512, 768, 50_304
SMALL = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, bias=False, activation="gelu")
KINDS = {"float32": (jnp.float32, False), "bfloat16": (jnp.bfloat16, False), "forms": (jnp.bfloat16, True)}


def bfloat16_logits(x_UD, kernel_DV):
    """Compute logits whose result is rounded to bfloat16, as under PyTorch's autocast."""
    return jnp.dot(x_UD.astype(jnp.bfloat16), kernel_DV.astype(jnp.bfloat16)).astype(jnp.float32)


def compare_logits(middle: float) -> None:
    """Print the errors of three forms of logits around a value."""
    rng = np.random.default_rng(0)
    x_UD, kernel_DV = rng.standard_normal((U, D)), rng.standard_normal((D, V)) * 3 / np.sqrt(D)
    x_UD[:, :64] += 1.0  # a direction that all tokens share
    kernel_DV[:64] += middle / 64
    x_UD = np.asarray(jnp.asarray(x_UD, jnp.bfloat16), np.float64)  # what the last norm gives
    targets_U = rng.integers(0, V, U)

    def losses(logits_UV):
        """Return (nats of each token, gradient by the logits) in float64."""
        shifted = logits_UV - logits_UV.max(-1, keepdims=True)
        weights = np.exp(shifted)
        total = weights.sum(-1, keepdims=True)
        gradient = weights / total
        gradient[np.arange(U), targets_U] -= 1.0
        return np.log(total[:, 0]) - shifted[np.arange(U), targets_U], gradient

    exact, slope = losses(x_UD @ kernel_DV)
    arrays = jnp.asarray(x_UD, jnp.bfloat16), jnp.asarray(kernel_DV, jnp.float32)
    for name, form in (
        ("bfloat16 in, float32 out", float32_logits),
        ("float16 in and out", float16_logits),
        ("bfloat16 in and out", bfloat16_logits),
    ):
        found, found_slope = losses(np.asarray(jax.jit(form)(*arrays), np.float64))
        shift = found.mean() / exact.mean() - 1
        rms = np.sqrt(np.mean((found - exact) ** 2))
        error = np.linalg.norm(found_slope - slope) / np.linalg.norm(slope)
        print(f"| {middle:g} | {name} | {100 * shift:+.4f}% | {rms:.1e} | {error:.1e} |", flush=True)


def make_batches(text: str, rng: np.random.Generator, rows: int = 12):
    """Yield batches of characters."""
    names = sorted(set(text))
    ids = np.array([names.index(c) for c in text[:400_000]], np.int32)
    while True:
        windows = np.stack([ids[i : i + 65] for i in rng.integers(0, len(ids) - 65, rows)])
        yield Batch(windows[:, :-1], windows[:, 1:])


def loss_of(config: GPTConfig, kind: str):
    """Return (model, training loss) of one kind of arithmetic."""
    dtype, on_gpu = KINDS[kind]
    model = config.make_model(Compute(dtype))
    return model, make_losses(Experiment(name="forms", model=config), model, on_gpu=on_gpu)[0]


def compare_gradients(config: GPTConfig, text: str, seeds: int) -> None:
    """Print the errors of gradients at initial values."""
    errors = {"bfloat16": [], "forms": []}
    for seed in range(seeds):
        batch, grads = next(make_batches(text, np.random.default_rng(seed))), {}
        for kind in KINDS:
            model, loss = loss_of(config, kind)
            params = model.init(jax.random.key(seed), batch.inputs_BT)["params"]
            tree = jax.jit(jax.grad(lambda params, loss=loss, batch=batch: loss(params, batch, None)[0]))(params)
            grads[kind] = np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(np.float64)
        exact = grads["float32"]
        for kind, found in errors.items():
            found.append(np.linalg.norm(grads[kind] - exact) / np.linalg.norm(exact))
    for kind, found in errors.items():
        print(f"{kind}: {', '.join(f'{x:.2e}' for x in found)}")


def compare_training(config: GPTConfig, text: str, steps: int) -> None:
    """Print the losses of the same training in each kind of arithmetic."""
    optim = OptimConfig(learning_rate=1e-3)
    optimizer, curves = optim.make_optimizer(steps, model=config), {}
    for kind in KINDS:
        _, loss = loss_of(config, kind)
        state = init_state(config.make_model(), optimizer, jax.random.key(0))
        how = {"loss_fn": loss, "optimizer": optimizer, "schedule": optim.make_schedule(steps)}
        step = jax.jit(
            lambda state, batch, how=how: train_step(state, batch, jax.random.key(0), **how), donate_argnums=0
        )
        batches, losses = make_batches(text, np.random.default_rng(0)), []
        for _ in range(steps):
            state, metrics = step(state, next(batches))
            losses.append(float(metrics["loss"]))
        curves[kind] = np.array(losses)
    print("| steps | " + " | ".join(KINDS) + " |\n|---|---|---|---|")
    for start in range(0, steps, max(steps // 10, 1)):
        part = slice(start, start + max(steps // 10, 1))
        print(f"| to {part.stop} | " + " | ".join(f"{curve[part].mean():.4f}" for curve in curves.values()) + " |")
    for kind in ("bfloat16", "forms"):
        difference = np.abs(curves[kind] - curves["float32"])
        print(f"{kind}: {difference.mean():.2e} nats from float32 in the mean, {difference.max():.2e} at most")


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    configure_jax()
    print(device_name())
    print("| logits around | form | shift of the loss | rms per token | error of the gradient |\n|---|---|---|---|---|")
    for middle in (0.0, -35.0, -100.0):
        compare_logits(middle)
    if args.text is not None:
        text = args.text.read_text(encoding="utf-8")
        config = dataclasses.replace(SMALL, vocab_size=len(set(text)))
        compare_gradients(config, text, args.seeds)
        compare_training(config, text, args.steps)


if __name__ == "__main__":
    main()
