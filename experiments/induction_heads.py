"""Do induction heads predict repeated tokens, and does anything else need them?

Question    small models learn text that repeats itself. Which heads attend to the token after the last occurrence of
            the current one? Without them, does the loss rise on repeated tokens, and only there?
Reference   Olsson et al. 2022, arXiv:2209.11895; one layer is not enough: Elhage et al. 2021,
            https://transformer-circuits.pub/2021/framework
Models      four heads of width 16, Muon, 800 steps of 32 x 48 tokens of a random Markov chain over 64 tokens; each row
            repeats itself after 8 to 24 tokens, in the test text after 24. "Attention only" means that the MLPs are zero.
            Heads are grouped by their scores on uniformly random tokens and replaced by their mean output.
Command     python experiments/induction_heads.py [--seeds 5] [--steps 800]
Hardware    two cores of an Intel Xeon (family 6, model 167): 8.6 minutes beside other work, 5.1 of CPU time.
Expected    one layer: no induction heads. Two layers: without them, repeated tokens cost as much as new ones, and new
            tokens as much as before.
Result      five seeds, nats per token, 95% intervals over seeds (2026-11-23). One layer: no induction head, 4.295 ± 0.048
            on new tokens, 2.725 ± 0.120 on repeated ones. Two layers have 0.139 ± 0.017 on repeated tokens (full: 0.180
            ± 0.042); all four heads of the second are induction heads in all runs. Without them repeated tokens rise by
            3.960 ± 0.030 (full: 3.974 ± 0.049) and new ones by 0.007 ± 0.016 (full: -0.051 ± 0.025). Without the
            previous-token heads of the first layer, repeated ones rise by 4.243 ± 0.194 (full: 4.118 ± 0.221), new ones
            by 0.246 ± 0.134 (full: 0.280 ± 0.270).
Verdict     as expected: only repeated tokens need induction heads; in a full model new ones are even predicted slightly
            better without them. The first layer has no free heads: those with neither score serve both kinds of tokens,
            also in a model of three layers, where they are as many as the induction heads (LOG.md, 2026-11-23).
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from interpretability.analyses import induction_scores, previous_token_scores, repeat_random_tokens

from jaxgpt import GPT, GPTConfig, OptimConfig, interventions
from jaxgpt.batch import Batch
from jaxgpt.loss import make_loss
from jaxgpt.optim import learning_rate, make_optimizer
from jaxgpt.statistics import mean_interval
from jaxgpt.train import Params, init_state, train_step

V, T, BATCH = 64, 48, 32
HALF = T // 2
MODELS = {"attention only, 1 layer": (1, False), "attention only, 2 layers": (2, False), "full, 2 layers": (2, True)}
GROUPS = ("induction", "previous token", "neither")
FOUND = 0.12  # least score of a head of a group; even attention has 0.03 (induction) and 0.07 (previous token)


def make_text(rng: np.random.Generator, rows: int, periods: tuple[int, int] = (8, HALF)) -> np.ndarray:
    """Return rows of one random Markov chain, each of which repeats itself after a random period, [rows, T + 1]."""
    weights_VV = np.exp(np.random.default_rng(0).normal(size=(V, V)))
    ends_VV = np.cumsum(weights_VV / weights_VV.sum(axis=1, keepdims=True), axis=1)
    tokens = [rng.integers(0, V, rows)]
    for _ in range(T):
        tokens.append(np.minimum((ends_VV[tokens[-1]] < rng.random((rows, 1))).sum(axis=1), V - 1))
    periods_B1 = rng.integers(periods[0], periods[1] + 1, (rows, 1))
    return np.take_along_axis(np.stack(tokens, axis=1), np.arange(T + 1) % periods_B1, axis=1).astype(np.int32)


TEST_BT = make_text(np.random.default_rng(0), 512, (HALF, HALF))[:, :T]  # new tokens, and the same again


def remove_mlps(params: Params) -> Params:
    """Return the parameters with MLPs whose output is zero."""
    return {k: v | {"mlp": jax.tree.map(jnp.zeros_like, v["mlp"])} if k[:2] == "h_" else v for k, v in params.items()}


@functools.cache
def make_step(n_layer: int, has_mlps: bool, steps: int) -> tuple[GPT, Callable, Callable]:
    """Return a model, the function that makes its first state from a key, and its compiled step."""
    config = GPTConfig(
        vocab_size=V, block_size=T, n_layer=n_layer, n_head=4, n_embd=64, bias=False, norm="rmsnorm",
        position="rope", rope_theta=100.0, qk_norm=True, tie_embeddings=False,
    )  # fmt: skip
    optim = OptimConfig(name="muon", learning_rate=4e-3, warmup_steps=50)
    model, optimizer, schedule = GPT(config), make_optimizer(optim, steps), learning_rate(optim, steps)
    plain = make_loss(model)

    def loss(params, batch, key):
        return plain(params if has_mlps else remove_mlps(params), batch, key)

    step = functools.partial(train_step, loss_fn=loss, optimizer=optimizer, schedule=schedule)
    return model, functools.partial(init_state, model, optimizer), jax.jit(step)


def train(n_layer: int, has_mlps: bool, *, steps: int, seed: int) -> tuple[GPT, Params]:
    """Train a model on text of its own."""
    model, init, step = make_step(n_layer, has_mlps, steps)
    state, rng = init(jax.random.key(seed)), np.random.default_rng(seed + 1)
    for _ in range(steps):
        text_BT = make_text(rng, BATCH)
        state, metrics = step(state, Batch(text_BT[:, :-1], text_BT[:, 1:]), jax.random.key(seed))
        metrics["loss"].block_until_ready()
    return model, state.params if has_mlps else remove_mlps(state.params)


def mean_losses(logits_BTV: jax.Array) -> jax.Array:
    """Return the mean loss of new tokens and of repeated ones, in nats."""
    losses_BT = interventions.token_losses(logits_BTV, TEST_BT)
    return jnp.stack([losses_BT[:, : HALF - 1].mean(), losses_BT[:, HALF:].mean()])


def measure(model: GPT, params: Params) -> tuple[list[int], list[float], np.ndarray]:
    """Return the size of each group, its mean score, and the losses with all heads and without each group, [4, 2]."""
    random_BT = repeat_random_tokens(V, period=HALF, length=T, rows=64)
    induction_LN = np.asarray(induction_scores(model, params, random_BT, period=HALF))
    previous_LN = np.asarray(previous_token_scores(model, params, random_BT))
    group_LN = np.where(induction_LN > FOUND, 0, np.where(previous_LN > FOUND, 1, 2))
    names = [f"h_{layer}/heads" for layer in range(model.config.n_layer)]
    heads = interventions.run(model, params, TEST_BT, read=names).activations
    means_LNH = np.stack([np.mean(heads[name], axis=(0, 1)) for name in names])
    edits = [
        [interventions.replace("heads", layer, by=means_LNH[layer, head], index=head) for layer, head in group.tolist()]
        for group in (np.argwhere(group_LN == number) for number in range(len(GROUPS)))
    ]
    losses = np.asarray(interventions.run_each(model, params, TEST_BT, [[], *edits], mean_losses))
    scores = [float(x[group_LN == i].mean()) if edits[i] else np.nan for i, x in enumerate((induction_LN, previous_LN))]
    return [len(group) for group in edits], scores, losses


def main(argv: list[str] | None = None) -> dict[str, np.ndarray]:
    """Print the table. Return the losses of each model, [seeds, 4, 2]."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args(argv)
    print(
        "| model | replaced by their mean | heads | score | new tokens | repeated tokens |\n|---|---|---|---|---|---|"
    )
    found = {}
    for name, kind in MODELS.items():
        runs = [measure(*train(*kind, steps=options.steps, seed=seed)) for seed in range(options.seeds)]
        sizes, scores, losses = (np.array(x) for x in zip(*runs, strict=True))
        rises = np.concatenate([losses[:, :1], losses[:, 1:] - losses[:, :1]], axis=1)  # paired by seed
        mean, margin = mean_interval(np.moveaxis(rises, 0, -1))
        for row, group in enumerate(("none", *GROUPS)):
            size = "" if row == 0 else ", ".join(map(str, sizes[:, row - 1]))
            score = f"{np.nanmean(scores[:, row - 1]):.2f}" if row in (1, 2) and sizes[:, row - 1].any() else ""
            cells = (f"{m:{'+' if row else ''}.3f} ± {h:.3f}" for m, h in zip(mean[row], margin[row], strict=True))
            print(f"| {name} | {group} | {size} | {score} | {' | '.join(cells)} |", flush=True)
        found[name] = losses
    return found


if __name__ == "__main__":
    main()
