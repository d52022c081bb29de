"""Check a user's own pieces before anything is written: one line for each mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgpt.batch import Batch
from jaxgpt.data.pipeline import Dataset, RowReader
from jaxgpt.errors import UserError, first_line
from jaxgpt.experiment import Experiment
from jaxgpt.loss import ObjectiveConfig
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.runs.code import find_place, name_with_place, own_classes, place_of

LOG = logging.getLogger(__name__)
LARGEST_CHECKED = 2**28  # parameters of a model that is run on one device before it is trained
PLACED = re.compile(r"[^ ]+:\d+: ")  # a message that begins with file and line
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
    from jaxgpt.runs.autopsy import Modules, watch_calls

    # Without scan and remat: an interceptor may not leave their traces.
    model: Any = dataclasses.replace(experiment.model, scan_layers=False, remat="none").make_model()
    half = batch.inputs_BT.shape[1] // 2
    if count_parameters(model.shapes()) > LARGEST_CHECKED or half < 1:
        return
    rows = jax.tree.map(lambda x: np.repeat(np.asarray(x[:1]), 2, axis=0), batch)
    tokens_BT = rows.inputs_BT.copy()
    tokens_BT[1, half:] = (tokens_BT[1, half:] + 1) % experiment.model.vocab_size
    own = inspect.signature(type(model).__call__).parameters  # other extras are the objective's
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
