"""Open a run for training: check its experiment against the run to resume, and open its data, steps and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config import DataConfig, Experiment, LoraConfig, differences
from jaxgpt.data.corpus import fetch
from jaxgpt.data.dataset import resolve_vocab
from jaxgpt.data.mixture import parts_of, recorded_sources, replace_addresses
from jaxgpt.data.pipeline import PREFETCH, Dataset, Split, training_batches, validation_batches
from jaxgpt.errors import UserError, shell_line
from jaxgpt.files import cache_directory, is_there
from jaxgpt.lora import freeze, merge_adapters, thaw, thawed_shapes
from jaxgpt.parallel import multihost
from jaxgpt.parallel.device import check_memory
from jaxgpt.parallel.strategy import ONE_DEVICE, StepFn
from jaxgpt.parallel.trainer import Trainer, gather_params, make_trainer
from jaxgpt.runs import checks
from jaxgpt.runs.autopsy import debug_step
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.code import check_same_code, name_with_place, own_classes
from jaxgpt.runs.directory import RunMetadata, check_same_tokenizer
from jaxgpt.runs.pretrained import Weights, resolve_init_from
from jaxgpt.train import Metrics, Params, TrainState, init_and_dropout_keys, why_skipped

# Prefixes of the fields that may differ when a run is resumed. All others decide the result.
CHANGEABLE = (
    "name",  # a label
    # The hardware, and how it computes: only rounding differs.
    *("parallel.", "train.dtype", "train.attention", "model.remat"),
    # The location of the text: its fingerprint is compared instead.
    *("data.path", "data.corpus"),
    # Logging, validation and samples. eval_tokens is not among them: losses over other tokens cannot be compared, to
    # find the best checkpoint.
    *("train.log_", "train.profile", "train.eval_every", "train.sample_"),
    # Which checkpoints to keep, and when to give up.
    *("train.checkpoint_every", "train.keep_", "optim.max_skipped"),
)

ROLLOUT = 2  # makes the key of rollouts from the key of initialisation. Adapters have 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A run in training."""

    directory: Path
    given: Experiment  # as the user configured it
    experiment: Experiment  # as it is trained: with the architecture of its weights, and the size of its vocabulary
    dataset: Dataset
    trainer: Trainer
    weights: Callable[[], Weights] | None  # opens the weights of `train.init_from`, if there are any
    checkpoints: Checkpoints

    @property
    def metrics(self) -> Path:
        """Return the path of metrics.jsonl."""
        return self.directory / "metrics.jsonl"

    @functools.cached_property
    def keys(self) -> tuple[jax.Array, jax.Array]:
        """Return the keys of initialisation and of dropout."""
        return jax.jit(lambda: init_and_dropout_keys(self.experiment.train.seed))()  # one program instead of four

    @property
    def dropout_key(self) -> jax.Array:
        """Return the dropout key of the run."""
        return self.keys[1]

    def start_compiling(self, start: int) -> StepFn:
        """Compile the step in a thread, if one device takes it from step `start` on. Return a step that waits for it."""
        trainer = self.trainer
        if start == self.experiment.train.steps or trainer.strategy.name != ONE_DEVICE:
            return trainer.train_step
        pool = ThreadPoolExecutor(1)
        # It is traced here: while grain is imported, etils makes the imports of all threads lazy, which jax cannot bear.
        compiled = pool.submit(trainer.lower().compile)
        pool.shutdown(wait=False)  # after this one task
        return lambda state, batch, key: compiled.result()(state, batch, key)

    def restore_or_init(self, step: int) -> TrainState:
        """Return the state after `step` steps: a checkpoint, or the initial state for 0."""
        strategy, like, read = self.trainer.strategy, self.trainer.abstract_state, None
        if self.weights is not None and (like.frozen_params is not None or not step):
            read = self.weights().read(like.params if like.frozen_params is None else thawed_shapes(like.frozen_params))
        if not step:
            return self.trainer.init_state(self.keys[0], None if read is None else strategy.from_checkpoint(read))
        frozen = None if read is None else jax.jit(freeze, static_argnums=0)(self.experiment.lora, read)
        state = dataclasses.replace(self.checkpoints.restore(step, like), frozen_params=frozen)
        return strategy.from_checkpoint(state)

    def batches(self, start: int) -> Generator[Batch]:
        """Yield the batches of the steps after `start`, with the rows of this process, for `shard_batch`."""
        return self._read(start, self.trainer.strategy.local_rows(self.experiment.train.batch_size))

    def whole_batch(self, step: int, state: TrainState | None = None) -> Batch:
        """Return the batch of one step, with the rows of all devices and processes.

        state: the state before the step. A rollout completes the batch with its parameters. None means no rollout.
        """
        with contextlib.closing(self._read(step - 1, None, prefetch=1)) as batches:
            batch = next(batches)
        return batch if state is None else self._roll_out(step, state, batch)[0]

    def shard_batch(self, step: int, state: TrainState, batch: Batch) -> tuple[Batch, Metrics]:
        """Return a step's batch as the compiled step takes it, and the metrics of its rollout, if its data have one.

        state: the state before the step. Raises `UserError` for a rollout without the shapes of `shape_batch`.
        """
        batch, metrics = self._roll_out(step, state, batch)
        batch = self.trainer.strategy.shard_batch(batch)
        if self.dataset.roll_out is not None:
            checks.check_batch(batch, self.trainer.abstract_batch, self.dataset.roll_out, self.experiment.data)
        return batch, metrics

    def _roll_out(self, step: int, state: TrainState, batch: Batch) -> tuple[Batch, Metrics]:
        if self.dataset.roll_out is None:
            return batch, {}
        params = gather_params(self.trainer, state, merge=functools.partial(_merge, self.experiment.lora))
        key = jax.random.fold_in(jax.random.fold_in(self.keys[0], ROLLOUT), step)
        return self.dataset.roll_out(self.trainer, params, batch, key)

    def _read(self, start: int, rows: np.ndarray | None, prefetch: int = PREFETCH) -> Generator[Batch]:
        data, method = self.experiment.data, self.dataset.train.training_rows
        batches = training_batches(
            self.dataset.train,
            block_size=self.experiment.model.block_size,
            batch_size=self.experiment.train.batch_size,
            seed=self.experiment.train.seed,
            start_step=start,
            rows=rows,
            prefetch=prefetch,
        )
        with checks.blame_own_classes(data, method), contextlib.closing(batches):
            yield from batches

    def take_steps(self, state: TrainState, start: int, stop: int) -> Iterator[tuple[int, TrainState, Metrics]]:
        """Yield (step, state, metrics) after each step from `start` + 1 to `stop`. The next step donates the state."""
        with contextlib.closing(self.batches(start)) as batches:
            for step in range(start + 1, stop + 1):
                batch, rolled_out = self.shard_batch(step, state, next(batches))
                state, metrics = self.trainer.train_step(state, batch, self.dropout_key)
                float(metrics["loss"])  # waits, so that one step is in flight
                yield step, state, rolled_out | metrics

    def measure_val_loss(self, loss: Callable[[Iterator[Batch]], float]) -> tuple[float, dict[str, float]]:
        """Return (validation loss, loss of each source of a mixture). The first is averaged by the weights of the sources.

        loss: returns the mean loss over batches.
        """
        parts, most = parts_of(self.dataset.val), self.experiment.train.eval_tokens
        each = None if most is None else max(most // len(parts), 1)
        losses = {name: loss(self._validation_windows(split, each)) for name, (_, split) in parts.items()}
        return sum(parts[name][0] * x for name, x in losses.items()), {} if "" in losses else losses

    @property
    def validation_batch_size(self) -> int:
        """Return the number of rows in a batch of the validation, over all devices."""
        return self.trainer.strategy.data_parallel_size * self.trainer.split.micro_batch_size

    def _validation_windows(self, split: Split, max_tokens: int | None) -> Iterator[Batch]:
        """Yield the batches over which the loss of a split is measured, sharded over the devices."""
        strategy, size = self.trainer.strategy, self.validation_batch_size
        with checks.blame_own_classes(self.experiment.data, split.validation_rows):
            windows = validation_batches(
                split,
                block_size=self.experiment.model.block_size,
                batch_size=size,
                max_tokens=max_tokens,
                rows=strategy.local_rows(size),
            )
            yield from map(strategy.shard_batch, windows)

    def check_first_step(self) -> None:
        """Raise `UserError` if the first step or validation is not finite, with pieces of a user's own.

        The step is the compiled one, and the state that it makes is dropped.
        """
        own = [cls for cls in own_classes(self.experiment) if not issubclass(cls, DataConfig)]
        trainer = self.trainer
        if not own or trainer.parameters[0] > checks.LARGEST_CHECKED:
            return
        with checks.blame_own_classes(self.experiment):
            state = self.restore_or_init(0)
            params = trainer.merged_params(state)
            nats, _ = self.measure_val_loss(lambda windows: float(trainer.eval_step(params, next(windows))[0]))
            ((_, state, metrics),) = self.take_steps(state, 0, 1)
        to_blame, how = name_with_place(own[0]), None
        if int(metrics["in_a_row"]):  # the step was skipped
            how = f"at the first step the {why_skipped(metrics)}"
            before = self.restore_or_init(0)
            params, batch = gather_params(trainer, before), self.whole_batch(1, before)
            if params is not None:
                found = debug_step(trainer, params, batch, self.dropout_key, 1)
                to_blame = found.culprit or to_blame
                how = how if found.first is None else f"{how}, first in {found.first}"
        elif not np.isfinite(nats):
            how = f"the validation loss of the first batch is {nats}"
        elif not all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.params)):
            to_blame, how = name_with_place(type(self.experiment.optim)), "its first update does"
        if how is not None:
            raise UserError(f"{to_blame} gives NaN or infinity: {how}")


