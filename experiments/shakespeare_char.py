"""Does jaxgpt learn what nanoGPT learns? Its two Tiny Shakespeare configurations, value by value.

Reference   nanoGPT, config/train_shakespeare_char.py and its README: validation loss 1.88 (the small one, "in 3
            minutes on a CPU") and 1.4697 (the 384-wide one, 3 minutes on an A100).
Command     python experiments/shakespeare_char.py
            jaxgpt train experiments/shakespeare_char.py:wide      (an accelerator, or a night)
Expected    1.886 or less on the whole validation split, which nanoGPT itself reached on two CPU cores.
"""

import dataclasses

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig

experiment = Experiment(
    name="shakespeare-char",
    model=GPTConfig(block_size=64, n_layer=4, n_head=4, n_embd=128, bias=False, activation="gelu"),
    data=DataConfig(corpus="shakespeare"),
    optim=OptimConfig(learning_rate=1e-3, warmup_steps=100, min_lr_ratio=0.1, beta2=0.99, weight_decay=0.1),
    train=TrainConfig(steps=2000, batch_size=12, eval_every=250, sample_prompt="\n"),
)

wide = dataclasses.replace(
    experiment,
    name="shakespeare-char-wide",
    model=GPTConfig(block_size=256, n_layer=6, n_head=6, n_embd=384, bias=False, activation="gelu", dropout=0.2),
    train=TrainConfig(steps=5000, batch_size=64, eval_every=250, sample_prompt="\n"),
)

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
