"""One training step, as pure functions. Transformations (jit, donation, devices) are applied in `parallel`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgpt.data.pipeline import Batch
from jaxgpt.loss import chunked_next_token_loss, next_token_loss
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
    loss_chunk: int | None = None,
    mean: Callable[[Any], Any] = lambda sums: sums,
) -> tuple[TrainState, dict[str, Any]]:
    """One optimiser step on one batch -> (state, {"loss", "grad_norm", "learning_rate"}: float32 scalars).

    key: the run's; dropout in step t uses `fold_in(key, t)`, so that a resumed run draws what an uninterrupted
    one would. accumulation: micro-batches, run one after the other; gradients are summed, then divided by the
    number of targets, so the result is that of one big batch. loss_chunk: see `batch_loss`.
    mean: over the devices that hold the other parts of the batch, where each runs this function by itself.
    """
    step_key = jax.random.fold_in(key, state.step)

    def gradients(micro: Batch, index) -> tuple:
        loss = functools.partial(
            batch_loss, micro=micro, key=jax.random.fold_in(step_key, index), model=model, loss_chunk=loss_chunk
        )
        (nats, count), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return nats, count, grads

    if accumulation == 1:
        sums = gradients(batch, 0)
    else:
        # Every accumulation-th row: where the rows lie on different devices, each keeps its own.
        micros = jax.tree.map(lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), batch)
        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        sums, _ = jax.lax.scan(
            lambda total, x: (jax.tree.map(jnp.add, total, gradients(*x)), None),
            zero,
            (micros, jnp.arange(accumulation)),
        )

    nats, count, grads = mean(sums)
    count = jnp.where(count > 0, count, 1.0)  # a batch whose every target is masked teaches nothing, and is no NaN
    grads = jax.tree.map(lambda g: g / count, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        "loss": nats / count,
        "grad_norm": optax.tree.norm(grads),
        "learning_rate": schedule(state.step),
    }
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics


def batch_loss(
    params: Any, micro: Batch, key: jax.Array | None, *, model: GPT, loss_chunk: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(summed nats, number of targets) of one batch; key: of dropout, None for none.

    loss_chunk: tokens of each sequence whose logits are in memory at once, a divisor of T; None: all.
    """
    how: Any = {"train": key is not None, "rngs": None if key is None else {"dropout": key}}
    if loss_chunk is None or loss_chunk >= micro.targets_BT.shape[1]:
        logits_BTV: Any = model.apply({"params": params}, micro.inputs_BT, **how)
        return next_token_loss(logits_BTV, micro.targets_BT, micro.mask_BT)
    x_BTD: Any = model.apply({"params": params}, micro.inputs_BT, method="features", **how)

    def unembed(head: Any, x_BTD: jax.Array) -> jax.Array:
        logits_BTV: Any = model.apply({"params": head}, x_BTD, method="unembed")
        return logits_BTV

    head = {name: params[name] for name in model.head}
    sums = model.spread.sums(functools.partial(chunked_next_token_loss, unembed, chunk=loss_chunk))
    return sums(head, x_BTD, micro.targets_BT, micro.mask_BT)


def eval_step(params: Any, batch: Batch, *, model: GPT, loss_chunk: int | None = None) -> tuple[jax.Array, jax.Array]:
    """(summed nats, number of targets) of one batch, without dropout."""
    return batch_loss(params, batch, None, model=model, loss_chunk=loss_chunk)
