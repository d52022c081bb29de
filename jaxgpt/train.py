"""One training step, as pure functions. `parallel` applies transformations: jit, donation, devices."""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

from jaxgpt.batch import Batch
from jaxgpt.config.validate import short_repr
from jaxgpt.errors import UserError

Params = dict[str, Any]  #: parameters, a tree of arrays
Metrics = dict[str, Any]  #: what a step reports, scalars by name
#: (params, batch, dropout key or None) -> (a sum over targets in nats, their number, more such sums to report)
LossFn = Callable[[Params, Batch, jax.Array | None], tuple[jax.Array, jax.Array, Metrics]]


@struct.dataclass
class SkipState:
    """State of the optimizer, which skipped steps do not change, and a record of those steps."""

    inner_state: Any  # state of the Optax transformation
    skipped: jax.Array  # int32: steps skipped so far
    in_a_row: jax.Array  # int32: steps skipped since the last one taken
    __repr__ = short_repr


@struct.dataclass
class TrainState:
    """Everything that changes from step to step. With the experiment and the data it determines the run."""

    step: jax.Array  # int32: batches seen
    params: Params  # float32: the trained parameters
    opt_state: SkipState  # state of the optimizer, and a record of skipped steps
    frozen_params: Params | None = None  # the model's own, if `params` are adapters. None if there are none
    __repr__ = short_repr


def init_and_dropout_keys(seed: int) -> tuple[jax.Array, jax.Array]:
    """Return a run's keys for initialisation and for dropout."""
    init_key, dropout_key = jax.random.split(jax.random.key(seed))
    return init_key, dropout_key


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    params: Params | None = None,
    *,
    adapt: Callable[[jax.Array, Params], tuple[Params, Params]] | None = None,
    batch_size: int = 1,
) -> TrainState:
    """Return the state of step 0.

    Training starts from `params`, or from random ones that depend only on the key. `adapt(key, params)` returns the
    parameters to train and the model's own as they are frozen. None means that these are trained. linen traces the model
    with `batch_size` rows of tokens, a multiple of the model's devices. No value depends on it.
    """
    frozen_params = None
    if params is None:
        params = cast(Params, model.init(key, jnp.zeros((batch_size, 1), jnp.int32))["params"])
    if adapt is not None:
        params, frozen_params = adapt(jax.random.fold_in(key, 1), params)
    return TrainState(jnp.zeros((), jnp.int32), params, init_skip_state(optimizer.init(params)), frozen_params)


def init_skip_state(inner_state: Any) -> SkipState:
    """Return the state of an optimizer that has skipped nothing."""
    skipped, in_a_row = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)  # two arrays, since each is donated
    return SkipState(inner_state, skipped, in_a_row)


