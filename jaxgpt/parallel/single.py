"""One device: jit, with the state's memory handed from step to step."""

from collections.abc import Callable

import jax


def jit_train_step(step: Callable) -> Callable:
    """`step(state, batch, key)`, compiled; the old state is donated, so one copy of it is ever alive."""
    return jax.jit(step, donate_argnums=0)


def jit_eval_step(step: Callable) -> Callable:
    """`step(params, batch)`, compiled."""
    return jax.jit(step)


def jit_init(init: Callable) -> Callable:
    """`init(key)`, compiled: a state is made on the device in one program, not array by array."""
    return jax.jit(init)