def _merge(config: LoraConfig, params: Params, frozen_params: Params | None) -> Params:
    if frozen_params is None:
        return params
    return jax.jit(merge_adapters, static_argnums=0)(config, params, jax.jit(thaw)(frozen_params))


def open_training(
    experiment: Experiment,
    directory: Path,
    recorded: RunMetadata | None,
    *,
    extend: bool | None = None,
    remedy: str = "to train it on, name that text with --data.path, or another --run-dir, or start over with --fresh",
) -> Training:
    """Check all that the user decides, without writing anything, and return the training. Raises `UserError`.

    recorded: the metadata of the run to resume, or to take steps of again. None means a new run. See `jaxgpt.fit` for
    `extend`, and `reopen_dataset` for `remedy`.
    """
    if recorded is not None:
        experiment = with_horizons(recorded, experiment, extend=extend)
        check_same_code(experiment, directory, recorded.code)
        check_same_configuration(recorded, experiment)
    train = experiment.train
    checkpoints = Checkpoints(directory / "checkpoints", keep_last=train.keep_last, keep_every=train.keep_every)
    if recorded is not None:
        checkpoints.check_depth(recorded.model)
    resolved, weights = resolve_init_from(experiment, recorded)
    with checks.blame_own_classes(resolved.data, resolved.data.open_dataset):
        if recorded is None:
            dataset = resolved.data.open_dataset(resolved.model)
        else:
            dataset = reopen_dataset(recorded, resolved.data, remedy=remedy)
        needs = "its fingerprint needs tokenizer_sha256=fingerprint(tokenizer) of data.tokenizer"
        if not isinstance(dataset, Dataset):
            raise TypeError(f"it returns a {type(dataset).__name__}, and must return a Dataset of jaxgpt.data.pipeline")
        if any(own_classes(resolved.data)) and "tokenizer_sha256" not in dataset.fingerprint:
            raise UserError(f"{type(resolved.data).__name__}.open_dataset: {needs}")
    if dataset.roll_out is not None and multihost.is_multiprocess():
        raise UserError(f"{type(resolved.data).__name__} draws its rows from the model, in one process: start only one")
    resolved = dataclasses.replace(resolved, model=resolve_vocab(resolved.model, dataset.tokenizer))
    with checks.watch_own_modules(resolved):
        trainer = make_trainer(resolved, recorded=None if recorded is None else recorded.given)
        checks.check_step(resolved, trainer)
    width = resolved.model.block_size * resolved.model.n_embd
    activation = trainer.split.micro_batch_size * width * 2  # bytes of a single one
    check_memory(trainer.abstract_state, activation, trainer.strategy.devices)
    training = Training(
        directory=directory,
        given=experiment,
        experiment=resolved,
        dataset=dataset,
        trainer=trainer,
        weights=weights,
        checkpoints=checkpoints,
    )
    if recorded is None:
        if any(own_classes(resolved.data)):
            checks.check_rows(resolved, dataset, training.validation_batch_size)
        training.check_first_step()
        if resolved.model.is_foreign:
            checks.check_model(resolved, training.whole_batch(1))
    return training


