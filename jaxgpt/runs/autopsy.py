"""Write the autopsy of a non-finite step: its batch, and the first module with an output that is not finite."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgpt.batch import Batch
from jaxgpt.errors import first_line, shell_line
from jaxgpt.files import render_json, write_whole
from jaxgpt.layers.block import NO_SHARDING
from jaxgpt.lora import with_adapters
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.training import Training, gather_params
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.train import Metrics, Params, TrainState, why_skipped

MOST_ROWS = 32  # rows of a batch in a report. The others can be computed from data, seed and step
LARGEST_NORM = float(np.finfo(np.float32).max) ** 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFiniteReport:
    """First non-finite output, and the norms, of one step. A layer is a group of parameters: wte, h_0, ..."""

    first: str | None  # what computed the first non-finite value from finite ones. None means that all were finite
    parameter_norms: dict[str, float]  # by layer
    gradient_norms: dict[str, float]  # by layer, of the mean loss
    bad_parameters: tuple[str, ...]  # paths of parameters with non-finite values, such as h_0/mlp/c_fc/kernel
    bad_gradients: tuple[str, ...]  # layers with non-finite gradients


def debug_step(trainer: Trainer, params: Params, batch: Batch, key: jax.Array, step: int) -> NonFiniteReport:
    """Repeat a step on one device, and find the first module with an output that is not finite.

    Dropout masks are as in the step, except for attention weights on a mesh, where each device draws its own.
    params: the model's, before the step. batch: all rows. key: the run's dropout key. step: counted from 1.
    """
    config = dataclasses.replace(trainer.model.config, remat="none")
    attention_fn = trainer.options.attention_fn
    plain = trainer.model.clone(config=config, attention_fn=attention_fn, sharding=NO_SHARDING, parent=None)
    model, params = unstack_layers(plain, params)
    names: list[str] = []  # modules called, in the order in which they return: the inner one of two is blamed

    def is_finite(tree: Any) -> jax.Array:
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.asarray([jnp.isfinite(x).all() for x in floats]).all()  # also if there are none

    def loss(params: Params, micro: Batch, key: jax.Array) -> Any:
        names.clear()
        flags = []  # (inputs finite, outputs finite) of each call

        def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            out = call(*args, **kwargs)
            name = "/".join(context.module.path) or "the model itself, between its modules"
            method = "" if context.method_name == "__call__" else f".{context.method_name}"
            names.append(f"{name} ({type(context.module).__name__}{method})")
            flags.append(jnp.stack([is_finite((args, kwargs)), is_finite(out)]))
            return out

        with nn.intercept_methods(watch):
            nats, count, _ = with_adapters(trainer.objective.make_loss(model))(params, micro, key)
        return nats, (count, jnp.stack(flags))

    watched = jax.jit(jax.value_and_grad(loss, has_aux=True))
    first, total, targets = None, None, 0.0
    # The micro-batches and their dropout keys are those that `train_step` and pmap make.
    replicas, accumulated = trainer.strategy.num_replicas, trainer.split.grad_accum_steps
    parts = jax.tree.map(lambda x: x.reshape(replicas or 1, -1, *x.shape[1:]), batch)
    for number in range(replicas or 1):
        step_key = jax.random.fold_in(key if replicas is None else jax.random.fold_in(key, number), step - 1)
        part: Batch = jax.tree.map(lambda x, n=number: x[n], parts)
        micros = part.micro_batches(accumulated)
        for index in range(accumulated):
            micro = jax.tree.map(lambda x, i=index: x[i], micros)
            (nats, (count, flags)), grads = watched(params, micro, jax.random.fold_in(step_key, index))
            culprits = (name for name, (good, out) in zip(names, np.asarray(flags), strict=True) if good and not out)
            first = first or next(culprits, None if np.isfinite(nats) else "the loss, of finite logits")
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
        bad_parameters=tuple(name for name, x in _leaves(params) if not np.isfinite(x).all()),
        bad_gradients=bad_gradients,
    )


def _leaves(tree: Any) -> list[tuple[str, np.ndarray]]:
    flat = jax.tree.leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(x)) for path, x in flat]


def _norms(tree: Any) -> dict[str, float]:
    """Return the norm of each layer in float64, where no square overflows."""
    squares: dict[str, float] = collections.defaultdict(float)
    for name, x in _leaves(tree):
        squares[name.split("/")[0]] += float(np.sum(np.square(x.astype(np.float64))))
    return {name: squares[name] ** 0.5 for name in sorted(squares, key=lambda name: (len(name), name))}  # h_2 < h_10


def format_report(found: NonFiniteReport) -> str:
    """Format a report as lines of text."""
    bad = ", ".join(found.bad_parameters[:8]) + (" and more" if len(found.bad_parameters) > 8 else "")
    width = max(len(name) for name in found.parameter_norms)
    lines = [
        f"first not finite: {found.first or 'nothing: the step is finite when repeated'}",
        f"parameters that are not finite: {bad or 'none'}",
        f"{'norm of':<{width}}  {'parameters':>10}  {'gradient':>10}",
    ]
    for name, norm in found.parameter_norms.items():
        lines.append(f"{name:<{width}}  {norm:>10.4g}  {found.gradient_norms[name]:>10.4g}")
    return "\n".join(lines)


def write_autopsy(
    training: Training, *, state: TrainState, step: int, metrics: Metrics, later: Sequence[Metrics]
) -> str:
    """Examine a skipped step, once, and write `RUN/autopsy/step-N/report.json`. Return a summary, also if that fails.

    state: the newest one, after `step` and the steps with the metrics `later`. If those were skipped as well, it has
    the parameters before `step`.
    """
    place, key, why = training.directory / "autopsy" / f"step-{step}", training.dropout_key, why_skipped(metrics)
    command = shell_line("jaxgpt", "replay", training.directory, "--step", step)
    if (place / "report.json").is_file():
        return f"{why}: examined before, see {place}. To replay this step: {command}"
    moved = not all(int(m["skipped"]) for m in later)  # before this step was known to be bad
    of_step = step + len(later) if moved else step - 1
    batch, params = training.whole_batch(step, state), gather_params(training.trainer, state)
    found, unknown = None, "no process holds all parameters"
    if params is not None:
        try:
            found, unknown = debug_step(training.trainer, params, batch, key, step), None
        except jax.errors.JaxRuntimeError as e:  # out of memory: all parameters on one device, and no remat
            unknown = f"its examination failed: {first_line(e)}"
    tokenizer, rows = training.dataset.tokenizer, []
    for number, ids in enumerate(np.concatenate([batch.inputs_BT, batch.targets_BT[:, -1:]], axis=1)[:MOST_ROWS]):
        text = tokenizer.decode(ids) if ((ids >= 0) & (ids < tokenizer.vocab_size)).all() else None
        rows.append({"row": number, "text": text, "ids": ids.tolist()})
    report = {
        "step": step,
        "why": why,
        "loss": float(metrics["loss"]),
        "parameters_of_step": of_step,
        "findings": None if found is None else dataclasses.asdict(found),
        "why_no_findings": unknown,
        "batch": rows,
    }
    first = unknown if found is None else f"first not finite: {found.first or 'nothing, when repeated'}"
    message = f"{why}; {first}" + (f" (with the parameters of step {of_step})" if moved else "")
    try:
        place.mkdir(parents=True, exist_ok=True)
        json = render_json(report, indent=1, ensure_ascii=False, not_finite=str)  # NaN and infinity as strings
        write_whole(place / "report.json", json + "\n")
    except OSError as e:
        return f"{message}. The autopsy could not be written: {e}"
    return f"{message}. Autopsy in {place}; to replay this step: {command}"
