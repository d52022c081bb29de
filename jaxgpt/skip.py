"""Skip bad steps, as a gradient transformation: like `optax.apply_if_finite`, also for spikes, and with a record."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

NUM_NORMS = 128  # number of gradient norms of taken steps to keep
MIN_NORMS = 16  # norms needed before a step can be a spike
TAKEN, NOT_FINITE, SPIKE = range(3)  # outcome of a step: metrics["skipped"]


@struct.dataclass
class SkipState:
    """State of the wrapped optimizer, unchanged by skipped steps, and a record of those steps."""

    inner_state: Any
    skipped: jax.Array  # int32: steps skipped so far
    in_a_row: jax.Array  # int32: steps skipped since the last one taken
    norms: jax.Array  # float32 [NUM_NORMS]: a ring of gradient norms of the last steps taken; NaN: empty
    spikes: float | None = struct.field(pytree_node=False, default=None)  # see `skip_bad_steps`


def skip_bad_steps(
    optimizer: optax.GradientTransformation, *, spikes: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that a bad step changes neither the parameters nor its own state.

    A step is bad if its loss or gradient norm is not finite, or if the norm is more than `spikes` times the median of
    the last NUM_NORMS norms of taken steps; None means that only the first counts. A finite gradient norm guarantees
    finite updates: it bounds the squares that Adam keeps, and OptimConfig bounds their factors. Checking the updates
    themselves would take 1.4 ms in nanoGPT's CPU configuration, 2.5% of its step.

    `update` takes more arguments: `value`, the loss; `grad_norm`; and `step`, int32, the steps before this one.
    """

    def init(params: optax.Params) -> SkipState:
        skipped, in_a_row = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)  # two arrays, since each is donated
        return SkipState(optimizer.init(params), skipped, in_a_row, jnp.full(NUM_NORMS, jnp.nan, jnp.float32), spikes)

    def update(updates, state: SkipState, params=None, *, value: jax.Array, grad_norm: jax.Array, step: jax.Array):
        count, good = count_taken(state, step), jnp.isfinite(value) & jnp.isfinite(grad_norm)
        if spikes is not None:
            good &= ~((count >= MIN_NORMS) & (grad_norm > spikes * jnp.nanmedian(state.norms)))
        in_a_row = jnp.where(good, 0, state.in_a_row + 1)
        taken = in_a_row == 0
        updates, inner_state = optimizer.update(updates, state.inner_state, params)
        inner_state = jax.tree.map(lambda new, old: jnp.where(taken, new, old), inner_state, state.inner_state)
        skipped = jnp.where(taken, state.skipped, state.skipped + 1)
        norms = jnp.where(taken, state.norms.at[count % NUM_NORMS].set(grad_norm), state.norms)
        updates = jax.tree.map(lambda x: jnp.where(taken, x, 0.0), updates)
        return updates, SkipState(inner_state, skipped, in_a_row, norms, spikes)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


# What `train_step` needs of an optimizer's state. An optimizer that is not wrapped takes every step.


def count_taken(state: Any, step: jax.Array) -> jax.Array:
    """Return how many of the first `step` steps the optimizer took: its schedules follow this count."""
    return step - state.skipped if isinstance(state, SkipState) else step


def apply_updates(params: Any, updates: optax.Updates, state: Any) -> Any:
    """Return the parameters after an update, like `optax.apply_updates`; a skipped step returns the old ones.

    The updates of a skipped step are zero already, but selecting only those would separate the optimizer's last product
    from this sum, which the compiler otherwise fuses into one instruction with one rounding.
    """
    new_params = optax.apply_updates(params, updates)
    if not isinstance(state, SkipState):
        return new_params
    taken = state.in_a_row == 0
    return jax.tree.map(lambda new, old: jnp.where(taken, new, old), new_params, params)


def skip_metrics(before: Any, after: Any, value: jax.Array, grad_norm: jax.Array) -> dict[str, jax.Array]:
    """Return metrics of the step between two states: "skipped" (TAKEN, NOT_FINITE or SPIKE) and "in_a_row".

    With `spikes` also "median", that of the norms before the step.
    """
    if not isinstance(before, SkipState) or not isinstance(after, SkipState):
        return {"skipped": jnp.asarray(TAKEN), "in_a_row": jnp.zeros((), jnp.int32)}
    is_finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
    skipped = jnp.where(after.in_a_row == 0, TAKEN, jnp.where(is_finite, SPIKE, NOT_FINITE))
    metrics = {"skipped": skipped, "in_a_row": after.in_a_row}
    return metrics if before.spikes is None else metrics | {"median": jnp.nanmedian(before.norms)}


def why_skipped(metrics: dict[str, Any]) -> str:
    """Return the reason why a step was skipped, from its metrics."""
    loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
    if not math.isfinite(loss):
        return f"loss is {loss}"
    if not math.isfinite(norm):
        return f"gradient norm is {norm}"
    return f"gradient norm {norm:.3g} is {norm / float(metrics['median']):.1f} times its median"