def with_horizons(metadata: RunMetadata, experiment: Experiment, *, extend: bool | None) -> Experiment:
    """Return the experiment with the schedule that the run has followed so far, if it asks for more steps.

    extend: see `jaxgpt.fit`. Raises `UserError` if it is None and the learning rate would rise again.
    """
    recorded, steps = metadata.given.optim, metadata.given.train.steps
    if experiment.optim.horizons not in ((), recorded.horizons) or experiment.train.steps < steps:
        return experiment  # refused below
    if experiment.train.steps == steps or extend is False:
        return dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, horizons=recorded.horizons))
    optim = dataclasses.replace(experiment.optim, horizons=(*recorded.horizons, steps))
    rates = [np.asarray(optim.make_schedule(experiment.train.steps)(step)) for step in (steps - 1, steps)]
    if rates[1] > rates[0] and extend is None:
        raise UserError(
            f"{metadata.directory}: its {optim.schedule} schedule ends at step {steps} with a learning rate of {rates[0]:.3g}. "
            f"It rises to {rates[1]:.3g} there with train.steps={experiment.train.steps}: to continue so, add --extend (extend=True)"
        )
    return dataclasses.replace(experiment, optim=optim)


def check_same_configuration(metadata: RunMetadata, experiment: Experiment) -> None:
    """Raise `UserError` if a field that is not in CHANGEABLE differs from the run's. More steps may be asked for."""
    directory = metadata.directory
    if metadata.imported is not None:
        start = f"name another --run-dir, and start from this one with {shell_line('--train.init-from', directory)}"
        raise UserError(f"{directory} holds an imported model, which cannot be resumed: {start}")
    # The experiment may be the one that the user configured, or the one that `load` returns.
    changed = min((differences(known, experiment) for known in (metadata.given, metadata.experiment)), key=len)
    changed = {name: values for name, values in changed.items() if not name.startswith(CHANGEABLE)}
    if experiment.data.tokenizer_file is not None:
        check_same_tokenizer(metadata, experiment.data.tokenizer_file)
        changed.pop("data.tokenizer", None)
    optim, steps = metadata.given.optim, metadata.given.train.steps
    if experiment.optim.warmup_steps in (None, optim.warmup(steps)):  # left out, or the same number
        changed.pop("optim.warmup_steps", None)
    if experiment.optim.horizons == (*optim.horizons, steps):  # see `with_horizons`
        del changed["train.steps"], changed["optim.horizons"]
    if None not in changed.get("train.init_from", (None,)):
        del changed["train.init_from"]  # another path of the same weights: `load_base` compares their SHA-256
    if changed:
        listed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in changed.items())
        remedy = "Name another directory with --run-dir, or start over with --fresh (the old run is moved aside)."
        raise UserError(f"{directory} holds a run with another configuration: {listed}. {remedy}")


