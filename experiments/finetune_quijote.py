"""Fine-tune a GPT-2 on Don Quixote: how much does pretraining help it to write like Cervantes?

Reference   nanoGPT's finetune_shakespeare; adapters: Hu et al. 2021, arXiv:2106.09685.
Weights     a GPT-2 of any size: a directory in Hugging Face's format, its id, or a run.
Command     python experiments/finetune_quijote.py --train.init-from GPT2
            python experiments/finetune_quijote.py --train.init-from GPT2 --lora.rank 8 --optim.learning-rate 1e-3
            jaxgpt export runs/finetune-quijote --to hf --out quijote   (adapters merged into the weights)
Expected    a loss below that of random weights after as many steps. Adapters, with 2% of the parameters, between the
            two.
Result      no published weights were available where this was written. A GPT-2 of 0.9M parameters pretrained on
            Shakespeare, 300 steps of 16 x 128 tokens, nats per token of its own BPE, 2026-11-21: all parameters 3.096;
            random weights 3.363; adapters of rank 8 on q and v (1.7% of the parameters) 4.743, on all matrices (7.8%)
            4.080. From there to Cervantes' verse, 150 steps, from 3.938: all 3.151, adapters on all matrices 3.277, on
            q and v 3.490.
Verdict     pretraining helps, even in another language. Adapters do not: the words of a new language are in the
            embeddings, which have no adapters. Where the model knows the language, adapters give most of the
            improvement.
"""

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig

experiment = Experiment(
    name="finetune-quijote",
    model=GPTConfig(block_size=512, dropout=0.1),  # the pretrained model sets all other fields
    data=DataConfig(corpus="quijote"),
    optim=OptimConfig(learning_rate=1e-4, warmup_steps=20, beta2=0.95),
    train=TrainConfig(
        init_from="openai-community/gpt2",
        steps=400,
        batch_size=8,
        eval_every=50,
        sample_prompt="En un lugar de la Mancha, ",
        sample_tokens=200,
    ),
)

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
