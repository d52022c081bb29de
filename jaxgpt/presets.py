"""Named configurations, as functions that return them."""

from __future__ import annotations

import dataclasses
import math

from jaxgpt.config.validate import Count, check_value, short
from jaxgpt.config.words import parse_value
from jaxgpt.data.dataset import DataConfig
from jaxgpt.errors import UserError
from jaxgpt.experiment import CONTEXT_OF_WEIGHTS, Experiment, TrainConfig
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig


def quickstart(*, chat: bool = False) -> Experiment:
    """Return a character-level GPT on Python's own documentation: readable words in a minute on two CPU cores.

    chat: on conversations, with a context that is left open.
    """
    return Experiment(
        name="quickstart",
        model=GPTConfig(
            block_size=CONTEXT_OF_WEIGHTS if chat else 64,
            n_layer=2,
            n_head=4,
            n_embd=128,
            bias=False,
            norm="rmsnorm",
            activation="swiglu",
            position="rope",
            qk_norm=True,
            residual_init="zero",
            tie_embeddings=False,
        ),
        data=DataConfig(corpus="python-docs"),
        optim=OptimConfig(
            name="muon",
            learning_rate=1e-2,
            momentum=0.85,
            schedule="wsd",
            warmup_steps=20,
            decay_fraction=0.4,
            min_lr_ratio=0.0,
        ),
        train=TrainConfig(
            steps=600,
            batch_size=8 if chat else 16,
            eval_every=100,
            sample_prompt="What is str.count?" if chat else "The value of the",
            sample_tokens=300,
            sample_temperature=0.6,
        ),
    )


def finetune() -> Experiment:
    """Return the fine-tuning of the weights of `train.init_from`, with as much of their context as the data need."""
    return Experiment(
        name="finetune",
        model=GPTConfig(block_size=CONTEXT_OF_WEIGHTS),
        optim=OptimConfig(learning_rate=3e-4),
        train=TrainConfig(steps=300, batch_size=16, eval_every=50),
    )


def gpt2(size: str = "124M") -> GPTConfig:
    """Return a GPT-2 of Radford et al. 2019: "124M", "350M", "774M" or "1558M"."""
    sizes = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "774M": (36, 20, 1280), "1558M": (48, 25, 1600)}
    n_layer, n_head, n_embd = sizes[size]
    return GPTConfig(vocab_size=50257, block_size=1024, n_layer=n_layer, n_head=n_head, n_embd=n_embd, dropout=0.1)


def depth(n: int, *, tokens_per_parameter: float = 20.0, tokens: float | None = None) -> Experiment:
    """Return the quickstart's experiment at another size: all sizes and rates follow from the number of blocks.

    Each rule extends the quickstart, whose values are tuned at 0.6 million tokens, by a power of size or tokens, with a source.

    n: number of blocks. tokens_per_parameter: tokens to train on per parameter in the blocks. About 20 are best for a given
    amount of arithmetic (Hoffmann et al. 2022, arXiv:2203.15556). tokens: tokens to train on, whatever the size.
    """
    check_value("depth", n, Count)
    base = quickstart()
    # Width in proportion to depth (arXiv:2001.08361, figure 5: the ratio matters little), heads of 64 as in GPT-2.
    width = 64 * n
    sizes = {"n_layer": n, "n_head": n, "n_embd": width, "block_size": width}
    # The quickstart's learning rates: over the width muP keeps the best (arXiv:2203.03466). Over the tokens they fall by the
    # power 0.32 at one batch size (arXiv:2409.19913), and rise with the batch's root (arXiv:2205.10287): about constant.
    model = dataclasses.replace(base.model, **sizes, mup_base_width=base.model.n_embd)
    parameters = 12 * n * width**2
    total = tokens_per_parameter * parameters if tokens is None else tokens
    if not 1 <= total <= 1e19:
        raise UserError(f"depth {n} with {short(total)} tokens to train on: needs 1 to 1e19")
    # Tokens of a batch grow with the root of all tokens. Fitted powers of the best batch are 0.38 (arXiv:2505.13738) to
    # 0.57 (arXiv:2503.04715). Sequences are a power of two, which divides over devices.
    base_batch = base.train.batch_size * base.model.block_size
    base_total = base_batch * base.train.steps
    batch_size = 2 ** max(0, round(math.log2(base_batch * math.sqrt(total / base_total) / width)))
    steps = max(1, round(total / (batch_size * width)))
    # Matrices are averages over the last 1 / (learning rate * decay) steps: a share of all steps (arXiv:2405.13698) that
    # falls with about the root of the tokens per parameter (arXiv:2505.13738). With the rules above the tokens cancel.
    base_parameters = 12 * base.model.n_layer * base.model.n_embd**2
    decay = base.optim.weight_decay * math.sqrt(base_parameters / parameters)
    return dataclasses.replace(
        base,
        name=f"depth-{n}",
        model=model,
        # The schedule is kept: constant, then to zero over the last two fifths (arXiv:2405.18392).
        optim=dataclasses.replace(base.optim, warmup_steps=None, weight_decay=decay),
        train=dataclasses.replace(
            base.train, steps=steps, batch_size=batch_size, eval_every=max(1, steps // 10), sample_prompt=""
        ),
    )


EXPERIMENTS = {"quickstart": quickstart, "finetune": finetune}  # names for `jaxgpt train NAME`


def find_preset(name: str) -> Experiment | None:
    """Return the experiment of a built-in name, such as quickstart or depth:4, or None for other names."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]()
    kind, _, number = name.partition(":")
    return depth(parse_value("depth", number, Count)) if kind == "depth" else None
