"""One training step, as pure functions. Transformations (jit, donation, devices) are applied in `parallel`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgpt.batch import Batch
from jaxgpt.loss import chunked_next_token_loss, next_token_loss
from jaxgpt.model import GPT
from jaxgpt.skip import SkipState, apply_updates, skip_metrics

Params = dict[str, Any]  # a tree of arrays
MergeFn = Callable[[Params, Params | None], Params]  # (trained, frozen) -> what the model takes


@struct.dataclass
class TrainState:
    """All that changes from step to step; with the experiment and the data it is the whole run."""

    step: jax.Array  # int32: batches seen, of which all but `opt_state.skipped` moved the parameters
    params: Params  # float32: all those that are trained
    opt_state: SkipState
    frozen_params: Params | None = None  # the model's own, where `params` are adapters of them; they stay as they are


def init_and_dropout_keys(seed: int) -> tuple[jax.Array, jax.Array]:
    """Return a run's two keys."""
    init_key, dropout_key = jax.random.split(jax.random.key(seed))
    return init_key, dropout_key


def init_state(
    model: GPT,
    optimizer: optax.GradientTransformationExtraArgs,
    key: jax.Array,
    params: Params | None = None,
    *,
    adapt: Callable[[jax.Array, Params], Params] | None = None,
) -> TrainState:
    """Return the state of step 0.

    params: of the model, to start from. None: random ones, which depend on the key alone.
    adapt: (key, params) -> the parameters to train; those of the model are frozen. None: all of the model's are trained.
    """
    frozen_params = None
    if params is None:
        params = cast(Params, model.init(key, jnp.zeros((1, 1), jnp.int32))["params"])
    if adapt is not None:
        frozen_params, params = params, adapt(jax.random.fold_in(key, 1), params)
    opt_state = cast(SkipState, optimizer.init(params))
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, frozen_params)


def only_trained(params: Params, frozen_params: Params | None) -> Params:
    """Return the trained parameters as the model's: the `MergeFn` of a model all of which is trained."""
    return params


def train_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    *,
    model: GPT,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    merge: MergeFn = only_trained,
    grad_accum_steps: int = 1,
    loss_chunk: int | None = None,
    label_smoothing: float = 0.0,
    mean: Callable[[Any], Any] = lambda sums: sums,
) -> tuple[TrainState, dict[str, Any]]:
    """Take one optimizer step on one batch. Return the new state and its metrics: scalars, float32 but for counts.

    metrics: "loss" in nats per target, "grad_norm", "learning_rate" (which the optimizer used, or would have), and those
    of `skip_metrics`. The caller donates `state`. After a skipped step, `step` has advanced, and the data with it.

    key: the run's. Dropout in step t uses `fold_in(key, t)`, so a resumed run draws what an uninterrupted one would.
    optimizer: wrapped in `skip_bad_steps`. schedule: its learning rate, by the count of steps taken.
    merge: (trained, frozen parameters) -> those of the model.
    grad_accum_steps: micro-batches, one after the other. Gradients are summed, then divided by the number of targets, so
        the result is that of one big batch.
    loss_chunk, label_smoothing: see `batch_loss`.
    mean: over the devices that hold the other parts of the batch, where each runs this function by itself.
    """
    step_key = jax.random.fold_in(key, state.step)

    def gradients(micro: Batch, index: jax.Array | int) -> tuple[jax.Array, jax.Array, Params]:
        """Return (summed nats, number of targets, gradients of the sum)."""
        micro_key = jax.random.fold_in(step_key, index)

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            params = merge(params, state.frozen_params)
            return batch_loss(
                params, micro, micro_key, model=model, loss_chunk=loss_chunk, label_smoothing=label_smoothing
            )

        (nats, count), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return nats, count, grads

    if grad_accum_steps == 1:
        sums = gradients(batch, 0)
    else:
        micros = micro_batches(batch, grad_accum_steps)
        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        sums, _ = jax.lax.scan(
            lambda total, x: (jax.tree.map(jnp.add, total, gradients(*x)), None),
            zero,
            (micros, jnp.arange(grad_accum_steps)),
        )

    nats, count, grads = mean(sums)
    count = jnp.where(count > 0, count, 1.0)  # a fully masked batch gives zero gradients, not NaN
    grads = jax.tree.map(lambda g: g / count, grads)
    loss, norm = nats / count, optax.tree.norm(grads)
    before: Any = state.opt_state
    updates, after = optimizer.update(grads, before, state.params, value=loss, grad_norm=norm, step=state.step)
    opt_state = cast(SkipState, after)
    metrics = {"loss": loss, "grad_norm": norm, "learning_rate": schedule(before.count_taken(state.step))}
    metrics |= skip_metrics(before, opt_state, value=loss, grad_norm=norm)
    params = apply_updates(state.params, updates, opt_state)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics


def micro_batches(batch: Batch, grad_accum_steps: int) -> Batch:
    """Return the same rows with a first axis of turns: each has every grad_accum_steps-th row.

    Where the rows are on different devices, each keeps its own.
    """
    return jax.tree.map(lambda x: x.reshape(-1, grad_accum_steps, *x.shape[1:]).swapaxes(0, 1), batch)


def batch_loss(
    params: Params,
    micro: Batch,
    key: jax.Array | None,
    *,
    model: GPT,
    loss_chunk: int | None = None,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return (summed nats, number of targets) of one batch.

    key: of dropout. None: no dropout.
    loss_chunk: tokens of each sequence whose logits are in memory at once, a divisor of T. None: all.
    label_smoothing: see `next_token_loss`.
    """
    forward: Callable[..., Any] = functools.partial(
        model.apply,
        {"params": params},
        micro.inputs_BT,
        train=key is not None,
        rngs=None if key is None else {"dropout": key},
        segments_BT=micro.segments_BT,
    )
    if micro.source_BS is not None:  # an encoder-decoder's
        forward = functools.partial(forward, source_BS=micro.source_BS, source_segments_BS=micro.source_segments_BS)
    if loss_chunk is None or loss_chunk >= micro.targets_BT.shape[1]:
        return next_token_loss(forward(), micro.targets_BT, micro.mask_BT, smoothing=label_smoothing)

    unembed: Any = lambda head, x_BTD: model.apply({"params": head}, x_BTD, method="unembed")  # noqa: E731
    sums = model.sharding.reduce_loss(
        functools.partial(chunked_next_token_loss, unembed, chunk=loss_chunk, smoothing=label_smoothing)
    )
    head = {name: params[name] for name in model.unembed_params}
    return sums(head, forward(method="hidden_states"), micro.targets_BT, micro.mask_BT)


def eval_step(
    params: Params, batch: Batch, *, model: GPT, loss_chunk: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (summed nats, number of targets) of one batch, without dropout."""
    return batch_loss(params, batch, None, model=model, loss_chunk=loss_chunk)
