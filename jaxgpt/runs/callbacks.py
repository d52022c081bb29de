"""Callbacks of the training loop in a run: validate, save, examine a non-finite step, compare replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from jaxgpt import loop
from jaxgpt.batch import Batch
from jaxgpt.callbacks import Callbacks, Metrics
from jaxgpt.cluster import multihost
from jaxgpt.cluster.replicas import check_replicas
from jaxgpt.cluster.signals import Stop
from jaxgpt.cluster.watchdog import Watchdog
from jaxgpt.errors import CheckpointSaveError
from jaxgpt.parallel.device import device_kind
from jaxgpt.parallel.trainer import mean_loss
from jaxgpt.runs.autopsy import write_autopsy
from jaxgpt.runs.directory import is_run
from jaxgpt.runs.log import RunLog
from jaxgpt.runs.training import Training
from jaxgpt.skip import NOT_FINITE, why_skipped
from jaxgpt.train import TrainState


@dataclasses.dataclass(kw_only=True)
class RunCallbacks(Callbacks):
    """Validate, save, examine and compare in a run directory: see `Callbacks`."""

    training: Training
    watchdog: Watchdog
    log: RunLog
    stop: Stop
    compared: int  # the last step after which the replicas were compared
    has_examined: bool = False  # an autopsy of a non-finite step was tried

    def begin_step(self, step: int) -> None:
        """Feed the watchdog."""
        self.watchdog.beat(step)

    def agree(self, number: int) -> int:
        """Return the number of process 0, in all processes."""
        return multihost.on_process_0(lambda: number)

    def checksums(self, step: int, state: TrainState) -> jax.Array | None:
        """Return a checksum of each replica of the state if they are compared after this step, otherwise None."""
        compute, every = self.training.trainer.checksums, self.training.experiment.parallel.check_replicas_every
        return compute(state) if compute and every and step % every == 0 else None

    def compare(self, step: int, checksums: jax.Array) -> None:
        """Raise `ReplicasDiffer` if the checksums differ."""
        check_replicas(checksums, self.training.trainer.strategy.devices, self.compared, step)
        self.compared = step

    def stop_signal(self, step: int | None) -> str | None:
        """Return the name of the signal that ends the run, if it has arrived."""
        return self.stop(step)

    def validate(self, step: int, state: TrainState) -> float | None:
        """Return the validation loss, or None if a signal interrupted it."""
        trainer = self.training.trainer
        with self.log.clock.paused():
            val_loss, _ = mean_loss(trainer.eval_step, trainer.merged_params(state), self._windows(step))
        return val_loss if self.stop(None) is None else None

    def validate_start(self, step: int, state: TrainState) -> float | None:
        """Measure the validation loss at the start of a session, if a signal interrupted that in the previous one."""
        val_loss = self.validate(step, state)
        if val_loss is None:
            return None
        if multihost.is_process_0():
            self.training.checkpoints.set_val_loss(step, val_loss)
        return loop.log_validation(self.log, step, val_loss, self.training.experiment.train)

    def _windows(self, step: int) -> Iterator[Batch]:
        """Yield the validation batches until a signal arrives."""
        for window in self.training.validation_windows():
            self.watchdog.beat(step)
            yield window
            if self.stop(None) is not None:
                return

    def skipped(self, step: int, metrics: Metrics, state: TrainState, later: Sequence[Metrics]) -> None:
        """Log a skipped step, and examine the first non-finite one."""
        why = why_skipped(metrics)
        self.log.skipped(step, why)
        if int(metrics["skipped"]) == NOT_FINITE and not self.has_examined:
            self.has_examined = True
            if multihost.is_process_0():
                self.watchdog.beat(step, slow=True)
                with self.log.clock.paused():
                    why = write_autopsy(self.training, state=state, step=step, metrics=metrics, later=later)
        self.log.say(f"step {step} skipped: {why}")

    def save(self, step: int, state: TrainState, val_loss: float | None) -> None:
        """Compare the replicas if they were not compared after this step, then start to save."""
        self.watchdog.beat(step, slow=True)
        training, trainer = self.training, self.training.trainer
        if trainer.checksums and self.compared < step:
            self.compare(step, trainer.checksums(state))
        if multihost.is_process_0() and not is_run(training.directory):
            raise CheckpointSaveError(f"{training.directory} was deleted or moved, so step {step} is not saved")
        with self.log.clock.paused():
            training.checkpoints.save(trainer.strategy.to_checkpoint(state), step, val_loss)

    def raise_if_save_failed(self) -> None:
        """Raise `CheckpointSaveError` if the last save has failed by now."""
        self.training.checkpoints.raise_if_failed()

    def wait_for_save(self) -> None:
        """Wait until the last save is on disk."""
        self.training.checkpoints.wait()


def introduction(training: Training, start: int) -> Iterator[str]:
    """Yield lines that describe a run: its model, hardware and data, and `start`, the step to resume from."""
    experiment, trainer, dataset = training.experiment, training.trainer, training.dataset
    strategy, split, train = trainer.strategy, trainer.split, experiment.train
    n_params, in_adapters = trainer.parameters
    hardware = f"{len(strategy.devices)} x {device_kind()}, {trainer.options.reason}"
    adapters = f" and {in_adapters:,} in adapters, the only ones trained" if in_adapters else ""
    yield f"{experiment.name}: {n_params:,} parameters{adapters}, {hardware}"
    if trainer.fallback is not None:
        yield trainer.fallback
    if training.weights is not None and not start:
        whole, context = training.weights().config.block_size, experiment.model.block_size
        yield f"starting from {train.init_from}, with a context of {context:,} tokens"
        if context < whole:
            yield f"the weights' context of {whole} tokens is cut to {context}: --model.block-size {whole} keeps it"
    if strategy.data_parallel_size * split.grad_accum_steps > 1:
        yield (
            f"{strategy.name}: {train.batch_size} sequences per step are {strategy.data_parallel_size} parts of "
            f"{split.grad_accum_steps} micro-batch{'es' * (split.grad_accum_steps > 1)} of {split.micro_batch_size}"
        )
    yield (
        f"{len(dataset.train):,} training and {len(dataset.val):,} validation tokens, "
        f"vocabulary {experiment.model.vocab_size}; "
        f"{train.batch_size * experiment.model.block_size:,} tokens per step; run in {training.directory}"
    )
    yield from dataset.notes
    if start:
        yield f"continuing at step {start} of {train.steps}"
