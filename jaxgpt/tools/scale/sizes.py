"""Sizes of an experiment's architecture, and how fast each trains here."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import jax

from jaxgpt.cluster.multihost import initialize
from jaxgpt.config import Experiment
from jaxgpt.parallel.flops import count_parameters, train_flops_per_token
from jaxgpt.session import check_session

EVAL_TOKENS = 2**17  # of a run's only validation, at most
TIMED = 1.0  # least seconds of the timed steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """One width of an experiment's architecture."""

    experiment: Experiment  # with its vocabulary size
    parameters: int
    flops_per_token: float

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step."""
        return self.experiment.train.batch_size * self.experiment.model.block_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Time of compilation and of training on this machine, without saving."""

    first_step: float  # seconds, with compilation
    per_token: float  # seconds of training


def smallest_n_head(experiment: Experiment) -> int:
    """Return the fewest heads with which all sizes of the architecture are whole numbers. Other sizes are multiples."""
    model = experiment.model
    sizes = (model.n_embd, model.n_kv_head or model.n_head, model.mlp_dim or model.n_head)
    return model.n_head // math.gcd(model.n_head, *sizes)


def make_size(experiment: Experiment, n_head: int, vocab_size: int) -> Size:
    """Return the experiment with another width: more or fewer heads of the same size, at the same depth.

    Maximal update parametrisation (`GPTConfig.mup_base_width`) lets one learning rate serve all of them.

    Args:
        experiment: the experiment, whose width is the reference.
        n_head: heads, a multiple of `smallest_n_head`.
        vocab_size: number of tokens.
    """
    model = experiment.model

    def scaled(size: int | None) -> int | None:
        return None if size is None else size * n_head // model.n_head

    width = scaled(model.n_embd)
    assert width
    wider = dataclasses.replace(
        model,
        vocab_size=vocab_size,
        n_head=n_head,
        n_embd=width,
        n_kv_head=scaled(model.n_kv_head),
        mlp_dim=scaled(model.mlp_dim),
        mup_base_width=model.mup_base_width or model.n_embd,
    )
    module = wider.make_model()
    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), "int32"))
    parameters = count_parameters(shapes["params"])
    return Size(
        experiment=dataclasses.replace(experiment, model=wider),
        parameters=parameters,
        flops_per_token=train_flops_per_token(wider, parameters),
    )


def with_horizon(experiment: Experiment, steps: int, seed: int = 0) -> Experiment:
    """Return the experiment with a complete schedule of that many steps, and one validation at its end.

    seed: added to the experiment's.
    """
    warmup = min(experiment.optim.warmup(steps), steps // 10)
    train = dataclasses.replace(
        experiment.train,
        steps=steps,
        seed=experiment.train.seed + seed,
        eval_every=steps,
        eval_tokens=min(experiment.train.eval_tokens or EVAL_TOKENS, EVAL_TOKENS),
        log_every=min(experiment.train.log_every, max(1, steps // 8)),
        sample_tokens=0,
    )
    return dataclasses.replace(
        experiment, train=train, optim=dataclasses.replace(experiment.optim, warmup_steps=warmup)
    )


def measure_speed(size: Size) -> Speed:
    """Take a few real steps of a run, without writing anything."""
    initialize(size.experiment.parallel)
    session = check_session(with_horizon(size.experiment, 1000), Path("not-written"), None)
    began, state, batches = time.monotonic(), session.restore_or_init(0), session.batches(0)
    try:
        state, metrics = session.trainer.train_step(state, next(batches), session.dropout_key)
        jax.block_until_ready(metrics)
        first_step, steps, began = time.monotonic() - began, 0, time.monotonic()
        while steps < 3 or time.monotonic() - began < TIMED:
            state, metrics = session.trainer.train_step(state, next(batches), session.dropout_key)
            jax.block_until_ready(metrics)
            steps += 1
        per_step = (time.monotonic() - began) / steps
    finally:
        batches.close()
    return Speed(first_step=first_step, per_token=per_step / size.tokens_per_step)
