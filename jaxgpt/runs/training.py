"""A run in training: its experiment and data, the compiled steps, and the checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from pathlib import Path

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config import Experiment
from jaxgpt.data.pipeline import PREFETCH, training_batches
from jaxgpt.data.tokens import Dataset
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.pretrained import Weights
from jaxgpt.train import TrainState, init_and_dropout_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A run in training."""

    directory: Path
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
    def dropout_key(self) -> jax.Array:
        """Return the dropout key of the run."""
        return init_and_dropout_keys(self.experiment.train.seed)[1]

    def restore_or_init(self, step: int) -> TrainState:
        """Return the state after `step` steps: a checkpoint, or the initial state for 0."""
        strategy, like, read = self.trainer.strategy, self.trainer.abstract_state, None
        if self.weights is not None and (like.frozen_params is not None or not step):
            read = self.weights().read(like.params if like.frozen_params is None else like.frozen_params)
        if step:
            state = dataclasses.replace(self.checkpoints.restore(step, like), frozen_params=read)
            return strategy.from_checkpoint(state)
        init_key, _ = init_and_dropout_keys(self.experiment.train.seed)
        return self.trainer.init_state(init_key, None if read is None else strategy.from_checkpoint(read))

    def batches(self, start: int) -> Generator[Batch]:
        """Yield the batches of the steps after `start`, sharded over the devices."""
        strategy = self.trainer.strategy
        with contextlib.closing(self._read(start, strategy.local_rows(self.experiment.train.batch_size))) as batches:
            yield from map(strategy.shard_batch, batches)

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
