"""Write the autopsy of a non-finite step: its batch, the cause, and the state before it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgpt.batch import Batch
from jaxgpt.errors import CheckpointSaveError, first_line, shell_line
from jaxgpt.files import render_json, write_whole
from jaxgpt.layers.block import NO_SHARDING
from jaxgpt.lora import thaw, with_adapters
from jaxgpt.loss import make_loss
from jaxgpt.parallel import multihost
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.training import Training
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.train import Metrics, Params, TrainState, why_skipped

MOST_ROWS = 32  # rows of a batch in a report; the others can be computed from data, seed and step
LARGEST_NORM = float(np.finfo(np.float32).max) ** 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFiniteReport:
    """First non-finite output, and the norms, of one step. A layer is a group of parameters: wte, h_0, ..."""

    first: str | None  # what computed the first non-finite value from finite ones; None: all were finite this time
    parameter_norms: dict[str, float]  # by layer
    gradient_norms: dict[str, float]  # by layer, of the mean loss
    bad_parameters: tuple[str, ...]  # paths of parameters with non-finite values, such as h_0/mlp/c_fc/kernel
    bad_gradients: tuple[str, ...]  # layers with non-finite gradients


def debug_step(trainer: Trainer, params: Params, batch: Batch, key: jax.Array, step: int) -> NonFiniteReport:
    """Repeat a step on one device, and find the first module whose output is not finite.

    Dropout masks are those of the step, except for attention weights on a mesh, where each device draws its own.

    Args:
        trainer: of the run.
        params: of the model, before the step.
        batch: all rows of the step.
        key: the run's dropout key.
        step: its number, from 1.
    """
    plain = trainer.model.clone(
        config=dataclasses.replace(trainer.model.config, remat="none"),
        attention_fn=trainer.options.attention_fn,
        sharding=NO_SHARDING,
        parent=None,
    )
    model, params = unstack_layers(plain, params)
    names: list[str] = []  # of the calls of modules, in the order in which they return: the inner one of two is blamed

    def is_finite(tree: Any) -> jax.Array:
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.asarray([jnp.isfinite(x).all() for x in floats] or [True]).all()

    def loss(params, micro, key):
        names.clear()
        flags = []  # (inputs finite, outputs finite) of each call

        def watch(call, args, kwargs, context):
            out = call(*args, **kwargs)
            module, method = context.module, context.method_name
            name = "/".join(module.path) or "the model itself, between its modules"
            names.append(f"{name} ({type(module).__name__}{'' if method == '__call__' else '.' + method})")
            flags.append(jnp.stack([is_finite((args, kwargs)), is_finite(out)]))
            return out

        with nn.intercept_methods(watch):
            nats, count, _ = with_adapters(make_loss(model))(params, micro, key)
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
        bad_parameters=tuple(name for name, x in _leaves(params) if not np.isfinite(np.asarray(x)).all()),
        bad_gradients=bad_gradients,
    )


def gather_params(trainer: Trainer, state: TrainState) -> Params | None:
    """Gather the parameters of the model on one device; return None if this process holds only shards of them.

    Adapters are joined with them afterwards, since one process cannot launch a program over all devices.
    """
    held = multihost.on_one_device((state.params, state.frozen_params))
    return None if held is None else thaw(trainer.merge(*held))


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, x in jax.tree.leaves_with_path(tree):
        yield "/".join(str(entry.key) for entry in path), x


def _norms(tree: Any) -> dict[str, float]:
    """Return the norm of each layer in float64, where no square overflows."""
    squares: dict[str, float] = {}
    for name, x in _leaves(tree):
        layer = name.split("/")[0]
        squares[layer] = squares.get(layer, 0.0) + float(np.sum(np.square(np.asarray(x, np.float64))))
    return {name: squares[name] ** 0.5 for name in sorted(squares, key=lambda name: (len(name), name))}  # h_2 < h_10


def format_report(found: NonFiniteReport) -> str:
    """Format a report as lines of text."""
    bad = ", ".join(found.bad_parameters[:8]) + (" and more" if len(found.bad_parameters) > 8 else "")
    width = max(len(name) for name in found.parameter_norms)
    return "\n".join(
        [
            f"first not finite: {found.first or 'nothing: the step is finite when repeated'}",
            f"parameters that are not finite: {bad or 'none'}",
            f"{'norm of':<{width}}  {'parameters':>10}  {'gradient':>10}",
            *(
                f"{name:<{width}}  {norm:>10.4g}  {found.gradient_norms[name]:>10.4g}"
                for name, norm in found.parameter_norms.items()
            ),
        ]
    )


def autopsy_directory(run: Path, step: int) -> Path:
    """Return the directory of a step's autopsy; its folder `state` has the state before the step, if that was saved."""
    return run / "autopsy" / f"step-{step}"


