"""One training step, as pure functions. Transformations (jit, donation, devices) are applied in `parallel`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgpt.data.pipeline import Batch
from jaxgpt.loss import next_token_loss
from jaxgpt.model import GPT


@struct.dataclass
class TrainState:
    """All that changes from step to step; with the experiment and the data it is the whole run."""

    step: jax.Array  # int32: optimiser steps taken
    params: Any  # float32
    opt_state: optax.OptState


def init_state(model: GPT, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The state of step 0. Parameters depend on the key alone, not on any batch."""
    params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


def train_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    *,
    model: GPT,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    accumulation: int = 1,
) -> tuple[TrainState, dict[str, Any]]:
    """One optimiser step on one batch -> (state, {"loss", "grad_norm", "learning_rate"}: float32 scalars).

    key: the run's; dropout in step t uses `fold_in(key, t)`, so that a resumed run draws what an uninterrupted
    one would. accumulation: micro-batches, run one after the other; gradients are summed, then divided by the
    number of targets, so the result is that of one big batch.
    """
    step_key = jax.random.fold_in(key, state.step)

    def loss_sum(params, micro: Batch, micro_key):
        logits_BTV: Any = model.apply({"params": params}, micro.inputs_BT, train=True, rngs={"dropout": micro_key})
        return next_token_loss(logits_BTV, micro.targets_BT, micro.mask_BT)

    def gradients(micro: Batch, index) -> tuple:
        micro_key = jax.random.fold_in(step_key, index)
        (nats, count), grads = jax.value_and_grad(loss_sum, has_aux=True)(state.params, micro, micro_key)
        return nats, count, grads

    if accumulation == 1:
        nats, count, grads = gradients(batch, 0)
    else:
        micros = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        (nats, count, grads), _ = jax.lax.scan(
            lambda total, x: (jax.tree.map(jnp.add, total, gradients(*x)), None),
            zero,
            (micros, jnp.arange(accumulation)),
        )

    count = jnp.maximum(count, 1.0)  # a batch whose every target is masked teaches nothing, and is no NaN
    grads = jax.tree.map(lambda g: g / count, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        "loss": nats / count,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": schedule(state.step),
    }
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics


def eval_step(params: Any, batch: Batch, *, model: GPT) -> tuple[jax.Array, jax.Array]:
    """(summed nats, number of targets) of one batch, without dropout."""
    logits_BTV: Any = model.apply({"params": params}, batch.inputs_BT)
    return next_token_loss(logits_BTV, batch.targets_BT, batch.mask_BT)
