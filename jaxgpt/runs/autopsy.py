"""Why a step was not finite: its batch, its norms, and the first module that made such a number."""

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
from jaxgpt.cluster import multihost
from jaxgpt.config import Experiment
from jaxgpt.data.pipeline import training_batches
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokens import Dataset
from jaxgpt.errors import CheckpointSaveError, first_line, shell_line
from jaxgpt.files import render_json, write_whole
from jaxgpt.in_flight import why_skipped
from jaxgpt.layers.hooks import NO_SHARDING
from jaxgpt.model import GPT
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.train import TrainState, batch_loss

LARGEST_NORM = float(np.finfo(np.float32).max) ** 0.5
MOST_ROWS = 32  # of a batch that a report shows; the others follow from data, seed and step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What one look at the forward and the backward pass tells. A layer is a group of parameters: wte, h_0, ..."""

    first: str | None  # what made the first number that is not finite, of finite ones; None: it did not come again
    parameter_norms: dict[str, float]  # by layer
    gradient_norms: dict[str, float]  # by layer, of the mean loss
    bad_parameters: tuple[str, ...]  # that hold such numbers: h_0/mlp/c_fc/kernel
    bad_gradients: tuple[str, ...]  # layers


def examine(trainer: Trainer, params: Any, batch: Batch, key: jax.Array, step: int) -> Findings:
    """Step `step` once more, on one device and watched: params: before it; batch: all its rows; key: the run's.

    Dropout is that of the step, but for attention weights on a mesh, which each of its devices draws for itself.
    """
    plain = trainer.model.clone(
        config=dataclasses.replace(trainer.model.config, remat="none"),
        attention_fn=trainer.options.attention_fn,
        sharding=NO_SHARDING,
        parent=None,
    )
    model, params = unstack_layers(plain, params)
    bad_parameters = tuple(name for name, x in _leaves(params) if not np.isfinite(np.asarray(x)).all())
    watched, names = _watched(model)
    first, total, targets = None, None, 0.0
    for micro, micro_key in _micros(trainer, batch, key, step):
        (nats, (count, flags)), grads = watched(params, micro, micro_key)
        first = first or _first(names, np.asarray(flags), float(nats))
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        targets += float(count)
    gradient_norms = {name: norm / max(targets, 1.0) for name, norm in _norms(total).items()}
    bad_gradients = tuple(name for name, norm in gradient_norms.items() if not np.isfinite(norm))
    if first is None and bad_gradients:
        first = f"the backward pass, in the gradients of {', '.join(bad_gradients)}; the forward pass is finite"
    elif first is None and (norm := math.hypot(*gradient_norms.values())) > LARGEST_NORM:
        first = f"the gradient's norm, {norm:.1e}, whose square float32 cannot hold; the gradient is finite"
    return Findings(
        first=first,
        parameter_norms=_norms(params),
        gradient_norms=gradient_norms,
        bad_parameters=bad_parameters,
        bad_gradients=bad_gradients,
    )


def params_here(trainer: Trainer, state: TrainState) -> Any:
    """The parameters as the model takes them, on a device of this process; None where it holds only parts of them.

    Adapters are merged in after that: a program over all devices is none for one process to start.
    """
    held = multihost.on_one_device((state.params, state.frozen_params))
    return None if held is None else trainer.merge(*held)


