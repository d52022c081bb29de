"""Does loss on the assistant's tokens alone teach a model to answer, and to stop?

Reference   chat models learn from their own turns alone (Touvron et al. 2023, arXiv:2307.09288, section 3.1).
Data        215 questions made of Python's own reference: "What is str.count?", and the first sentence of its section.
            Several conversations share a row of 320 characters, 94.7% of which is filled, and none reads another one.
Command     python experiments/chat_sft.py
            python experiments/chat_sft.py --data.path chats.jsonl --data.tokenizer TOKENIZER/tokenizer.json
            jaxgpt sample runs/chat-sft --chat --prompt "What is str.count?"
Expected    from random weights and 19,000 characters of answers, no knowledge; but the form of an answer, and its end.
Result      validation loss 1.623 nats per character of the answers at step 75 (1.649 at 100), 117 s on two cores of a busy
            x86-64 machine, 2026-11-21. Greedy answers to the 22 held-out questions: 19 end by themselves within 280
            characters, all 19 with a full stop, none is right. "What is str.join?" has "Return the string a staring in
            the string.", "What is object.__new__?" begins "Called to implement the built-" and does not end.
Verdict     it answers in the form that the question asks for, and stops; what it says needs a model that has read before.
"""

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig

experiment = Experiment(
    name="chat-sft",
    model=GPTConfig(
        block_size=320,  # characters: the longest conversation has 300
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
    data=DataConfig(corpus="python-docs.jsonl"),
    optim=OptimConfig(
        name="muon", learning_rate=3e-3, schedule="wsd", warmup_steps=20, decay_fraction=0.4, min_lr_ratio=0.0
    ),
    train=TrainConfig(
        steps=100,
        batch_size=8,
        eval_every=25,
        sample_prompt="What is str.rsplit?",
        sample_tokens=200,
        sample_temperature=0.0,
    ),
)

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