def train_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    grad_accum_steps: int = 1,
    report: Callable[[Any, Any, Any], Metrics] = lambda grads, updates, opt_state: {},
    mean: Callable[[Any], Any] = lambda sums: sums,
) -> tuple[TrainState, Metrics]:
    """Take one optimizer step on one batch. Return the new state and its metrics. The caller donates the old state.

    A step is skipped if its loss or gradient norm is not finite. It changes neither the parameters nor the optimizer's
    state, but advances `step`, and with it the data. A finite gradient norm guarantees finite updates: it bounds the
    squares that Adam keeps, and OptimConfig bounds their factors. Checking the updates themselves would take 1.4 ms in
    nanoGPT's CPU configuration, 2.5% of its step.

    Metrics are scalars: "loss" in nats per target, what `loss_fn` reports, also per target, "grad_norm", and "in_a_row",
    the steps skipped since the last one taken, 0 if this one was. "learning_rate" is what the optimizer used, or would
    have used: its state's, if there is one of that name, else the schedule's.

    Args:
        key: the run's key. Dropout in step t uses `fold_in(key, t)`, so that a resumed run draws the same numbers.
        loss_fn: the loss to minimise, such as `loss.make_loss` returns.
        optimizer: any Optax transformation.
        schedule: the optimizer's learning rate by the number of steps taken.
        grad_accum_steps: micro-batches to take in turn. Summed gradients are divided by the number of targets, as for
            one big batch.
        report: returns more metrics, of the gradients, the updates and the optimizer's new state.
        mean: averages over devices that run this function on other parts of the batch.
    """
    step_key = jax.random.fold_in(key, state.step)

    def over_batch(function: Callable[[Batch, jax.Array | int], Any]) -> Any:
        """Return the sum of a function of (micro-batch, its number) over this batch, as an average over devices."""
        if grad_accum_steps == 1:
            return mean(function(batch, 0))
        turns = (batch.micro_batches(grad_accum_steps), jnp.arange(grad_accum_steps))
        shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], turns))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return mean(jax.lax.scan(lambda sums, x: (jax.tree.map(jnp.add, sums, function(*x)), None), zero, turns)[0])

    def gradients(params: Params) -> tuple[Any, Params]:
        """Return ((mean loss, number of targets, more sums), gradients of the first)."""

        def of_micro(micro: Batch, index: jax.Array | int) -> tuple[Any, Params]:
            def loss(params: Params) -> tuple[jax.Array, Any]:
                nats, *more = loss_fn(params, micro, jax.random.fold_in(step_key, index))
                return nats, (nats, *more)

            return jax.grad(loss, has_aux=True)(params)[::-1]

        (nats, count, more), grads = over_batch(of_micro)
        count = jnp.where(count > 0, count, 1.0)  # a fully masked batch gives zero gradients, not NaN
        return (nats / count, count, more), jax.tree.map(lambda g: g / count, grads)

    def mean_loss(params: Params) -> jax.Array:
        nats, count = over_batch(lambda micro, index: loss_fn(params, micro, jax.random.fold_in(step_key, index))[:2])
        return nats / jnp.where(count > 0, count, 1.0)

    (loss, count, more), grads = gradients(state.params)
    norm, before = optax.tree.norm(grads), state.opt_state
    metrics = {"loss": loss, "grad_norm": norm}

    steps_taken = state.step - before.skipped
    is_taken = jnp.isfinite(loss) & jnp.isfinite(norm)

    def choose(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), new, old)

    # Some optimizers need these, for a line search, a Hessian, a step size or several updates. Others ignore them.
    extra = {"value": loss, "grad": grads, "value_fn": mean_loss, "obj_fn": mean_loss}
    extra["grad_fn"] = lambda params: gradients(params)[1]
    update = optax.with_extra_args_support(optimizer).update
    updates, inner_state = update(grads, before.inner_state, state.params, **extra)
    own = {name: value / count for name, value in more.items()} | report(grads, updates, inner_state)
    opt_state = SkipState(
        inner_state=choose(inner_state, before.inner_state),
        skipped=choose(before.skipped, before.skipped + 1),
        in_a_row=choose(0, before.in_a_row + 1),
    )
    # Parameters are chosen after the sum, not their updates before it: the compiler fuses the optimizer's last product
    # and this sum into one instruction with one rounding.
    params = choose(optax.apply_updates(state.params, updates), state.params)
    reported = optax.tree.get_all_with_path(inner_state, "learning_rate")  # by optax.inject_hyperparams
    metrics["learning_rate"] = reported[0][1] if reported else schedule(steps_taken)
    metrics["in_a_row"] = opt_state.in_a_row
    if taken := {"step", "tokens", "seconds", "val_loss", "saved", *metrics} & own.keys():
        raise UserError(f"a metric of the experiment's own is called {min(taken)!r}, as one of jaxgpt's: rename it")
    return TrainState(state.step + 1, params, opt_state, state.frozen_params), own | metrics


def why_skipped(metrics: Metrics) -> str | None:
    """Return the reason why a step was skipped, from its metrics, or None if it was taken."""
    named = {"loss": metrics["loss"], "gradient norm": metrics["grad_norm"]}
    return next((f"{name} is {float(x)}" for name, x in named.items() if not math.isfinite(x)), None)


def eval_step(params: Params, batch: Batch, *, loss_fn: LossFn) -> tuple[jax.Array, jax.Array]:
    """Return (summed nats, number of targets) of one batch, without dropout."""
    nats, count, _ = loss_fn(params, batch, None)
    return nats, count