def _watched(model: GPT) -> tuple[Any, list[str]]:
    """(params, micro, key) -> ((nats, (targets, flags)), gradients), compiled; and the names behind the flags.

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


def _first(names: Sequence[str], flags: np.ndarray, nats: float) -> str | None:
    culprits = [name for name, (inputs, outputs) in zip(names, flags, strict=True) if inputs and not outputs]
    if culprits:
        return culprits[0]
    return None if np.isfinite(nats) else "the loss, of finite logits"


def _finite(tree: Any) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.asarray([jnp.isfinite(x).all() for x in floats] or [True]).all()


def _micros(trainer: Trainer, batch: Batch, key: jax.Array, step: int) -> Iterator[tuple[Batch, jax.Array]]:
    """The micro-batches of a step with their keys, one after the other: as `train_step` and pmap cut and draw them."""
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
    """Of each layer, in the order of the forward pass; in float64, where the square of no float32 overflows."""
    squares: dict[str, float] = {}
    for name, x in _leaves(tree):
        layer = name.split("/")[0]
        squares[layer] = squares.get(layer, 0.0) + float(np.sum(np.square(np.asarray(x, np.float64))))
    return {name: squares[name] ** 0.5 for name in sorted(squares, key=_order)}


def _order(layer: str) -> tuple[int, int]:
    number = layer.removeprefix("h_")
    if number.isdigit():
        return 1, int(number)
    return (0, layer == "wpe") if layer in ("wte", "wpe") else (2, layer == "lm_head")


def table(found: Findings) -> str:
    """In lines of text."""
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


def training_batch(dataset: Dataset, experiment: Experiment, step: int) -> Batch:
    """The whole batch of one step, over all devices and processes."""
    batches = training_batches(
        dataset.train,
        block_size=experiment.model.block_size,
        batch_size=experiment.train.batch_size,
        seed=experiment.train.seed,
        start_step=step - 1,
        prefetch=1,
    )
    with contextlib.closing(batches):
        return next(batches)


def state_before(run: Path, step: int) -> Path:
    """Where the state that entered a step is kept, if its autopsy could keep it."""
    return _place(run, step) / "state"


def write_autopsy(
    run: Path,
    *,
    experiment: Experiment,
    trainer: Trainer,
    dataset: Dataset,
    state: TrainState,
    key: jax.Array,
    step: int,
    metrics: dict[str, Any],
    later: Sequence[dict[str, Any]],
) -> str:
    """Write `RUN/autopsy/step-N/`, once: report.json, report.txt and the state before the step -> what to tell.

    state: the newest, after `step` and those whose metrics are `later`; where they were skipped too, it is in all but
    its counters the one that entered the step. key: the run's. Nothing here may end a run that goes on: what cannot
    be known, or written, is said instead.
    """
    place = _place(run, step)
    command = shell_line("jaxgpt", "replay", run, "--step", step)
    if (place / "report.json").is_file():
        return f"{why_skipped(metrics)}: examined before, see {place}. To replay this step alone: {command}"
    exact = all(int(m["skipped"]) for m in later)
    of_step = step - 1 if exact else step + len(later)
    batch = training_batch(dataset, experiment, step)
    params, found, unknown = params_here(trainer, state), None, None
    if params is None:
        unknown = "no process holds the whole of the parameters"
    else:
        try:
            found = examine(trainer, params, batch, key, step)
        except jax.errors.JaxRuntimeError as e:  # the whole model on one device, and without remat
            unknown = f"the look at it failed: {first_line(e)}"
    if not exact:
        lost = f"steps up to {of_step} had moved the parameters when this one was known to be bad"
    elif multihost.is_multiprocess():
        lost = "several processes write a state together or not at all"
    else:
        lost = _keep_state(place / "state", trainer, _rewound(state, 1 + len(later)), step - 1)
    report = {
        "step": step,
        "why": why_skipped(metrics),
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "replay": command,
        "parameters_of_step": of_step,
        "findings": None if found is None else dataclasses.asdict(found),
        "why_no_findings": unknown,
        "why_no_state": lost,
        "seed": experiment.train.seed,
        "step_key": jax.random.key_data(jax.random.fold_in(key, step - 1)).tolist(),
        "batch": _rows(batch, dataset.tokenizer),
    }
    first = unknown if found is None else f"first not finite: {found.first or 'nothing, the second time'}"
    said = f"{report['why']}; {first}" + ("" if exact else f" (with the parameters of step {of_step})")
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_whole(
            place / "report.txt", f"step {step}: {said}\n\n{'' if found is None else table(found)}\n\n{command}\n"
        )
        text = render_json(report, indent=1, ensure_ascii=False, not_finite=str)  # which it is, is the question
        write_whole(place / "report.json", text + "\n")
    except OSError as e:
        return f"{said}. The autopsy could not be written: {e}"
    return f"{said}. Autopsy in {place}; to replay this step alone: {command}"


def _place(run: Path, step: int) -> Path:
    return run / "autopsy" / f"step-{step}"


def _rewound(state: TrainState, steps: int) -> TrainState:
    """Without the last so many steps, all of them skipped."""
    skips = state.opt_state
    skips = dataclasses.replace(skips, skipped=skips.skipped - steps, in_a_row=skips.in_a_row - steps)
    return dataclasses.replace(state, step=state.step - steps, opt_state=skips)


def _keep_state(directory: Path, trainer: Trainer, state: TrainState, step: int) -> str | None:
    """Why not, or None."""
    try:
        shutil.rmtree(directory, ignore_errors=True)  # of a sitting that was killed before its report
        checkpoints = Checkpoints(directory)
        try:
            checkpoints.save(trainer.strategy.to_checkpoint(state), step, None)
        finally:
            checkpoints.close()
    except CheckpointSaveError as e:
        return str(e)
    return None


def _rows(batch: Batch, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    rows = np.concatenate([batch.inputs_BT[:MOST_ROWS], batch.targets_BT[:MOST_ROWS, -1:]], axis=1)
    known = (rows >= 0) & (rows < tokenizer.vocab_size)
    return [
        {"row": i, "text": tokenizer.decode(row) if known[i].all() else None, "ids": row.tolist()}
        for i, row in enumerate(rows)
    ]
