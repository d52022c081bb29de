"""Open pretrained weights, from which training starts, and the base of adapters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxgpt.config.serialize import class_name
from jaxgpt.data.dataset import DataConfig
from jaxgpt.errors import UserError
from jaxgpt.experiment import CONTEXT_OF_WEIGHTS, Experiment
from jaxgpt.files import sha256
from jaxgpt.lora import init_adapters, merge_adapters
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.strategy import with_shardings
from jaxgpt.runs.checkpoint import Checkpoints, open_checkpoints
from jaxgpt.runs.directory import Origin, RunMetadata, check_same_tokenizer, fetch_run, is_run, read_metadata
from jaxgpt.train import Params

if TYPE_CHECKING:  # what reads Hugging Face's format is imported for such weights only
    from jaxgpt.hf.source import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of a run, or of a model in Hugging Face's format, checked but not yet read."""

    directory: Path
    config: GPTConfig  # with unstacked layers
    tokenizer: str  # path of its tokenizer.json, or "ids"
    source: Source | None = None  # the model in Hugging Face's format. None if it is a run
    metadata: RunMetadata | None = None  # the run. None if it is a model in Hugging Face's format
    step: int | None = None  # the step of the run's checkpoint

    def sha256(self) -> str:
        """Return the digest of the files with the weights."""
        if self.source is not None:
            parts = [sha256(file) for file in sorted({str(x.file) for x in self.source.tensors.values()})]
        else:
            manifest = open_checkpoints(self.directory).manifest(self.step or 0)
            parts = [json.dumps(manifest["files"], sort_keys=True)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def describe(self, model: GPTConfig) -> Origin:
        """Return the record of these weights in a run that starts from them. model: the run's."""
        return Origin(directory=str(self.directory.resolve()), step=self.step, sha256=self.sha256(), model=model)

    def read(self, like: Params) -> Params:
        """Return the parameters in float32, with the stacking, context and shardings of `like`."""
        shardings = jax.tree.map(lambda x: x.sharding, like)
        layers, places = [f"h_{layer}" for layer in range(self.config.n_layer)], dict(shardings)
        if "h" in like:
            stack = places.pop("h")["block"]
            one_layer = jax.tree.map(lambda x: _respecify(x, lambda spec: spec[1:]), stack)
            places |= dict.fromkeys(layers, one_layer)
        if self.source is not None:
            from jaxgpt.hf.weights import read_params

            paths: Any = flatten_dict(places, sep="/")
            parts = (self.source.tensors, self.source.family, self.config)
            params = read_params(*parts, dtype=jnp.float32, places=paths)
        else:
            params = self._restore(places, layers)
        if "wpe" in params:
            context = like["wpe"]["embedding"].shape[0]
            params["wpe"] = {"embedding": params["wpe"]["embedding"][:context]}
        if "h" in like:
            each = [params.pop(layer) for layer in layers]
            params["h"] = {"block": jax.tree.map(lambda *x: jnp.stack(x), *each)}
        return jax.device_put(optax.tree.cast(params, jnp.float32), shardings)

    def _restore(self, places: dict[str, Any], layers: list[str]) -> Params:
        """Return a run's parameters with unstacked layers. places: the sharding of each."""
        from jaxgpt.sample.quantize import unstack_layers

        assert self.metadata is not None and self.step is not None
        model = self.metadata.model.make_model()
        if model.config.scan_layers:
            one_layer, *_ = [places.pop(layer) for layer in layers]
            stack = jax.tree.map(lambda x: _respecify(x, lambda spec: (None, *spec)), one_layer)
            places["h"] = {"block": stack}
        checkpoints, like = open_checkpoints(self.directory), with_shardings(model.shapes(), places)
        params = restore_merged_params(self.metadata, checkpoints, self.step, like)
        return unstack_layers(model, params)[1]


def open_weights(
    name: str, *, step: int | None = None, tokenizer: str | None = None, downloads: bool = True
) -> Weights:
    """Open weights and check them. Raises `UserError` if they are missing or damaged.

    name: a run directory, or a model in Hugging Face's format: see `hf.source.open_source`, also for `tokenizer` and
    `downloads`. step: the step of a run's checkpoint. None means the best.
    """
    directory = fetch_run(name) if downloads else Path(name)
    if not is_run(directory):
        from jaxgpt.hf.source import open_source

        source = open_source(name, tokenizer, downloads=downloads)
        file = tokenizer or str(source.directory / "tokenizer.json")
        return Weights(directory=source.directory, config=source.config, tokenizer=file, source=source)
    metadata, checkpoints = read_metadata(directory), open_checkpoints(directory)
    good = checkpoints.latest_valid("best") if step is None else checkpoints.latest_valid(before=step + 1)
    if step not in (None, good):
        raise UserError(f"{directory} no longer has an undamaged checkpoint of step {step}")
    config = dataclasses.replace(metadata.model, scan_layers=False)
    file = str(directory / "tokenizer.json")
    return Weights(directory=directory, config=config, tokenizer=file, metadata=metadata, step=good)


def resolve_init_from(
    experiment: Experiment, metadata: RunMetadata | None = None
) -> tuple[Experiment, Callable[[], Weights] | None]:
    """Return (experiment, function that opens its weights or None), with the weights' model and tokenizer.

    The context is at most the weights' own (open: see `open_context`). metadata: the run to resume, which decides model,
    tokenizer and warm-up.
    """
    name = experiment.train.init_from
    if metadata is not None:
        data = dataclasses.replace(experiment.data, tokenizer=metadata.experiment.data.tokenizer)
        optim = dataclasses.replace(experiment.optim, warmup_steps=metadata.given.optim.warmup_steps)
        experiment = dataclasses.replace(experiment, data=data, optim=optim)
        if name is None:
            return experiment, None
        model = dataclasses.replace(metadata.experiment.model, remat=experiment.model.remat)  # which fits the hardware
        return dataclasses.replace(experiment, model=model), lambda: load_base(metadata, name)
    if name is None:
        if experiment.model.block_size == CONTEXT_OF_WEIGHTS:
            raise UserError(f"{experiment.name} starts from weights: name a run or a model with --train.init-from")
        return experiment, None
    named = experiment.data.tokenizer
    file = None if named in ("char", "byte", "bpe") else named
    weights = open_weights(name, tokenizer=file)
    if weights.metadata is not None and file is not None:
        check_same_tokenizer(weights.metadata, file)
    asked, found = experiment.model, weights.config
    wanted, there = class_name(type(asked)), class_name(type(found))
    if asked.is_foreign and wanted != there:
        raise UserError(f"train.init_from={name} has the architecture {there}, not {wanted}")
    model = dataclasses.replace(
        found,
        block_size=min(asked.block_size, found.block_size),
        dropout=asked.dropout,
        scan_layers=asked.scan_layers,
        remat=asked.remat,
    )
    data = dataclasses.replace(experiment.data, tokenizer=weights.tokenizer)
    if asked.block_size == CONTEXT_OF_WEIGHTS:
        model = dataclasses.replace(model, block_size=open_context(data, model))
    return dataclasses.replace(experiment, model=model, data=data), lambda: weights


def open_context(data: DataConfig, model: GPTConfig) -> int:
    """Return the context for data: what the longest conversation needs, at most 1,024 and the context of the model."""
    most = min(1024, model.block_size)
    if not data.is_chat:
        return most
    from jaxgpt.data.conversations import Conversations

    dataset = data.open_dataset(dataclasses.replace(model, block_size=most))
    longest = max(int(s.needed.max()) for s in (dataset.train, dataset.val) if isinstance(s, Conversations))
    return min(most, -(-longest // 64) * 64)


def load_base(metadata: RunMetadata, name: str | None = None) -> Weights:
    """Open the weights that a run started from. Raises `UserError` if they are gone or changed.

    They are looked for where they were, at `name` (by default `train.init_from`), and by their name next to the run.
    """
    name, origin = name or str(metadata.experiment.train.init_from), metadata.origin
    assert origin is not None
    tokenizer = str(metadata.experiment.data.tokenizer)  # a copy, since the model's may be gone
    beside = metadata.directory.absolute().parent / Path(origin.directory).name  # if both were copied here
    location = next((path for path in (origin.directory, name, beside) if os.path.exists(path)), name)
    found = open_weights(str(location), step=origin.step, tokenizer=tokenizer, downloads=False)
    if found.sha256() != origin.sha256:
        raise UserError(f"{found.directory} holds other weights than the run began from: restore those")
    return found


def restore_merged_params(metadata: RunMetadata, checkpoints: Checkpoints, step: int, like: Params) -> Params:
    """Restore the parameters of a run, with adapters merged into their base. like: shapes and shardings."""
    lora = metadata.experiment.lora
    if lora.rank is None:
        return checkpoints.restore_params(step, like)
    try:
        base = load_base(metadata)
    except UserError as e:
        raise UserError(f"the run has only adapters, for {metadata.experiment.train.init_from}: {e}") from None
    params, adapters = base.read(like), restore_adapters(metadata, checkpoints, step, like)
    shardings = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(merge_adapters, static_argnums=0, out_shardings=shardings)(lora, adapters, params)


def restore_adapters(metadata: RunMetadata, checkpoints: Checkpoints, step: int, like: Params) -> Params:
    """Restore a run's adapters, whole on each device. like: the model's shapes and shardings."""
    lora = metadata.experiment.lora
    shapes = jax.eval_shape(lambda params: init_adapters(lora, jax.random.key(0), params), like)
    places = _respecify(jax.tree.leaves(like)[0].sharding, lambda spec: ())
    return checkpoints.restore_params(step, with_shardings(shapes, places))


def _respecify(sharding: Sharding, change: Callable[[tuple], tuple]) -> Sharding:
    """Return a sharding with its axes changed, if it has axes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*change(tuple(sharding.spec))))
