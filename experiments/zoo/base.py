"""The experiments that the entries of the zoo are compared with: a small modern GPT on Tiny Shakespeare.

Question    none of its own: it is the first variant of every study of the zoo.
Reference   the plain recipe of modded-nanogpt's track 3 at the size of a laptop: rotary positions, RMSNorm, norms of
            queries and keys, squared ReLU, zero-initialised projections; Muon for the matrices, AdamW for the rest.
Command     jaxgpt train experiments/zoo/base.py
Expected    a validation loss near 1.85 in less than half a minute on two CPU cores.
Result      seed 0: 1.8273 after 19 s, and 1.9693 by `base.py:adamw` after 21 s, two cores of an AMD EPYC (family 25, AVX-512),
            2026-11-24.
Verdict     none.
"""

import dataclasses

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig

experiment = Experiment(
    name="zoo-base",
    model=GPTConfig(
        block_size=64,
        n_layer=4,
        n_head=4,
        n_embd=64,
        bias=False,
        norm="rmsnorm",
        activation="relu2",
        position="rope",
        rope_theta=1000.0,
        qk_norm=True,
        residual_init="zero",
        tie_embeddings=False,
    ),
    data=DataConfig(corpus="shakespeare"),
    optim=OptimConfig(
        name="muon", learning_rate=1e-2, muon_learning_rate=0.01, schedule="wsd", decay_fraction=0.5, min_lr_ratio=0.0
    ),
    train=TrainConfig(steps=400, batch_size=16, log_every=20, eval_every=100, eval_tokens=32768, sample_prompt="\n"),
)

# For optimisers that stand in for AdamW: all parameters by AdamW.
adamw = dataclasses.replace(
    experiment, name="zoo-base-adamw", optim=dataclasses.replace(experiment.optim, name="adamw", learning_rate=4e-3)
)

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
