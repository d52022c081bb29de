"""One training step, as pure functions. `parallel` applies transformations: jit, donation, devices."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgpt.batch import Batch
from jaxgpt.loss import next_token_loss
from jaxgpt.model import GPT
from jaxgpt.skip import apply_updates, count_taken, skip_metrics

Params = dict[str, Any]  # a tree of arrays
# The loss of hidden states, such as `head_loss.chunked_next_token_loss`:
# (unembed, head, x_BTD, targets_BT, mask_BT, *, smoothing) -> (summed nats, number of targets)
HeadLoss = Callable[..., tuple[jax.Array, jax.Array]]
MergeFn = Callable[[Params, Params | None], Params]  # (trained, frozen) -> what the model takes


@struct.dataclass
class TrainState:
    """Everything that changes from step to step; with the experiment and the data it determines the run."""

    step: jax.Array  # int32: batches seen
    params: Params  # float32: the trained parameters
    opt_state: Any  # a `SkipState` in runs
    frozen_params: Params | None = None  # the model's own, if `params` are adapters


def init_and_dropout_keys(seed: int) -> tuple[jax.Array, jax.Array]:
    """Return a run's keys for initialisation and for dropout."""
    init_key, dropout_key = jax.random.split(jax.random.key(seed))
    return init_key, dropout_key


def init_state(
    model: GPT,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    params: Params | None = None,
    *,
    adapt: Callable[[jax.Array, Params], tuple[Params, Params]] | None = None,
    batch_size: int = 1,
) -> TrainState:
    """Return the state of step 0.

    Training starts from `params`, or from random ones that depend only on the key. `adapt(key, params)` returns the
    parameters to train and the model's own as they are frozen; None means that these are trained. `batch_size` is that of the
    tokens with which linen traces the model, a multiple of the model's devices; no value depends on it.
    """
    frozen_params = None
    if params is None:
        params = cast(Params, model.init(key, jnp.zeros((batch_size, 1), jnp.int32))["params"])
    if adapt is not None:
        params, frozen_params = adapt(jax.random.fold_in(key, 1), params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), frozen_params)


def only_trained(params: Params, frozen_params: Params | None) -> Params:
    """Return the trained parameters: the `MergeFn` of a model without frozen ones."""
    return params


def train_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    *,
    model: GPT,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    merge: MergeFn = only_trained,
    grad_accum_steps: int = 1,
    head_loss: HeadLoss | None = None,
    label_smoothing: float = 0.0,
    mean: Callable[[Any], Any] = lambda sums: sums,
) -> tuple[TrainState, dict[str, Any]]:
    """Take one optimizer step on one batch. Return the new state and its metrics; the caller donates the old state.

    Metrics are scalars: "loss" in nats per target, "grad_norm", "learning_rate" (which the optimizer used, or would
    have used), and those of `skip_metrics`. A skipped step advances `step` too, and with it the data.

    Dropout in step t uses `fold_in(key, t)`, so that a resumed run draws what an uninterrupted one would. `optimizer`
    may be wrapped in `skip_bad_steps`; `schedule` is its learning rate by the number of steps taken. `grad_accum_steps`
    micro-batches are taken in turn: summed gradients are divided by the number of targets, as for one big batch. `mean`
    averages over devices that run this function on other parts of the batch. For the rest see `batch_loss`.
    """
    step_key = jax.random.fold_in(key, state.step)
    loss_of = functools.partial(batch_loss, model=model, head_loss=head_loss, label_smoothing=label_smoothing)

    def gradients(micro: Batch, index: jax.Array | int) -> tuple[jax.Array, jax.Array, Params]:
        """Return (summed nats, number of targets, gradients of the sum)."""
        micro_key = jax.random.fold_in(step_key, index)
        loss = jax.value_and_grad(lambda x: loss_of(merge(x, state.frozen_params), micro, micro_key), has_aux=True)
        (nats, count), grads = loss(state.params)
        return nats, count, grads

    if grad_accum_steps == 1:
        sums = gradients(batch, 0)
    else:
        turns = (batch.micro_batches(grad_accum_steps), jnp.arange(grad_accum_steps))
        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        sums, _ = jax.lax.scan(lambda sums, x: (jax.tree.map(jnp.add, sums, gradients(*x)), None), zero, turns)

    nats, count, grads = mean(sums)
    count = jnp.where(count > 0, count, 1.0)  # a fully masked batch gives zero gradients, not NaN
    grads = jax.tree.map(lambda g: g / count, grads)
    loss, norm, update = nats / count, optax.tree.norm(grads), optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, state.opt_state, state.params, value=loss, grad_norm=norm, step=state.step)
    metrics = {"loss": loss, "grad_norm": norm, "learning_rate": schedule(count_taken(state.opt_state, state.step))}
    metrics |= skip_metrics(state.opt_state, opt_state, loss, norm)
    params = apply_updates(state.params, updates, opt_state)
    return TrainState(state.step + 1, params, opt_state, state.frozen_params), metrics


def batch_loss(
    params: Params,
    micro: Batch,
    key: jax.Array | None,
    *,
    model: GPT,
    head_loss: HeadLoss | None = None,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return (summed nats, number of targets) of one batch.

    Without `key` there is no dropout. `head_loss` computes the loss without all logits in memory at once; None means
    `next_token_loss`. For `label_smoothing` see there.
    """
    inputs: dict[str, Any] = {"segments_BT": micro.segments_BT}
    if micro.source_BS is not None:  # an encoder-decoder's
        inputs |= {"source_BS": micro.source_BS, "source_segments_BS": micro.source_segments_BS}
    rngs = None if key is None else {"dropout": key}
    forward: Any = functools.partial(
        model.apply, {"params": params}, micro.inputs_BT, train=key is not None, rngs=rngs, **inputs
    )
    if head_loss is None:
        return next_token_loss(forward(), micro.targets_BT, micro.mask_BT, smoothing=label_smoothing)
    unembed: Any = lambda head, x_BTD: model.apply({"params": head}, x_BTD, method="unembed")  # noqa: E731
    sums = model.sharding.reduce_loss(functools.partial(head_loss, unembed, smoothing=label_smoothing))
    head = {name: params[name] for name in model.unembed_params}
    return sums(head, forward(method="hidden_states"), micro.targets_BT, micro.mask_BT)


def eval_step(
    params: Params, batch: Batch, *, model: GPT, head_loss: HeadLoss | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (summed nats, number of targets) of one batch, without dropout."""
    return batch_loss(params, batch, None, model=model, head_loss=head_loss)
