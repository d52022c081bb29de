"""Does the device compute what the CPU computes? Small models, before anything is timed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpt
from gpu.machine import describe
from gpu.row import Row, unavailable
from gpu.setting import Setting
from gpu.steps import ON_ONE, random_batches
from jaxgpt import Experiment, GPTConfig, OptimConfig, TrainConfig
from jaxgpt.layers.kernels.cudnn import cudnn_attention
from jaxgpt.layers.kernels.plain import Scores, plain_attention
from jaxgpt.parallel.device import compute_options
from jaxgpt.parallel.jax_setup import first_device
from jaxgpt.parallel.trainer import make_trainer

STEPS = 20
# Largest difference of a loss in nats. Float32 in another order of sums; bfloat16, and TF32 beside float32, whose
# products have 7 and 10 bits.
LOSSES = {"float32": 1e-4, "TF32": 2e-2, "bfloat16": 2e-2}
# The same sums in another program, which XLA may fuse otherwise: one unit in the last place, grown over the steps.
OTHER_PROGRAM = 1e-5
# Norm of the difference over the norm of plain attention in float32: a result rounded once to bfloat16 differs by 2e-3,
# and gradients pass through scores that were rounded too.
VALUES, GRADIENTS = 1e-2, 2e-2
# A token that greedy decoding takes may be this far below the best one when all is computed anew, in logits: near ties.
REGRETS = {"float32": 1e-4, "bfloat16": 5e-2}


def checks(setting: Setting) -> list[Callable[[], Iterator[Row]]]:
    """Return the checks in the order of what they rest on."""
    shapes = {
        "64 per head": {},
        "128 per head, grouped": {"H": 128, "K": 1},
        "window of 32": {"window": 32},
    }
    return [
        name_machine,
        *(functools.partial(against_cpu, setting, kind) for kind in LOSSES),
        *(functools.partial(cudnn_against_plain, name, **options) for name, options in shapes.items()),
        functools.partial(repeat, setting, "single", "auto"),
        functools.partial(repeat, setting, "pmap", "float32"),
        *(functools.partial(greedy, setting, kind) for kind in REGRETS),
    ]


def name_machine() -> Iterator[Row]:
    """Name what all is measured on."""
    yield Row(what="machine", beside=describe())


def small_experiment(setting: Setting, dtype: str = "float32") -> Experiment:
    """Return 20 steps of a model that the CPU trains too."""
    n_layer, n_head, n_embd, context = setting.compared
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": context, "vocab_size": 512}
    return Experiment(
        name="gpu",
        model=GPTConfig(**sizes),
        optim=OptimConfig(learning_rate=1e-3),
        train=TrainConfig(batch_size=setting.rows, steps=STEPS, dtype=dtype),
        parallel=ON_ONE,
    )


def take_steps(experiment: Experiment, device: jax.Device) -> tuple[list[float], dict, str]:
    """Return the losses of 20 steps on a device, the last parameters, and how it computes."""
    trainer = make_trainer(experiment, [device])
    with jax.default_device(device):
        state, key = trainer.init_state(jax.random.key(0)), jax.random.key(1)
        losses = []
        for _, batch in zip(range(STEPS), random_batches(experiment), strict=False):
            state, metrics = trainer.train_step(state, trainer.strategy.shard_batch(batch), key)
            losses.append(float(metrics["loss"]))
    return losses, state.params, trainer.options.reason


@functools.cache
def cpu_losses(setting: Setting, dtype: str) -> list[float]:
    """Return the losses of 20 steps on the CPU."""
    return take_steps(small_experiment(setting, dtype), jax.devices("cpu")[0])[0]


def against_cpu(setting: Setting, kind: str) -> Iterator[Row]:
    """Compare 20 losses with the CPU's. kind: "float32" with exact products, "TF32" as the device does them, ..."""
    experiment = small_experiment(setting, "bfloat16" if kind == "bfloat16" else "float32")
    with jax.default_matmul_precision("highest" if kind == "float32" else "default"):
        found, _, said = take_steps(experiment, first_device())
    expected = cpu_losses(setting, experiment.train.dtype)
    worst = float(np.max(np.abs(np.subtract(found, expected))))
    name = {"TF32": "float32, products as the device does them", "float32": "float32, exact products"}.get(kind, kind)
    yield Row(
        what=f"{STEPS} steps against the CPU, {name}",
        values=[worst],
        unit="nats at most",
        beside=f"loss {expected[0]:.4f} to {expected[-1]:.4f}; {said}",
        target=f"{LOSSES[kind]:g}",
        ok=worst <= LOSSES[kind] and expected[-1] < expected[0],
    )


