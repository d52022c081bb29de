"""The first speedrun with n-grams: how fast can two CPU cores learn Tiny Shakespeare as well as nanoGPT's CPU configuration?

Question    How much of the speedrun's time do tables of pairs, triples and quadruples of characters save?
Reference   nanoGPT's README: validation loss 1.88 "in 3 minutes on a CPU". RECORDS.md has the rules.
Change      One layer of the recipe of speedrun_shakespeare.py instead of two, the tables of ngram_embeddings.py up to order
            4, and 50 steps of 32 rows instead of 270 of 16.
Command     python experiments/benchmarks/speedrun.py shakespeare.txt --experiment experiments/zoo/speedrun.py
Expected    two seconds less than without the tables, whose time is mostly imports and compilation.
Result      1.8227 after 8.1 s (five seeds; standard deviations 0.0115 and 0.3 s), two shared cores of an AMD EPYC (family 25,
            model 17, AVX-512), 2026-11-26. In the same hour speedrun_shakespeare.py took 10.4 s (0.3). Audited.
Verdict     As expected: each seed is far below the mark after a third of the tokens. The 102,400 predictions cost less than a
            second, and the other seven are imports, compilation and the check of the model's own modules.
"""

import dataclasses

import ngram_embeddings

import jaxgpt
from jaxgpt import TrainConfig

page = ngram_embeddings.experiment
experiment = dataclasses.replace(
    page,
    name="speedrun-ngrams",
    model=dataclasses.replace(page.model, n_layer=1, rope_theta=100.0, max_order=4),
    optim=dataclasses.replace(
        page.optim, muon_learning_rate=0.025, momentum=0.8, warmup_steps=5, decay_fraction=0.6, min_lr_ratio=0.0
    ),
    train=TrainConfig(steps=50, batch_size=32, eval_every=1000, sample_prompt="\n"),
)

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
