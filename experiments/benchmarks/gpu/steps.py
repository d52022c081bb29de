"""The training step that is timed, and the text that it reads."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from training import Steps, trainer_steps

from gpu.setting import Setting
from jaxgpt import Experiment, GPTConfig, OptimConfig, ParallelConfig, TrainConfig
from jaxgpt.batch import Batch
from jaxgpt.parallel.jax_setup import first_device
from jaxgpt.parallel.limits import PEAKS, train_flops_per_token
from jaxgpt.parallel.trainer import Trainer, make_trainer

ON_ONE = ParallelConfig(strategy="single")


def gpt2_experiment(setting: Setting, context: int, **options) -> Experiment:
    """Return the experiment of nanoGPT's GPT-2 124M. options: fields of the model or of `ParallelConfig`."""
    # Half of the logits at once, as in experiments/gpt2_124m.py: the gradient of all of them would be a scatter.
    parallel = {"loss_chunk": None}
    parallel |= {name: options.pop(name) for name in ("loss_chunk", "micro_batch_size") if name in options}
    model = GPTConfig(
        vocab_size=setting.vocab_size,
        block_size=context,
        n_layer=setting.n_layer,
        n_head=setting.n_head,
        n_embd=setting.n_embd,
        bias=False,
        activation="gelu",
        **options,
    )
    return Experiment(
        name="gpu",
        model=model,
        optim=OptimConfig(learning_rate=6e-4, beta2=0.95),
        train=TrainConfig(batch_size=setting.tokens // context, steps=10**6),
        parallel=dataclasses.replace(ON_ONE, **parallel),
    )


def random_batches(experiment: Experiment) -> Iterator[Batch]:
    """Yield windows of a random text in which low ids are frequent, so that there is something to learn."""
    rng = np.random.default_rng(0)
    B, T = experiment.train.batch_size, experiment.model.block_size
    text = (experiment.model.vocab_size * rng.random(100 * (T + 1)) ** 3).astype(np.int32)
    while True:
        windows = np.stack([text[i : i + T + 1] for i in rng.integers(0, len(text) - T, B)])
        yield Batch(windows[:, :-1], windows[:, 1:])


def make_steps(experiment: Experiment) -> tuple[Trainer, Steps]:
    """Return the trainer that `fit` would make, and its steps."""
    trainer = make_trainer(experiment)
    return trainer, trainer_steps(trainer, random_batches(experiment))


def model_flops(experiment: Experiment, trainer: Trainer) -> float:
    """Return the model's FLOPs in one step."""
    tokens = experiment.train.batch_size * experiment.model.block_size
    return tokens * train_flops_per_token(experiment.model, trainer.parameters[0])


def facts(experiment: Experiment, trainer: Trainer) -> dict:
    """Return what a worker tells of itself."""
    peaks = PEAKS.get(first_device().device_kind)
    return {
        "flops": model_flops(experiment, trainer),
        "peak": None if peaks is None else peaks.flops,
        "device": first_device().device_kind,
        "said": trainer.options.reason,
    }
