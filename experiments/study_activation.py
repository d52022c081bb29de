"""Which activation is best at equal parameters?

Question    ReLU, GELU, squared ReLU and SwiGLU with the same number of parameters: which learns most from the same
            number of tokens, and which in the same CPU time?
Reference   GELU: arXiv:1606.08415; squared ReLU: So et al. 2021, arXiv:2109.08668; SwiGLU: Shazeer 2020,
            arXiv:2002.05202, whose gate is a third matrix, so its hidden width is two thirds: at width 96, 256 units
            instead of 384.
Variants    the four; all else equal: four layers of width 96, rotary positions, no biases, AdamW at 2e-3, 1,000 steps
            of 16 x 64 characters of Shakespeare. Every variant has the same 449,472 parameters (a test counts them).
Command     jaxgpt study experiments/study_activation.py --seeds 5
Expected    SwiGLU and squared ReLU a little ahead of GELU, and GELU ahead of ReLU.
Result      five seeds, at equal tokens (standard deviation): ReLU 1.7927 (0.0044), GELU 1.8797 (0.0103), squared ReLU
            1.7802 (0.0052), SwiGLU 1.7777 (0.0119). Against ReLU, with Holm's correction for six comparisons: +0.0870 ±
            0.0194, -0.0126 ± 0.0148, -0.0150 ± 0.0251; at equal seconds +0.0885 ± 0.0230, -0.0133 ± 0.0059, -0.0074 ±
            0.0254 (2026-11-22).
Verdict     GELU is worse than ReLU, against expectation: at this width and N(0, 0.02) its inputs start near 0.2, where
            it is almost linear. gelu(5 x) / 5 has 1.7715 (0.0092), so GELU needs inputs of the right scale. Squared
            ReLU is better after the same time. After the same tokens it and SwiGLU may be: 12 and 28 seeds would see a
            difference of 0.01. A single comparison at 95% would have called squared ReLU better there, too.
"""

import dataclasses

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig

experiment = Experiment(
    name="study-activation",
    model=GPTConfig(
        block_size=64, n_layer=4, n_head=4, n_embd=96, bias=False, position="rope", activation="relu", mlp_dim=384
    ),
    data=DataConfig(corpus="shakespeare"),
    optim=OptimConfig(learning_rate=2e-3, warmup_steps=100),
    train=TrainConfig(steps=1000, batch_size=16, eval_every=125),
)

variants = {
    name: dataclasses.replace(
        experiment, model=dataclasses.replace(experiment.model, activation=activation, mlp_dim=mlp_dim)
    )
    for name, activation, mlp_dim in (
        ("ReLU", "relu", 384),
        ("GELU", "gelu", 384),
        ("squared ReLU", "relu2", 384),
        ("SwiGLU", "swiglu", 256),
    )
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
