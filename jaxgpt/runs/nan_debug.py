"""Find what made a step not finite: the norms of its layers, and the first module with such an output."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgpt.batch import Batch
from jaxgpt.cluster import multihost
from jaxgpt.layers.hooks import NO_SHARDING
from jaxgpt.model import GPT
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.train import TrainState, batch_loss

LARGEST_NORM = float(np.finfo(np.float32).max) ** 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFiniteReport:
    """Where the forward and the backward pass of a step are not finite. A layer is a group of parameters: wte, h_0, ..."""

    first: str | None  # what made the first number that is not finite, of finite ones; None: it did not come again
    parameter_norms: dict[str, float]  # by layer
    gradient_norms: dict[str, float]  # by layer, of the mean loss
    bad_parameters: tuple[str, ...]  # that hold such numbers: h_0/mlp/c_fc/kernel
    bad_gradients: tuple[str, ...]  # layers


def debug_step(trainer: Trainer, params: Any, batch: Batch, key: jax.Array, step: int) -> NonFiniteReport:
    """Compute a step once more, on one device, and find the first module whose output is not finite.

    params: before the step; batch: all its rows; key: the run's. Dropout is that of the step, but for attention weights on a mesh, which each of its devices draws for itself.
    """
    plain = trainer.model.clone(
        config=dataclasses.replace(trainer.model.config, remat="none"),
        attention_fn=trainer.options.attention_fn,
        sharding=NO_SHARDING,
        parent=None,
    )
    model, params = unstack_layers(plain, params)
    bad_parameters = tuple(name for name, x in _leaves(params) if not np.isfinite(np.asarray(x)).all())
    watched, names = _watch_modules(model)
    first, total, targets = None, None, 0.0
    for micro, micro_key in _micro_batches(trainer, batch, key, step):
        (nats, (count, flags)), grads = watched(params, micro, micro_key)
        first = first or _find_first(names, np.asarray(flags), float(nats))
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        targets += float(count)
    gradient_norms = {name: norm / max(targets, 1.0) for name, norm in _norms(total).items()}
    bad_gradients = tuple(name for name, norm in gradient_norms.items() if not np.isfinite(norm))
    if first is None and bad_gradients:
        first = f"the backward pass, in the gradients of {', '.join(bad_gradients)}; the forward pass is finite"
    elif first is None and (norm := math.hypot(*gradient_norms.values())) > LARGEST_NORM:
        first = f"the gradient's norm, {norm:.1e}, whose square float32 cannot hold; the gradient is finite"
    return NonFiniteReport(
        first=first,
        parameter_norms=_norms(params),
        gradient_norms=gradient_norms,
        bad_parameters=bad_parameters,
        bad_gradients=bad_gradients,
    )


def gather_params(trainer: Trainer, state: TrainState) -> Any:
    """Return the parameters as the model takes them, on a device of this process. None: it holds only parts of them.

    Adapters are merged in after that, since one process cannot start a program over all devices.
    """
    held = multihost.on_one_device((state.params, state.frozen_params))
    return None if held is None else trainer.merge(*held)


def _watch_modules(model: GPT) -> tuple[Any, list[str]]:
    """Return (params, micro, key) -> ((nats, (targets, flags)), gradients), compiled; and the names behind the flags.

    Each flag is (inputs finite, outputs finite) of one call of a module, in the order in which calls end: the
    innermost first, so that of a module inside a module the inner one is blamed.
    """
    names: list[str] = []

    def loss(params, micro, key):
        names.clear()
        flags = []

        def watch(call, args, kwargs, context):
            out = call(*args, **kwargs)
            module, method = context.module, context.method_name
            name = "/".join(module.path) or "the model itself, between its modules"
            names.append(f"{name} ({type(module).__name__}{'' if method == '__call__' else '.' + method})")
            flags.append(jnp.stack([_finite((args, kwargs)), _finite(out)]))
            return out

        with nn.intercept_methods(watch):
            nats, count = batch_loss(params, micro, key, model=model)
        return nats, (count, jnp.stack(flags))

    return jax.jit(jax.value_and_grad(loss, has_aux=True)), names


def _find_first(names: Sequence[str], flags: np.ndarray, nats: float) -> str | None:
    culprits = [name for name, (inputs, outputs) in zip(names, flags, strict=True) if inputs and not outputs]
    if culprits:
        return culprits[0]
    return None if np.isfinite(nats) else "the loss, of finite logits"


def _finite(tree: Any) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.asarray([jnp.isfinite(x).all() for x in floats] or [True]).all()


def _micro_batches(trainer: Trainer, batch: Batch, key: jax.Array, step: int) -> Iterator[tuple[Batch, jax.Array]]:
    """Yield the micro-batches of a step with their keys, as `train_step` and pmap cut and draw them."""
    programs = trainer.strategy.num_replicas
    parts = jax.tree.map(lambda x: x.reshape(programs or 1, -1, *x.shape[1:]), batch)
    for number in range(programs or 1):
        step_key = jax.random.fold_in(key if programs is None else jax.random.fold_in(key, number), step - 1)
        part: Batch = jax.tree.map(lambda x, n=number: x[n], parts)
        micros = part.micro_batches(trainer.split.grad_accum_steps)
        for index in range(trainer.split.grad_accum_steps):
            yield jax.tree.map(lambda x, i=index: x[i], micros), jax.random.fold_in(step_key, index)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, x in jax.tree.leaves_with_path(tree):
        yield "/".join(str(entry.key) for entry in path), x


def _norms(tree: Any) -> dict[str, float]:
    """Return the norm of each layer, in the order of the forward pass; in float64, where no square of a float32 overflows."""
    squares: dict[str, float] = {}
    for name, x in _leaves(tree):
        layer = name.split("/")[0]
        squares[layer] = squares.get(layer, 0.0) + float(np.sum(np.square(np.asarray(x, np.float64))))
    return {name: squares[name] ** 0.5 for name in sorted(squares, key=_forward_order)}


def _forward_order(layer: str) -> tuple[int, int]:
    number = layer.removeprefix("h_")
    if number.isdigit():
        return 1, int(number)
    return (0, layer == "wpe") if layer in ("wte", "wpe") else (2, layer == "lm_head")


def format_report(found: NonFiniteReport) -> str:
    """Return lines of text."""
    bad = ", ".join(found.bad_parameters[:8]) + (" and more" if len(found.bad_parameters) > 8 else "")
    width = max(len(name) for name in found.parameter_norms)
    return "\n".join(
        [
            f"first not finite: {found.first or 'nothing; it did not come again'}",
            f"parameters that are not finite: {bad or 'none'}",
            f"{'norm of':<{width}}  {'parameters':>10}  {'gradient':>10}",
            *(
                f"{name:<{width}}  {norm:>10.4g}  {found.gradient_norms[name]:>10.4g}"
                for name, norm in found.parameter_norms.items()
            ),
        ]
    )
