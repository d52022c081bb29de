"""Check the user's own pieces of an experiment before anything is written: one line for each mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgpt.batch import Batch
from jaxgpt.config import Experiment, ObjectiveConfig, to_dict
from jaxgpt.errors import UserError, first_line
from jaxgpt.parallel.device import count_parameters
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.code import own_classes
from jaxgpt.sample.cache import jit_once

LOG = logging.getLogger(__name__)
LARGEST_CHECKED = 2**28  # parameters of a model that is also run on one device, in float32, before it is trained
DIFFERS = 1e-4  # relative to the largest value: far more than rounding


@contextlib.contextmanager
def blame_own_classes(experiment: Experiment) -> Iterator[None]:
    """Turn an exception into a `UserError` that names the experiment's own classes and the line, if it has any."""
    own = list(own_classes(experiment))
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        if not own:
            raise
        files = {getattr(sys.modules.get(cls.__module__), "__file__", None) for cls in own}
        frames = [frame for frame in traceback.extract_tb(e.__traceback__) if frame.filename in files]
        place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
        names = ", ".join(cls.__name__ for cls in own)
        raise UserError(f"{place}{names}: {type(e).__name__}: {first_line(e)}") from e


def check_step(experiment: Experiment, trainer: Trainer) -> None:
    """Trace a training step, if the experiment has classes of its own. Raises `UserError` for what does not fit."""
    if not any(own_classes(experiment)):
        return
    to_dict(experiment)  # which raises for a field that experiment.json cannot hold
    with blame_own_classes(experiment):
        key = jax.eval_shape(jax.random.key, 0)
        _, metrics = jax.eval_shape(trainer.train_step, trainer.abstract_state, trainer.abstract_batch, key)
    for name, x in metrics.items():
        if x.shape and name != "checksums":
            raise UserError(f"the objective's metric {name!r} has the shape {list(x.shape)}: it must be a scalar")


def check_model(experiment: Experiment, batch: Batch) -> None:
    """Raise `UserError` if a model of a user's own reads later tokens, or has other logits than it is sampled by.

    The next token's loss would reward a model that reads later tokens. One row is read twice, with other tokens in its
    second half. An objective of the user's own may want such a model: then this is only a warning.
    """
    if not experiment.model.is_foreign:
        return
    # Without scan and remat: an interceptor may not leave their traces.
    model: Any = dataclasses.replace(experiment.model, scan_layers=False, remat="none").make_model()
    shapes = model.shapes()
    if count_parameters(shapes) > LARGEST_CHECKED or batch.inputs_BT.shape[1] < 2:
        return
    half = batch.inputs_BT.shape[1] // 2
    rows = jax.tree.map(lambda x: np.repeat(np.asarray(x[:1]), 2, axis=0), batch)
    tokens_BT = rows.inputs_BT.copy()
    tokens_BT[1, half:] = (tokens_BT[1, half:] + 1) % experiment.model.vocab_size
    names: list[str] = []

    def early_differs(x: Any) -> jax.Array:
        arrays = [x] if isinstance(x, jax.Array) and x.ndim > 1 and x.shape[:2] == tokens_BT.shape else []
        parts = [x[:, :half].astype(jnp.float32) for x in arrays]
        return jnp.asarray([jnp.abs(p[0] - p[1]).max() > DIFFERS * jnp.abs(p).max() for p in parts]).any()

    def read(params: Any) -> tuple[jax.Array, ...]:
        flags = []

        def watch(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
            out = call(*args, **kwargs)
            names.append(type(context.module).__name__)
            flags.append(jnp.stack([early_differs(args[0] if args else None), early_differs(out)]))
            return out

        own = inspect.signature(type(model).__call__).parameters  # other extras are the objective's
        extras = {name: x for name, x in (rows.extras or {}).items() if name in own} | {"segments_BT": rows.segments_BT}
        with nn.intercept_methods(watch):
            x_BTD = model.apply({"params": params}, jnp.asarray(tokens_BT), method="hidden_states", **extras)
        logits_BTV = model.apply({"params": params}, jnp.asarray(tokens_BT), **extras)
        parts_BTV = model.apply({"params": params}, x_BTD, method="unembed")
        is_sum = jnp.allclose(logits_BTV, parts_BTV, rtol=1e-3, atol=1e-3)
        return early_differs(x_BTD), jnp.stack(flags), is_sum

    def read_noisy(key: jax.Array, noise: Any) -> tuple[jax.Array, ...]:
        """Read with noise in the parameters: projections that begin as zero would hide what their inputs are."""
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        return read(jax.tree.map(lambda x, noise: x + 0.05 * noise, params, noise))

    draw = np.random.default_rng(0)
    noise = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)
    with blame_own_classes(experiment):
        differs, flags, is_sum = jit_once(read_noisy)(jax.random.key(0), noise)
    if not bool(is_sum):
        kind = type(model).__name__
        raise UserError(
            f"{kind}.__call__ is not unembed(hidden_states(tokens)), by which models are sampled: move it there"
        )
    if not bool(differs):
        return
    named = [name for name, (before, after) in zip(names, np.asarray(flags), strict=True) if after and not before]
    said = (
        f"{type(experiment.model).__name__}: {named[0] if named else 'the model'} is not causal: what it writes at a "
    )
    said += "token depends on later ones, which the loss asks it to predict"
    if type(experiment.objective).make_loss is ObjectiveConfig.make_loss:
        raise UserError(f"{said}. Mask them")
    LOG.warning("%s; %s may want that", said, type(experiment.objective).__name__)
