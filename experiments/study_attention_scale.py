"""What does it cost to scale attention by the embedding size instead of the head size?

Question    the course "Construyamos un GPT" divides scores by the square root of the embedding size C in its code, but
            its text says the key size, as the paper does. Does it matter?
Reference   Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1: the dot product of two vectors of d_k independent
            values has variance d_k. With four heads C is 4 d_k, so scores are half as large: a softer softmax at first.
Variants    the two; all else as in the course: four layers of width 128 and four heads, learned positions, ReLU, no
            biases, no QK-norm, dropout 0.1, AdamW at 1e-3, 1,000 steps of 16 x 64 characters of Cervantes' verse.
Command     jaxgpt study experiments/study_attention_scale.py --seeds 5
Expected    little: queries and keys can grow to compensate.
Result      1.9475 (standard deviation 0.0054) by the head size, 1.9631 (0.0083) by the embedding size, five seeds: a
            difference of 0.0156 ± 0.0067 nats at equal tokens, 0.0155 ± 0.0101 at equal seconds, with Holm's correction
            for both (2026-11-22).
Verdict     it matters a little, and more than noise: divide by the head size.
"""

import dataclasses

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig

experiment = Experiment(
    name="study-attention-scale",
    model=GPTConfig(block_size=64, n_layer=4, n_head=4, n_embd=128, dropout=0.1, bias=False, activation="relu"),
    data=DataConfig(corpus="sancho"),
    optim=OptimConfig(learning_rate=1e-3, warmup_steps=100),
    train=TrainConfig(steps=1000, batch_size=16, eval_every=125),
)

variants = {
    "by the head size": experiment,
    "by the embedding size": dataclasses.replace(
        experiment, model=dataclasses.replace(experiment.model, query_scale=float(experiment.model.n_embd))
    ),
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
