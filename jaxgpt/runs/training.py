"""A run in training: its experiment and data, the compiled steps, and the checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config import DataConfig, Experiment
from jaxgpt.data.dataset import resolve_vocab
from jaxgpt.data.pipeline import PREFETCH, Dataset, training_batches, validation_batches
from jaxgpt.lora import freeze, thawed_shapes
from jaxgpt.parallel.device import check_memory
from jaxgpt.parallel.strategy import ONE_DEVICE, StepFn
from jaxgpt.parallel.trainer import Trainer, make_trainer
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import RunMetadata
from jaxgpt.runs.pretrained import Weights, load_base, resolve_init_from
from jaxgpt.runs.resume import check_same_configuration, reopen_dataset, with_horizons
from jaxgpt.train import Metrics, TrainState, init_and_dropout_keys


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
    def _keys(self) -> tuple[jax.Array, jax.Array]:
        return jax.jit(lambda: init_and_dropout_keys(self.experiment.train.seed))()  # one program instead of four

    @property
    def dropout_key(self) -> jax.Array:
        """Return the dropout key of the run."""
        return self._keys[1]

    def restore_or_init(self, step: int) -> TrainState:
        """Return the state after `step` steps: a checkpoint, or the initial state for 0."""
        strategy, like, read = self.trainer.strategy, self.trainer.abstract_state, None
        if self.weights is not None and (like.frozen_params is not None or not step):
            read = self.weights().read(like.params if like.frozen_params is None else thawed_shapes(like.frozen_params))
        if step:
            frozen = None if read is None else jax.jit(freeze, static_argnums=0)(self.experiment.lora, read)
            state = dataclasses.replace(self.checkpoints.restore(step, like), frozen_params=frozen)
            return strategy.from_checkpoint(state)
        return self.trainer.init_state(self._keys[0], None if read is None else strategy.from_checkpoint(read))

    def start_compiling(self, start: int) -> StepFn:
        """Compile the step in a thread from now on, if one device takes it. Return a `train_step` that waits for it.

        start: steps taken so far. If they are all, nothing is compiled.
        """
        trainer = self.trainer
        if start == self.experiment.train.steps or trainer.strategy.name != ONE_DEVICE:
            return trainer.train_step
        pool = ThreadPoolExecutor(1)
        compiled = pool.submit(lambda: trainer.lower().compile())
        pool.shutdown(wait=False)  # after this one task
        return lambda state, batch, key: compiled.result()(state, batch, key)

    def batches(self, start: int) -> Generator[Batch]:
        """Yield the batches of the steps after `start`, sharded over the devices."""
        strategy = self.trainer.strategy
        with contextlib.closing(self._read(start, strategy.local_rows(self.experiment.train.batch_size))) as batches:
            yield from map(strategy.shard_batch, batches)

    def take_steps(self, state: TrainState, start: int, stop: int) -> Iterator[tuple[int, TrainState, Metrics]]:
        """Yield (step, state, metrics) after each step from `start` + 1 to `stop`. The next step donates the state."""
        with contextlib.closing(self.batches(start)) as batches:
            for step in range(start + 1, stop + 1):
                state, metrics = self.trainer.train_step(state, next(batches), self.dropout_key)
                float(metrics["loss"])  # waits, so that one step is in flight
                yield step, state, metrics

    def validation_windows(self) -> Iterator[Batch]:
        """Yield the batches over which the validation loss is measured, sharded over the devices."""
        strategy, train = self.trainer.strategy, self.experiment.train
        rows = strategy.data_parallel_size * self.trainer.split.micro_batch_size  # in one batch, over all devices
        windows = validation_batches(
            self.dataset.val,
            block_size=self.experiment.model.block_size,
            batch_size=rows,
            max_tokens=train.eval_tokens,
            rows=strategy.local_rows(rows),
        )
        yield from map(strategy.shard_batch, windows)

    def whole_batch(self, step: int) -> Batch:
        """Return the batch of one step, with the rows of all devices and processes."""
        with contextlib.closing(self._read(step - 1, None, prefetch=1)) as batches:
            return next(batches)

    def _read(self, start: int, rows: np.ndarray | None, prefetch: int = PREFETCH) -> Generator[Batch]:
        train = self.experiment.train
        return training_batches(
            self.dataset.train,
            block_size=self.experiment.model.block_size,
            batch_size=train.batch_size,
            seed=train.seed,
            start_step=start,
            rows=rows,
            prefetch=prefetch,
        )


def open_training(
    experiment: Experiment, directory: Path, recorded: RunMetadata | None, *, extend: bool | None = None
) -> Training:
    """Check all that the user decides, without writing anything, and return the training. Raises `UserError`.

    Args:
        experiment: as the user configured it.
        directory: the run directory.
        recorded: metadata of the run to resume. None means a new run.
        extend: see `jaxgpt.fit`.
    """
    if recorded is not None:
        experiment = with_horizons(recorded, experiment, extend=extend)
        check_same_configuration(recorded, experiment)
    resolved, weights = resolve_init_from(experiment, recorded)
    if recorded is None:
        dataset = resolved.data.open_dataset(resolved.model)
    else:
        remedy = "to train it on, name that text with --data.path, or another --run-dir, or start over with --fresh"
        dataset = reopen_dataset(recorded, resolved.data, remedy=remedy)
    resolved = dataclasses.replace(resolved, model=resolve_vocab(resolved.model, dataset.tokenizer))
    trainer = make_trainer(resolved, recorded=None if recorded is None else recorded.given)
    model, train = resolved.model, experiment.train
    hidden_bytes = trainer.split.micro_batch_size * model.block_size * model.n_embd * 2  # one 16-bit activation
    check_memory(trainer.abstract_state, hidden_bytes, trainer.strategy.devices)
    return Training(
        directory=directory,
        given=experiment,
        experiment=resolved,
        dataset=dataset,
        trainer=trainer,
        weights=weights,
        checkpoints=Checkpoints(directory / "checkpoints", keep_last=train.keep_last, keep_every=train.keep_every),
    )


def reopen_training(metadata: RunMetadata, data: DataConfig | None = None, *, remedy: str) -> Training:
    """Return a run as it was trained, to take its steps again. Nothing is written.

    Raises `UserError` if the text is missing or has changed. Arguments: see `reopen_dataset`.
    """
    experiment = dataclasses.replace(metadata.experiment, model=metadata.model)
    return Training(
        directory=metadata.directory,
        given=metadata.given,
        experiment=experiment,
        dataset=reopen_dataset(metadata, data, remedy=remedy),
        trainer=make_trainer(experiment, recorded=experiment),
        weights=None if metadata.origin is None else functools.partial(load_base, metadata),
        checkpoints=Checkpoints(metadata.directory / "checkpoints"),
    )