def reopen_dataset(metadata: RunMetadata, data: DataConfig | None = None, *, remedy: str) -> Dataset:
    """Return the dataset that a run was trained on, from its text or, if that is gone, from the cache of tokens.

    Raises `UserError`, ending with the clause `remedy`, if neither exists, or if the data have changed. data: the run's
    data configuration, perhaps with another path. None means the recorded one.
    """
    data = data or metadata.experiment.data
    data = dataclasses.replace(data, path=replace_addresses(data.path, fetch))  # the user's: a record has none
    try:
        dataset = data.open_dataset(metadata.model, known=metadata.data)
    except UserError:
        if data.path is None or ":" in data.path or is_there(Path(data.path), "Name another text."):
            raise
        lost = f"{data.path}, which is not there, and its tokens are not in the cache {cache_directory() / 'tokens'}"
        raise UserError(f"{metadata.directory} was trained on {lost}: {remedy}") from None
    if changed := describe_data_changes(metadata.data, dataset.fingerprint):
        raise UserError(f"{metadata.directory} was trained on other data: {', '.join(changed[:8])}: {remedy}")
    return dataset


def describe_data_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe the differences between two fingerprints. Token files are compared by name, not by directory."""
    sources, sources_now = recorded_sources(before), recorded_sources(now)
    if len(sources) != len(sources_now):
        return [f"{len(sources) or 1} -> {len(sources_now) or 1} sources"]
    if sources:
        both = enumerate(zip(sources, sources_now, strict=True), 1)
        return [f"source {n}: {change}" for n, (old, new) in both for change in describe_data_changes(old, new)]
    files, files_now = before.get("files"), now.get("files")
    if isinstance(files, dict) and isinstance(files_now, dict) and files != files_now:
        changed = [name for name in sorted({**files, **files_now}) if files.get(name) != files_now.get(name)]
        words = {(True, False): "is missing", (False, True): "is new", (True, True): "has changed"}
        return [f"{name} {words[name in files, name in files_now]}" for name in changed]
    changed = [name for name, value in now.items() if before.get(name) != value]
    return [f"{name} {str(before.get(name))[:12]} -> {str(now[name])[:12]}" for name in changed]
