"""Train the model that the track of fewest steps and the study of laptop and pod hold fixed, with Muon or with AdamW.

Question    none of its own: what the track holds fixed, with Muon and with AdamW.
Reference   the plain recipe of modded-nanogpt's track 3, as in the zoo (`experiments/zoo/base.py`), at twice its size.
Change      The model of the zoo with a width of 88, which has 384,120 parameters with Shakespeare's 65 characters. Each
            doubling of the width has four times as many, with the same size of a head, and muP from a width of 88.
            Twice the size leaves room for two doublings on a laptop. A step reads 16 x 64 characters.
Command     jaxgpt train experiments/laptop/base.py --data.path shakespeare.txt
Expected    1.88 after about 250 steps with Muon, and 450 with AdamW.
Result      see ../RECORDS.md and ../../docs/laptop-and-pod.md.
Verdict     none.
"""

import dataclasses

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig

WIDTH, HEAD = 88, 22  # the width from which muP transfers, and the size of each head at every width


def model(width: int = WIDTH) -> GPTConfig:
    """Return the model of a width, with muP's rules for a width other than WIDTH."""
    return GPTConfig(
        block_size=64,
        n_layer=4,
        n_head=width // HEAD,
        n_embd=width,
        mup_base_width=WIDTH,
        bias=False,
        norm="rmsnorm",
        activation="relu2",
        position="rope",
        rope_theta=1000.0,
        qk_norm=True,
        residual_init="zero",
        tie_embeddings=False,
    )


experiment = Experiment(
    name="laptop",
    model=model(),
    data=DataConfig(corpus="shakespeare"),
    optim=OptimConfig(
        name="muon", learning_rate=1e-2, muon_learning_rate=0.01, schedule="wsd", decay_fraction=0.5, min_lr_ratio=0.0
    ),
    train=TrainConfig(steps=250, batch_size=16, log_every=50, eval_every=10_000, eval_tokens=32_768, sample_tokens=0),
)
adamw = dataclasses.replace(
    experiment, name="laptop-adamw", optim=dataclasses.replace(experiment.optim, name="adamw", learning_rate=4e-3)
)

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
