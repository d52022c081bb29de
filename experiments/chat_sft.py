"""Does loss on the assistant's tokens only teach a model to answer, and to stop?

Reference   chat models are trained on their own turns only (Touvron et al. 2023, arXiv:2307.09288, section 3.1).
Data        124 questions made from Python's own reference: "What is str.count?", and the first sentence of its section.
            Conversations are packed into rows of 320 characters and cannot attend to each other.
Command     python experiments/python_questions.py chats.jsonl                                 (makes the questions)
            python experiments/chat_sft.py
            python experiments/chat_sft.py --train.init-from MODEL                             (from pretrained weights)
            jaxgpt sample runs/chat-sft --chat --prompt "What is str.count?"
Expected    from random weights and 12,500 characters of answers: no knowledge, but the form of an answer, and its end.
Result      validation loss 2.24 nats per character of the answers at step 60, and 2.24 to 2.36 over five seeds; after
            that it overfits. Greedy answers to the 13 held-out questions: 4 end by themselves, none is right, and few of
            their words are words (two shared cores of an AMD EPYC, family 25, model 17, AVX-512, jax 0.12.0.1,
            2026-11-29). With 215 questions of the whole reference of Python 3.11, as it was until then: 1.742 at step 75,
            and 13 of 22 answers end. From a model of this size pretrained on that reference, with a BPE of 1,024 tokens:
            2.389 nats per token at step 40, where random weights reach 4.228; all 22 answers end, as English sentences,
            and none is right (2026-11-21). LOG.md has the commands.
Verdict     it learns how an answer begins, and a third of the time that it ends; for English sentences it needs pretraining, and
            for right answers more than that.
"""

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig

experiment = Experiment(
    name="chat-sft",
    model=GPTConfig(
        block_size=320,  # characters: the longest conversation has 274, and marks of its turns
        n_layer=4,
        n_head=4,
        n_embd=128,
        bias=False,
        norm="rmsnorm",
        activation="swiglu",
        position="rope",
        qk_norm=True,
        residual_init="zero",
    ),
    data=DataConfig(path="chats.jsonl"),
    optim=OptimConfig(
        name="muon", learning_rate=3e-3, schedule="wsd", warmup_steps=20, decay_fraction=0.4, min_lr_ratio=0.0
    ),
    train=TrainConfig(
        steps=60,
        batch_size=8,
        eval_every=20,
        sample_prompt="What is str.rsplit?",
        sample_tokens=200,
        sample_temperature=0.0,
    ),
)

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
