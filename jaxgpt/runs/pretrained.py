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
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxgpt.config.serialize import class_name
from jaxgpt.data.dataset import DataConfig
from jaxgpt.errors import UserError
from jaxgpt.experiment import CONTEXT_OF_WEIGHTS, Experiment
from jaxgpt.files import is_there, sha256
from jaxgpt.lora import init_adapters, merge_adapters
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.strategy import with_shardings
from jaxgpt.runs.checkpoint import Checkpoints, open_checkpoints
from jaxgpt.runs.directory import Origin, RunMetadata, check_same_tokenizer, is_run, read_metadata
from jaxgpt.train import Params

if TYPE_CHECKING:  # what reads Hugging Face's format is imported for such weights only
    from jaxgpt.hf.source import Source

OWN = ("dropout", "scan_layers", "remat")  # fields that the experiment decides, not the weights it starts from


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
            assert self.step is not None
            parts = [json.dumps(open_checkpoints(self.directory).manifest(self.step)["files"], sort_keys=True)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def describe(self, model: GPTConfig) -> Origin:
        """Return the record of these weights in a run that starts from them. model: the run's."""
        return Origin(directory=str(self.directory.resolve()), step=self.step, sha256=self.sha256(), model=model)

    def read(self, like: Params) -> Params:
        """Return the parameters in float32, with the stacking, context length and shardings of `like`."""
        places: dict[str, Sharding] = {}  # by path, with unstacked layers
        for keys, x in jax.tree.leaves_with_path(like):
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            if path.startswith("h/block/"):
                one_layer = _respecify(x.sharding, lambda spec: spec[1:])
                places |= {path.replace("h/block", f"h_{layer}", 1): one_layer for layer in range(x.shape[0])}
            else:
                places[path] = x.sharding
        if self.source is not None:
            from jaxgpt.hf.weights import read_params

            tensors, family = self.source.tensors, self.source.family
            params = read_params(tensors, family, self.config, dtype=jnp.float32, places=places)
        else:
            params = self._restore_unstacked(places)
        if "wpe" in params:
            params["wpe"] = {"embedding": params["wpe"]["embedding"][: like["wpe"]["embedding"].shape[0]]}
        if "h" in like:
            layers = [params.pop(f"h_{layer}") for layer in range(self.config.n_layer)]
            params["h"] = {"block": jax.tree.map(lambda *each: jnp.stack(each), *layers)}
        return jax.tree.map(lambda x, y: jax.device_put(x.astype(jnp.float32), y.sharding), params, like)

    def _restore_unstacked(self, places: dict[str, Sharding]) -> Params:
        """Return the run's parameters with unstacked layers. places: the sharding of each, by path."""
        from jaxgpt.sample.quantize import unstack_layers

        assert self.metadata is not None and self.step is not None
        model = self.metadata.model.make_model()

        def with_sharding(path: Any, x: Any) -> jax.ShapeDtypeStruct:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            sharding = places[name.replace("h/block/", "h_0/", 1)]
            if name.startswith("h/"):
                sharding = _respecify(sharding, lambda spec: (None, *spec))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        like = jax.tree.map_with_path(with_sharding, model.shapes())
        params = restore_merged_params(self.metadata, open_checkpoints(self.directory), self.step, like)
        return unstack_layers(model, params)[1]


def open_weights(
    name: str, *, step: int | None = None, tokenizer: str | None = None, downloads: bool = True
) -> Weights:
    """Open weights and check them. Raises `UserError` if they are missing or damaged.

    name: a run directory, the directory of a model in Hugging Face's format, or an id on the Hub.
    step: the step of a run's checkpoint. None means the best. tokenizer, downloads: see `hf.source.open_source`.
    """
    directory = Path(name)
    remedy = "Name a run, or a model's directory, with --train.init-from."
    if not (is_there(directory, remedy) and is_run(directory)):
        from jaxgpt.hf.source import open_source

        source = open_source(name, tokenizer, downloads=downloads)
        file = tokenizer or str(source.directory / "tokenizer.json")
        return Weights(directory=source.directory, config=source.config, tokenizer=file, source=source)
    metadata, checkpoints = read_metadata(directory), open_checkpoints(directory)
    checkpoints.check_depth(metadata.model)
    good = checkpoints.latest_valid("best") if step is None else checkpoints.latest_valid(before=step + 1)
    if step not in (None, good):
        raise UserError(f"{directory} no longer has an undamaged checkpoint of step {step}")
    config = dataclasses.replace(metadata.model, scan_layers=False)
    file = str(directory / "tokenizer.json")
    return Weights(directory=directory, config=config, tokenizer=file, metadata=metadata, step=good)


def resolve_init_from(
    experiment: Experiment, metadata: RunMetadata | None = None
) -> tuple[Experiment, Callable[[], Weights] | None]:
    """Return (experiment, function that opens its weights), with the architecture and tokenizer that the weights have.

    The context is at most the weights' own (open: see `open_context`). Without `train.init_from` the function is None.
    metadata: the run to resume, which decides architecture, tokenizer and warm-up. None means a new run.
    """
    name, named = experiment.train.init_from, experiment.data.tokenizer
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
    weights = open_weights(name, tokenizer=None if named in ("char", "byte", "bpe") else named)
    if weights.metadata is not None and named not in ("char", "byte", "bpe"):
        check_same_tokenizer(weights.metadata, named)
    asked, found = (class_name(type(config)) for config in (experiment.model, weights.config))
    if experiment.model.is_foreign and asked != found:
        raise UserError(f"train.init_from={name} has the architecture {found}, not {asked}: its weights do not fit")
    own: dict[str, Any] = {field: getattr(experiment.model, field) for field in OWN}
    own["block_size"] = min(experiment.model.block_size, weights.config.block_size)
    model = dataclasses.replace(weights.config, **own)
    data = dataclasses.replace(experiment.data, tokenizer=weights.tokenizer)
    if experiment.model.block_size == CONTEXT_OF_WEIGHTS:
        model = dataclasses.replace(model, block_size=open_context(data, model))
    return dataclasses.replace(experiment, model=model, data=data), lambda: weights


def open_context(data: DataConfig, model: GPTConfig) -> int:
    """Return the context for data, at most 1,024 and the model's own: for conversations what the longest needs."""
    most = min(1024, model.block_size)
    if not data.is_chat:
        return most
    from jaxgpt.data.conversations import Conversations

    dataset = data.open_dataset(dataclasses.replace(model, block_size=most))
    longest = max(int(s.needed.max()) for s in (dataset.train, dataset.val) if isinstance(s, Conversations))
    return min(most, -(-longest // 64) * 64)


def load_base(metadata: RunMetadata, name: str | None = None) -> Weights:
    """Open the weights that a run started from. Raises `UserError` if they are missing or have changed.

    They are looked for at their original location, at `name` (None means `train.init_from`), and in the parent of the
    run directory, under their original name.
    """
    name, origin = name or metadata.experiment.train.init_from, metadata.origin
    assert name is not None and origin is not None
    tokenizer = str(metadata.experiment.data.tokenizer)  # a copy, since the model's may be gone
    beside = metadata.directory.absolute().parent / Path(origin.directory).name  # if both were copied here
    location = next((path for path in (origin.directory, name, beside) if os.path.exists(path)), name)
    found = open_weights(str(location), step=origin.step, tokenizer=tokenizer, downloads=False)
    if found.sha256() != origin.sha256:
        raise UserError(f"{found.directory} holds other weights than the run began from: restore those")
    return found


def restore_merged_params(metadata: RunMetadata, checkpoints: Checkpoints, step: int, like: Params) -> Params:
    """Restore the parameters of a run, with adapters merged into their base. like: shapes and shardings.

    Raises `UserError` if the run has adapters and their base is missing or has changed.
    """
    lora = metadata.experiment.lora
    if lora.rank is None:
        return checkpoints.restore_params(step, like)
    try:
        base = load_base(metadata)
    except UserError as e:
        said = f"the run has only adapters, for {metadata.experiment.train.init_from}: {e}"
        raise UserError(f"{said}. Restore that model, or copy it next to {metadata.directory}") from None
    params, adapters = base.read(like), restore_adapters(metadata, checkpoints, step, like)
    shardings = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(merge_adapters, static_argnums=0, out_shardings=shardings)(lora, adapters, params)


def restore_adapters(metadata: RunMetadata, checkpoints: Checkpoints, step: int, like: Params) -> Params:
    """Restore the adapters of a run, whole on each device. like: shapes and shardings of the model's parameters."""
    lora = metadata.experiment.lora
    shapes = jax.eval_shape(lambda params: init_adapters(lora, jax.random.key(0), params), like)
    places = _respecify(jax.tree.leaves(like)[0].sharding, lambda spec: ())
    return checkpoints.restore_params(step, with_shardings(shapes, places))


def _respecify(sharding: Sharding, change: Callable[[tuple], tuple]) -> Sharding:
    """Return a sharding with its axes changed, if it has axes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*change(tuple(sharding.spec))))
