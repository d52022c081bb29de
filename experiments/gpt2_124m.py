"""Train GPT-2 small from scratch, on tokens prepared by `jaxgpt prepare`, nanoGPT or llm.c.

Reference   nanoGPT's reproduction: OpenWebText, 8 A100 for 4 days, 600,000 steps, validation loss about 2.85.
Command     python experiments/gpt2_124m.py --data.path DIR      DIR has token files of jaxgpt prepare, nanoGPT or llm.c
            Samples are text if DIR has a tokenizer.json, as jaxgpt prepare writes it, and token ids otherwise.
            docs/pretraining.md has the whole way, from raw text to samples, for one card, several and pods.
Hardware    an accelerator: one step is 491,520 tokens. On CPU the tests check its shapes, and run it at a reduced size.
            As it is it fits 16 GB. On 80 GB add --parallel.micro-batch-size 32 --model.remat none
            --parallel.loss-chunk 1024: kernels in turn then take 584 ms of an H100, not the 658 of the defaults.
Result      not run at full size yet.
Expected    3.28 on FineWeb (llm.c's figure), 2.85 on OpenWebText after 300 billion tokens.
"""

import dataclasses

import jaxgpt
from jaxgpt import DataConfig, Experiment, OptimConfig, ParallelConfig, TrainConfig
from jaxgpt.presets import gpt2

experiment = Experiment(
    name="gpt2-124m",
    # No dropout, as in nanoGPT's pretraining; 50,304 is 50,257 padded to whole tiles of 64. Layers are not scanned: a
    # scan copies what it keeps of each, a fifth of the traffic on an H200.
    model=dataclasses.replace(gpt2("124M"), vocab_size=50_304, dropout=0.0, bias=False, remat="dots"),
    data=DataConfig(path="data/openwebtext"),
    optim=OptimConfig(learning_rate=6e-4, warmup_steps=2000, beta2=0.95, min_lr_ratio=0.1, weight_decay=0.1),
    # At most 12 sequences at once per device, and logits for 512 tokens of each: 40 micro-batches on one device.
    parallel=ParallelConfig(micro_batch_size=12, loss_chunk=512),
    train=TrainConfig(
        steps=600_000,
        batch_size=480,
        eval_every=1000,
        eval_tokens=2_000_000,
        checkpoint_every=1000,
        sample_tokens=100,
    ),
)

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