def write_autopsy(
    training: Training, *, state: TrainState, step: int, metrics: Metrics, later: Sequence[Metrics]
) -> str:
    """Write report.json, report.txt and the state before a step to `RUN/autopsy/step-N/`, once. Return a summary.

    It never ends a run that could continue: the summary or the report says what could not be computed or written.

    Args:
        training: the run.
        state: the newest state, after `step` and the steps of `later`. If those were skipped as well, it differs only
            in its counters from the state before `step`.
        step: the one to examine, which was skipped.
        metrics: of `step`.
        later: metrics of the steps since.
    """
    run, trainer, key = training.directory, training.trainer, training.dropout_key
    place = autopsy_directory(run, step)
    command, why = shell_line("jaxgpt", "replay", run, "--step", step), why_skipped(metrics)
    if (place / "report.json").is_file():
        return f"{why}: examined before, see {place}. To replay this step alone: {command}"
    exact = all(int(m["skipped"]) for m in later)
    of_step = step - 1 if exact else step + len(later)
    batch = training.whole_batch(step)
    params, found, unknown, lost = gather_params(trainer, state), None, "no process holds all parameters", None
    if params is not None:
        try:
            found, unknown = debug_step(trainer, params, batch, key, step), None
        except jax.errors.JaxRuntimeError as e:  # out of memory: all parameters on one device, and no remat
            unknown = f"its examination failed: {first_line(e)}"
    if not exact:
        lost = f"steps up to {of_step} had moved the parameters before this one was known to be bad"
    elif multihost.is_multiprocess():
        lost = "a run of several processes does not save it"
    else:  # save the state before the step: since it and the later ones were skipped, only their counters differ
        skips, steps = state.opt_state, 1 + len(later)
        skips = dataclasses.replace(skips, skipped=skips.skipped - steps, in_a_row=skips.in_a_row - steps)
        before = dataclasses.replace(state, step=state.step - steps, opt_state=skips)
        try:
            shutil.rmtree(place / "state", ignore_errors=True)  # left by a session killed before it wrote the report
            with contextlib.closing(Checkpoints(place / "state")) as checkpoints:
                checkpoints.save(trainer.strategy.to_checkpoint(before), step - 1, None)
        except CheckpointSaveError as e:
            lost = str(e)
    vocab_size, decode = training.dataset.tokenizer.vocab_size, training.dataset.tokenizer.decode
    rows = np.concatenate([batch.inputs_BT[:MOST_ROWS], batch.targets_BT[:MOST_ROWS, -1:]], axis=1)
    report = {
        "step": step,
        "why": why,
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "replay": command,
        "parameters_of_step": of_step,
        "findings": None if found is None else dataclasses.asdict(found),
        "why_no_findings": unknown,
        "why_no_state": lost,
        "seed": training.experiment.train.seed,
        "step_key": jax.random.key_data(jax.random.fold_in(key, step - 1)).tolist(),
        "batch": [
            {"row": i, "text": decode(row) if ((row >= 0) & (row < vocab_size)).all() else None, "ids": row.tolist()}
            for i, row in enumerate(rows)
        ],
    }
    first = unknown if found is None else f"first not finite: {found.first or 'nothing, when repeated'}"
    message = f"{why}; {first}" + ("" if exact else f" (with the parameters of step {of_step})")
    text = f"step {step}: {message}\n\n{'' if found is None else format_report(found)}\n\n{command}\n"
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / "report.txt", text)
        json = render_json(report, indent=1, ensure_ascii=False, not_finite=str)  # NaN and infinity as strings
        write_whole(place / "report.json", json + "\n")
    except OSError as e:
        return f"{message}. The autopsy could not be written: {e}"
    return f"{message}. Autopsy in {place}; to replay this step alone: {command}"
