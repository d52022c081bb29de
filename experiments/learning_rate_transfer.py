"""Does the best learning rate of a narrow model serve a wide one?

Question    in the standard parametrisation and in muP (`model.mup_base_width`): by how much does the best learning rate
            move from width 64 to 512?
Reference   Yang et al. 2022, arXiv:2203.03466, figure 1.
Models      GPT-2's architecture without biases: two layers, heads of 32, 200 steps of 8 x 32 characters of Shakespeare,
            cosine schedule. muP has base width 256, so that the two parametrisations are one there.
Command     python experiments/learning_rate_transfer.py --data.path FILE [--optimizer muon] [--seeds 5] [--out DIR]
            Runs are kept in DIR/runs.jsonl: the same command continues.
Hardware    two cores of an Intel Xeon (family 6, model 167): 75 minutes beside other work, 16 s a run at width 512.
Expected    the best rate of the standard parametrisation falls with the width, by up to 8; muP's stays within 2.
Result      AdamW, five seeds, 95% by a bootstrap over seeds (2026-11-23). From width 64 to 512 the standard one's moves
            by a factor of 0.25 (0.17 to 0.34), from 2.7e-3 to 6.7e-4, muP's by 1.25 (1.11 to 1.46), from 9.7e-4 to 1.2e-3.
            muP's narrow models are better (2.457 nats against 2.570 at width 64), its wide ones worse (2.402 against 2.367
            at width 512). Muon, widths 64 to 256: standard 0.85 (0.80 to 0.90), muP 1.03 (0.91 to 1.21).
Verdict     as expected: a rate tuned at width 64 serves width 512. But it is the best rate of muP: above the base width
            the standard parametrisation, tuned at that width, reaches a lower loss in runs this short (LOG.md,
            2026-11-23).
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgpt import GPT, DataConfig, GPTConfig, OptimConfig
from jaxgpt.batch import Batch
from jaxgpt.data.dataset import open_data
from jaxgpt.loss import make_loss
from jaxgpt.optim import learning_rate, make_optimizer
from jaxgpt.train import eval_step, init_and_dropout_keys, init_state, train_step

WIDTHS, BASE = (64, 128, 256, 512), 256
RATES = tuple(2.0**power for power in range(-12, -6))
T, BATCH, HELD_OUT = 32, 8, 256  # context; sequences of a step, and of the validation
MUON = 10.0  # Muon's learning rate / AdamW's
PARAMETRISATIONS = {"standard": None, "muP": BASE}
Runs = dict[tuple, float]  # (optimizer, parametrisation, width, rate, seed) -> validation loss


def load_text(path: str) -> tuple[int, jax.Array, Batch]:
    """Return the vocabulary size, the training text, and sequences spread evenly over the validation text."""
    data = open_data(DataConfig(path=path), block_size=T)
    starts = np.linspace(0, len(data.val) - T - 1, HELD_OUT).astype(int)
    rows_BT = np.stack([data.val.read(start, T + 1) for start in starts.tolist()])
    text = jnp.asarray(data.train.read(0, len(data.train)))
    return data.tokenizer.vocab_size, text, Batch(jnp.asarray(rows_BT[:, :-1]), jnp.asarray(rows_BT[:, 1:]))


def make_run(vocab_size: int, optimizer: str, base: int | None, width: int, steps: int) -> Callable:
    """Compile a whole run: (text, held_out, rate, seed) -> validation loss after the last step.

    The optimiser's learning rate is 1. Its steps, decay included, are proportional to it, and are multiplied by the
    rate: one program for all rates.
    """
    sizes = {"vocab_size": vocab_size, "block_size": T, "n_layer": 2, "n_head": width // 32, "n_embd": width}
    config = GPTConfig(**sizes, bias=False, mup_base_width=base)
    optim = OptimConfig(name=optimizer, learning_rate=1.0, muon_learning_rate=MUON)
    model, schedule = GPT(config), learning_rate(optim, steps)

    @jax.jit
    def run(text: jax.Array, held_out: Batch, rate: jax.Array, seed: jax.Array) -> jax.Array:
        scaled = optax.chain(make_optimizer(optim, steps, width_ratio=config.width_ratio), optax.scale(rate))
        key, _ = init_and_dropout_keys(seed)

        def step(state, number):
            starts_B1 = jax.random.randint(jax.random.fold_in(key, number), (BATCH, 1), 0, len(text) - T)
            rows_BT = text[starts_B1 + jnp.arange(T + 1)[None]]
            batch = Batch(rows_BT[:, :-1], rows_BT[:, 1:])
            return train_step(state, batch, key, loss_fn=make_loss(model), optimizer=scaled, schedule=schedule)[0], None

        state, _ = jax.lax.scan(step, init_state(model, scaled, key), jnp.arange(steps))
        nats, count = eval_step(state.params, held_out, loss_fn=make_loss(model))
        return nats / count

    return run


def measure(path: str, file: Path, optimizer: str, widths: tuple[int, ...], seeds: int, steps: int) -> Runs:
    """Return the runs of `file`, after adding those of this optimiser that it lacks, narrow models first."""
    runs: Runs = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        *key, loss = json.loads(line)
        runs[tuple(key)] = loss
    vocab_size, text, held_out = load_text(path)
    make = functools.cache(functools.partial(make_run, vocab_size, optimizer))
    for width, rate, seed, (name, base) in itertools.product(widths, RATES, range(seeds), PARAMETRISATIONS.items()):
        key, twin = (optimizer, name, width, rate, seed), (optimizer, "standard", width, rate, seed)
        if key in runs:
            continue
        if width == BASE and twin in runs:
            runs[key] = runs[twin]
        else:
            loss = float(make(base, width, steps)(text, held_out, jnp.float32(rate), jnp.uint32(seed)))
            runs[key] = loss if np.isfinite(loss) else float(np.log(vocab_size))  # diverged: as by chance
        with file.open("a") as lines:
            lines.write(json.dumps([*key, runs[key]]) + "\n")
    return runs


def best_rate(losses_RS: np.ndarray) -> float:
    """Return log2 of the best rate: the minimum of a parabola through the three best neighbours of mean losses [R].

    At an end of the grid, the end.
    """
    mean_R, powers = losses_RS.mean(axis=1), np.log2(RATES)
    low = int(mean_R.argmin())
    if low in (0, len(RATES) - 1):
        return float(powers[low])
    left, middle, right = mean_R[low - 1 : low + 2]
    return float(powers[low] + 0.5 * (left - right) / (left - 2 * middle + right))


def bootstrap(losses_RS: np.ndarray, resamples: int = 1000) -> np.ndarray:
    """Return `best_rate` of resampled seeds, the same ones for all models."""
    S = losses_RS.shape[1]
    return np.array([best_rate(losses_RS[:, s]) for s in np.random.default_rng(0).integers(S, size=(resamples, S))])


def collect(runs: Runs, optimizer: str, widths: tuple[int, ...], seeds: int) -> dict[tuple[str, int], np.ndarray]:
    """Return the losses [R, S] of each (parametrisation, width)."""
    return {
        (name, width): np.array([[runs[optimizer, name, width, r, s] for s in range(seeds)] for r in RATES])
        for name in PARAMETRISATIONS
        for width in widths
    }


def table(losses: dict[tuple[str, int], np.ndarray]) -> str:
    """Format the best learning rates as a Markdown table."""
    lines = ["| parametrisation | width | best of the grid | of the parabola | 95% | loss | shift from the first |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for (name, width), each in losses.items():
        first = losses[name, min(w for _, w in losses)]
        best, spread = best_rate(each), bootstrap(each)
        low, high = np.quantile(spread, (0.025, 0.975))
        shift, ends = best - best_rate(first), np.quantile(spread - bootstrap(first), (0.025, 0.975))
        mean_R = each.mean(axis=1)
        lines.append(
            f"| {name} | {width} | {RATES[mean_R.argmin()]:.2g} | {2**best:.2g} | {2**low:.2g} to {2**high:.2g} "
            f"| {mean_R.min():.3f} | x {2**shift:.2f} ({2 ** ends[0]:.2f} to {2 ** ends[1]:.2f}) |"
        )
    return "\n".join(lines)


def draw(losses: dict[tuple[str, int], np.ndarray], path: Path) -> None:
    """Plot loss against learning rate, a curve for each width, with the best rate of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    panels = dict(zip(PARAMETRISATIONS, figure.subplots(1, 2, sharey=True), strict=True))
    colours = dict(zip(sorted({w for _, w in losses}), ("#9ecae1", "#4292c6", "#08519c", "#d94801"), strict=False))
    for (name, width), each in losses.items():
        mean_R, error_R = each.mean(axis=1), each.std(axis=1, ddof=min(1, each.shape[1] - 1)) / each.shape[1] ** 0.5
        axes, best = panels[name], 2 ** best_rate(each)
        axes.errorbar(RATES, mean_R, error_R, color=colours[width], marker=".", label=f"width {width}")
        axes.plot(best, mean_R.min(), "v", color=colours[width], markersize=9)
    for name, axes in panels.items():
        axes.set(xscale="log", xlabel="learning rate", title=name)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels["standard"].set_ylabel("validation loss, nats per character")
    panels["standard"].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> dict[tuple[str, int], np.ndarray]:
    """Train what is missing; write the plot and print the table. Return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.path", dest="path", required=True)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = {"optimizer": options.optimizer, "widths": tuple(options.widths), "seeds": options.seeds}
    runs = measure(options.path, options.out / "runs.jsonl", steps=options.steps, **sizes)
    losses = collect(runs, **sizes)
    draw(losses, options.out / f"learning-rate-transfer-{options.optimizer}.png")
    print(table(losses))
    return losses


if __name__ == "__main__":
    main()
