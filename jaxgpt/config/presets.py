"""Named configurations, as functions that return them."""

from __future__ import annotations

from jaxgpt.config import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig


def quickstart() -> Experiment:
    """Return a character-level GPT on Python's own documentation: readable words in a minute on two CPU cores."""
    return Experiment(
        name="quickstart",
        model=GPTConfig(
            block_size=64,
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
            batch_size=16,
            eval_every=100,
            sample_prompt="The value of the",
            sample_tokens=300,
            sample_temperature=0.6,
        ),
    )


def gpt2(size: str = "124M") -> GPTConfig:
    """Return a GPT-2 of Radford et al. 2019: "124M", "350M", "774M" or "1558M"."""
    n_layer, n_head, n_embd = {
        "124M": (12, 12, 768),
        "350M": (24, 16, 1024),
        "774M": (36, 20, 1280),
        "1558M": (48, 25, 1600),
    }[size]
    return GPTConfig(vocab_size=50257, block_size=1024, n_layer=n_layer, n_head=n_head, n_embd=n_embd, dropout=0.1)


EXPERIMENTS = {"quickstart": quickstart}  # names for `jaxgpt train NAME`
