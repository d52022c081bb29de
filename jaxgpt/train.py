"""One training step, as pure functions. `parallel` applies transformations: jit, donation, devices."""

import functools
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
RESERVED = {"step", "tokens", "seconds", "val_loss", "saved"}  # keys of lines of the log that are no metrics


@struct.dataclass
class TrainState:
    """Everything that changes from step to step. With the experiment and the data it determines the run."""

    step: jax.Array  # int32: batches seen
    params: Params  # float32: the trained parameters
    opt_state: Any  # state of the Optax transformation, which skipped steps do not change
    skipped: jax.Array  # int32: steps skipped so far
    skipped_in_a_row: jax.Array  # int32: steps skipped since the last one taken
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
    step, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))  # three arrays, since each is donated
    return TrainState(step, params, optimizer.init(params), skipped, in_a_row, frozen_params)


def train_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    grad_accum_steps: int = 1,
    merge: Callable[[Params, Params | None], Params] = lambda params, frozen_params: params,
    report: Callable[[Any, Any, Any], Metrics] = lambda grads, updates, opt_state: {},
    mean: Callable[[Any], Any] = lambda sums: sums,
) -> tuple[TrainState, Metrics]:
    """Take one optimizer step on one batch. Return the new state and its metrics. The caller donates the old state.

    A step is skipped if its loss or gradient norm is not finite. It changes neither the parameters nor the optimizer's
    state, but advances `step`, and with it the data. A finite gradient norm guarantees finite updates: it bounds the
    squares that Adam keeps, and OptimConfig bounds their factors.

    Metrics are scalars: "loss" in nats per target, what `loss_fn` reports, also per target, "grad_norm", and
    "skipped_in_a_row", the steps skipped since the last one taken. "learning_rate" is what the optimizer used, or would
    have used: what its state has under that name, else what the schedule says.

    Args:
        state: what `init_state` or the step before has returned.
        batch: the rows of the whole batch.
        key: the key of the run. Dropout in step t uses `fold_in(key, t)`, so that a resumed run draws the same numbers.
        loss_fn: the loss to minimise, such as `loss.make_loss` returns.
        optimizer: any Optax transformation. An update that takes `value_and_grad` gets a function of parameters, which
            returns the batch's mean loss and its gradient.
        schedule: the optimizer's learning rate by the number of steps taken.
        grad_accum_steps: micro-batches to take in turn. Summed gradients are divided by the number of targets, as for
            one big batch.
        merge: makes the parameters of `loss_fn` of the trained and the frozen ones.
        report: returns more metrics, of the gradients, the updates and the optimizer's new state.
        mean: averages over devices that run this function on other parts of the batch.
    """
    key = jax.random.fold_in(key, state.step)

    def sum_gradients(params: Params, micro: Batch, number: jax.Array | int) -> tuple[Params, Any]:
        """Return the gradient of a micro-batch's summed loss, and (that sum, its number of targets, metrics)."""

        def loss(params: Params) -> tuple[jax.Array, Any]:
            nats, *rest = loss_fn(merge(params, state.frozen_params), micro, jax.random.fold_in(key, number))
            return nats, (nats, *rest)

        return jax.grad(loss, has_aux=True)(params)

    def average(params: Params) -> tuple[jax.Array, Params, Metrics]:
        """Return the batch's mean loss, its gradient and the other means."""
        sums = add_up(functools.partial(sum_gradients, params), batch, grad_accum_steps)
        grads, (nats, count, metrics) = mean(sums)
        count = jnp.where(count > 0, count, 1.0)  # a fully masked batch gives zero gradients, not NaN
        return jax.tree.map(lambda x: x / count, (nats, grads, metrics))

    loss, grads, metrics = average(state.params)
    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, state.opt_state, state.params, value_and_grad=lambda x: average(x)[:2])
    metrics |= report(grads, updates, opt_state)
    rates = optax.tree.get_all_with_path(opt_state, "learning_rate")  # by optax.inject_hyperparams
    # Parameters are chosen after the sum, not their updates before it: the compiler fuses the optimizer's last product
    # and this sum into one instruction with one rounding.
    params = optax.apply_updates(state.params, updates)
    taken = (params, opt_state, state.skipped, 0)
    skipped = (state.params, state.opt_state, state.skipped + 1, state.skipped_in_a_row + 1)
    params, opt_state, skips, in_a_row = jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), taken, skipped)
    after = TrainState(state.step + 1, params, opt_state, skips, in_a_row, state.frozen_params)
    ours = {"loss": loss, "grad_norm": norm, "skipped_in_a_row": in_a_row}
    ours["learning_rate"] = rates[0][1] if rates else schedule(state.step - state.skipped)
    if both := metrics.keys() & (RESERVED | ours.keys()):
        raise UserError(f"a metric of the experiment's own is called {min(both)!r}, as one of jaxgpt's: rename it")
    return after, metrics | ours


def add_up(function: Callable[[Batch, jax.Array | int], Any], batch: Batch, parts: int) -> Any:
    """Return the sum of a function of (micro-batch, its number) over the micro-batches of a batch, taken in turn."""
    if parts == 1:
        return function(batch, 0)
    turns = (batch.micro_batches(parts), jnp.arange(parts))
    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], turns))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(sums: Any, turn: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, function(*turn)), None

    return jax.lax.scan(add, zeros, turns)[0]


def why_skipped(metrics: Metrics) -> str | None:
    """Return the reason why a step was skipped, from its metrics, or None if it was taken."""
    named = {"loss": metrics["loss"], "gradient norm": metrics["grad_norm"]}
    return next((f"{name} is {float(x)}" for name, x in named.items() if not math.isfinite(x)), None)


def eval_step(params: Params, batch: Batch, *, loss_fn: LossFn) -> tuple[jax.Array, jax.Array]:
    """Return (summed nats, number of targets) of one batch, without dropout."""
    nats, count, _ = loss_fn(params, batch, None)
    return nats, count
