"""Repeat a step that was not finite, and find the first module whose output was not."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgpt.batch import Batch
from jaxgpt.layers.block import NO_SHARDING
from jaxgpt.lora import with_adapters
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.train import Params, add_up

Modules = list[tuple[str, type]]  # the name and the class of each that was called


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFiniteReport:
    """First non-finite output, and the norms, of one step, by layer: wte, h_0, ..."""

    first: str | None  # what made the first non-finite value of finite ones. None means that nothing did
    parameter_norms: dict[str, float]  # by layer
    gradient_norms: dict[str, float]  # by layer, of the mean loss

    def __str__(self) -> str:
        first = self.first or "nothing: the step is finite when repeated"
        lines = [f"first not finite: {first}", "norm of     parameters    gradient"]
        for name, norm in self.parameter_norms.items():
            lines.append(f"{name:<10}  {norm:>10.4g}  {self.gradient_norms[name]:>10.4g}")
        return "\n".join(lines)


@contextlib.contextmanager
def watch_calls(is_bad: Callable[[jax.Array], Any], called: Modules) -> Iterator[list[jax.Array]]:
    """Yield a list that gets, as each call of a module returns, the inner one first, whether it makes bad of good.

    called: takes the name and the class of each.
    """
    called.clear()
    flags: list[jax.Array] = []

    def any_bad(tree: Any) -> jax.Array:
        return jnp.asarray([is_bad(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)], bool).any()

    def watch(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        out = call(*args, **kwargs)
        name = "/".join(context.module.path) or "the model itself, between its modules"
        method = "" if context.method_name == "__call__" else f".{context.method_name}"
        called.append((f"{name} ({type(context.module).__name__}{method})", type(context.module)))
        flags.append(any_bad(out) & ~any_bad((args, kwargs)))
        return out

    with nn.intercept_methods(watch):
        yield flags


def debug_step(trainer: Trainer, params: Params, batch: Batch, key: jax.Array, step: int) -> NonFiniteReport:
    """Repeat a step on one device, and find the first module with an output that is not finite.

    Dropout masks are as in the step, except for attention weights on a mesh, where each device draws its own.
    params: the model's, before the step. batch: all rows. key: the run's dropout key. step: counted from 1.
    """
    config = dataclasses.replace(trainer.model.config, remat="none")
    attention_fn = trainer.options.attention_fn
    plain = trainer.model.clone(config=config, attention_fn=attention_fn, sharding=NO_SHARDING, parent=None)
    model, params = unstack_layers(plain, params)
    called: Modules = []

    def is_bad(x: jax.Array) -> Any:
        return jnp.issubdtype(x.dtype, jnp.floating) and ~jnp.isfinite(x).all()

    def loss(params: Params, micro: Batch, key: jax.Array) -> Any:
        with watch_calls(is_bad, called) as flags:
            nats, count, _ = with_adapters(trainer.objective.make_loss(model))(params, micro, key)
        return nats, (nats, count, jnp.stack(flags))

    @jax.jit
    def add_up_gradients(params: Params, rows: Batch, key: jax.Array) -> Any:
        def differentiate(micro: Batch, number: jax.Array | int) -> Any:
            return jax.grad(loss, has_aux=True)(params, micro, jax.random.fold_in(key, number))

        return add_up(differentiate, rows, trainer.split.grad_accum_steps)

    replicas, sums = trainer.strategy.num_replicas, []
    by_replica = jax.tree.map(lambda x: x.reshape(replicas or 1, -1, *x.shape[1:]), batch)
    for number in range(replicas or 1):  # with the rows and the dropout key that pmap gives it
        rows = jax.tree.map(operator.itemgetter(number), by_replica)
        own_key = key if replicas is None else jax.random.fold_in(key, number)
        sums.append(add_up_gradients(params, rows, jax.random.fold_in(own_key, step - 1)))
    grads, (nats, count, flags) = jax.tree.map(lambda *parts: sum(parts), *sums)
    gradient_norms = _norms(jax.tree.map(lambda x: x / max(count, 1), grads))
    first = next((name for (name, _), is_first in zip(called, flags, strict=True) if is_first), None)
    if first is None and not np.isfinite(nats):
        first = "the loss, of finite logits"
    elif first is None and not np.isfinite([*gradient_norms.values()]).all():
        first = "the backward pass; the forward pass is finite"
    return NonFiniteReport(first=first, parameter_norms=_norms(params), gradient_norms=gradient_norms)


def _norms(tree: Any) -> dict[str, float]:
    """Return the norm of each layer in float64, where no square overflows."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    norms = {name: math.hypot(*map(np.linalg.norm, jax.tree.leaves(wide[name]))) for name in wide}
    return dict(sorted(norms.items(), key=lambda each: (len(each[0]), each[0])))  # h_2 < h_10
