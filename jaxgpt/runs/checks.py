"""Watch what the modules of a model compute: of a user's own pieces before anything is written, and of a failed step.

A mistake of the user's is one line. A step that was not finite is repeated, to find the first module whose output was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxgpt.batch import Batch
from jaxgpt.data.pipeline import Dataset, RowReader
from jaxgpt.errors import UserError, first_line
from jaxgpt.experiment import Experiment
from jaxgpt.layers.block import NO_SHARDING
from jaxgpt.lora import with_adapters
from jaxgpt.loss import ObjectiveConfig
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.code import find_place, name_with_place, own_classes, place_of
from jaxgpt.train import Params, add_up

LOG = logging.getLogger(__name__)
LARGEST_CHECKED = 2**28  # parameters of a model that is run on one device before it is trained
PLACED = re.compile(r"[^ ]+:\d+: ")  # a message that begins with file and line
Modules = list[tuple[str, type]]  # the name and the class of each that was called
DIFFERS = 1e-4  # relative to the largest value: far more than rounding


@contextlib.contextmanager
def blame_own_classes(config: Any, method: Any = None) -> Iterator[None]:
    """Turn an exception into a `UserError` with the user's file and line, if there are own classes, or a `method`."""
    own = list(own_classes(config))
    try:
        yield
    except Exception as e:
        if not own:
            raise
        place = find_place(e, own)
        if isinstance(e, UserError):
            if not place or PLACED.match(str(e)):
                raise
            raise UserError(f"{place}{e}") from e
        names = method.__qualname__ if method else ", ".join(cls.__name__ for cls in own)
        place = place or place_of(method or own[0])
        raise UserError(f"{place}{names}: {type(e).__name__}: {first_line(e)}") from e


def check_rows(experiment: Experiment, dataset: Dataset) -> None:
    """Raise `UserError` unless the first rows of a user's own data are as `Split` and the vocabulary say."""
    data, train, T = experiment.data, experiment.train, experiment.model.block_size
    training, validation = dataset.train.training_rows, dataset.val.validation_rows
    with blame_own_classes(data, training):
        made = _describe(_read_row(training(block_size=T, seed=train.seed), training, experiment))
    expected = _describe(data.shape_batch(jax.ShapeDtypeStruct((1, T), jnp.int32)))
    if made != expected:
        raise UserError(f"{name_with_place(training)} makes {made}, but shape_batch says {expected}")
    with blame_own_classes(data, validation):
        count, read = validation(block_size=T, stride=T, max_tokens=train.eval_tokens, prefix_length=0)
        if count < 1:
            raise UserError(f"{name_with_place(validation)} has no rows")
        _read_row(read, validation, experiment)


def _read_row(read: RowReader, method: Any, experiment: Experiment) -> Batch:
    """Return the first row as a batch. Raises `UserError` for tokens outside the vocabulary."""
    row = Batch(*jax.tree.map(lambda x: np.asarray(x)[None], tuple(read(0))))
    targets_BT = row.targets_BT if row.mask_BT is None else row.targets_BT[row.mask_BT]
    ids, last = np.concatenate([row.inputs_BT.ravel(), targets_BT.ravel()]), (experiment.model.vocab_size or 0) - 1
    if ids.min() < 0 or ids.max() > last:
        said = f"row 0 has tokens from {ids.min()} to {ids.max()}: needs 0 to {last}"
        raise UserError(f"{name_with_place(method)}: {said}")
    return row


def _describe(batch: Batch) -> str:
    """Return the names, types and shapes of a batch's arrays."""
    leaves = jax.tree.leaves_with_path(batch)
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]
    return ", ".join(f"{name} {jax.dtypes.canonicalize_dtype(x.dtype)}{list(x.shape)}" for name, x in named)


def check_model(experiment: Experiment, batch: Batch) -> None:
    """Raise `UserError` if a model of a user's own reads later tokens. With an own objective, which may want it, warn.

    One row is read twice, with other tokens in its second half.
    """
    # Without scan and remat: an interceptor may not leave their traces.
    model: Any = dataclasses.replace(experiment.model, scan_layers=False, remat="none").make_model()
    half = batch.inputs_BT.shape[1] // 2
    if count_parameters(model.shapes()) > LARGEST_CHECKED or half < 1:
        return
    rows = jax.tree.map(lambda x: np.repeat(np.asarray(x[:1]), 2, axis=0), batch)
    tokens_BT = rows.inputs_BT.copy()
    tokens_BT[1, half:] = (tokens_BT[1, half:] + 1) % experiment.model.vocab_size
    own = inspect.signature(type(model).__call__).parameters  # other extras are for the objective
    extras = {name: x for name, x in (rows.extras or {}).items() if name in own}
    called: Modules = []

    def early_differs(x: jax.Array) -> Any:
        if x.shape[:2] != tokens_BT.shape:
            return False
        early = x[:, :half].astype(jnp.float32)
        return jnp.abs(early[0] - early[1]).max() > DIFFERS * jnp.abs(early).max()

    def read(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        # With noise in the parameters: projections that begin as zero would hide their inputs.
        noise = optax.tree.random_like(jax.random.fold_in(key, 1), params)
        noisy = {"params": optax.tree.add_scale(params, 0.05, noise)}
        with watch_calls(early_differs, called) as flags:
            logits_BTV = model.apply(noisy, tokens_BT, segments_BT=rows.segments_BT, **extras)
        return early_differs(logits_BTV), jnp.stack(flags)

    # On CPU without optimisations, which would take longer than they save.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    with blame_own_classes(experiment):
        differs, flags = jax.jit(read, compiler_options=options)(jax.random.key(0))
    if not bool(differs):
        return
    kind = next((kind for (_, kind), is_first in zip(called, flags, strict=True) if is_first), None)
    owner = type(experiment.model)
    place, name = place_of(kind) or place_of(owner), kind.__name__ if kind else "the model"
    said = f"{place}{owner.__name__}: {name} is not causal: what it writes at a token depends on later ones"
    if type(experiment.objective).make_loss is ObjectiveConfig.make_loss:
        raise UserError(f"{said}. Mask them")
    LOG.warning("%s; %s may want that", said, type(experiment.objective).__name__)


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
    params: all of the model, before the step. batch: all rows. key: the run's dropout key. step: counted from 1.
    """
    from jaxgpt.sample.quantize import unstack_layers  # which no training needs

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