def cudnn_against_plain(name: str, *, H: int = 64, N: int = 4, K: int = 4, window: int | None = None) -> Iterator[Row]:
    """Compare cuDNN's attention and its gradients, in bfloat16, with plain attention in float32 on the same numbers."""
    B, T, what = 4, 512, f"cuDNN attention, {name}"
    options = compute_options(GPTConfig(n_head=N, n_embd=N * H), TrainConfig(dtype="bfloat16"))
    if options.attention != "cudnn":
        yield unavailable(what, options.reason)
        return
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, q, k, v, out_gradient):
        out, backward = jax.vjp(lambda *x: attention(*x, Scores(window=window)), q, k, v)
        return out, *backward(out_gradient)

    with jax.default_matmul_precision("highest"):
        expected = run(plain_attention, *(x.astype(jnp.float32) for x in arrays))
    fused, plain = (
        relative_errors(run(attention, *arrays), expected) for attention in (cudnn_attention, plain_attention)
    )
    for part, tolerance, place in (("values", VALUES, slice(0, 1)), ("gradients", GRADIENTS, slice(1, 4))):
        worst = max(fused[place])
        beside = f"plain attention in bfloat16: {max(plain[place]):.2g}; both against float32"
        yield Row(what=f"{what}: {part}", values=[worst], beside=beside, target=f"{tolerance:g}", ok=worst <= tolerance)


def relative_errors(found: Sequence[jax.Array], expected: Sequence[jax.Array]) -> list[float]:
    """Return the norm of each difference over the norm of what is expected."""
    pairs = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, expected, strict=True))
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]


def repeat(setting: Setting, strategy: str, dtype: str) -> Iterator[Row]:
    """Compare 20 steps with the same by pmap on one device, or with strategy="single" with the same once more."""
    experiment = small_experiment(setting, dtype)
    other = dataclasses.replace(experiment, parallel=dataclasses.replace(ON_ONE, strategy=strategy))
    device, again = first_device(), strategy == "single"
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        (losses, params, said), (others, same, _) = take_steps(experiment, device), take_steps(other, device)
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True))
    differ = sum(not np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    worst = float(np.max(np.abs(np.subtract(losses, others))))
    yield Row(
        what=f"{STEPS} steps on one device, " + ("once more" if again else f"by {strategy}"),
        values=[worst],
        unit="nats at most",
        beside=("bit for bit" if not differ else f"{differ} of {len(pairs)} arrays differ") + f"; {said}",
        target="bit for bit" if again else f"{OTHER_PROGRAM:g}",
        ok=worst == 0 and not differ if again else worst <= OTHER_PROGRAM,
    )


def greedy(setting: Setting, dtype: str) -> Iterator[Row]:
    """Compare greedy decoding with its cache to the argmax of one pass over all that it wrote."""
    config = small_experiment(setting).model
    model, half = jaxgpt.GPT(config, dtype=jnp.dtype(dtype)), config.block_size // 2
    with jax.default_matmul_precision("highest"):
        params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        prompts = np.random.default_rng(0).integers(0, config.vocab_size, (setting.rows, half // 2)).tolist()
        sampling = jaxgpt.Sampling(greedy=True)
        done = jaxgpt.generate(model, params, prompts, key=jax.random.key(0), max_new_tokens=half, sampling=sampling)
        rows = jnp.asarray([prompt + new for prompt, new in zip(prompts, done.tokens, strict=True)])
        logits = jax.jit(model.apply)({"params": params}, rows)[:, half // 2 - 1 : -1].astype(jnp.float32)
    taken = rows[:, half // 2 :]
    regret = logits.max(-1) - jnp.take_along_axis(logits, taken[..., None], -1)[..., 0]
    differ, worst = int((logits.argmax(-1) != taken).sum()), float(regret.max())
    yield Row(
        what=f"greedy decoding against recomputation, {dtype}",
        values=[worst],
        unit="below the best logit, at most",
        beside=f"{differ} of {taken.size} tokens differ",
        target=f"{REGRETS[dtype]:g}",
        ok=worst <= REGRETS[dtype],
    )
