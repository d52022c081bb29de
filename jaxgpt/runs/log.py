"""What a run tells while it trains: lines of metrics.jsonl, and of the display."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from jaxgpt.cluster import multihost
from jaxgpt.config import Experiment
from jaxgpt.data.tokens import Dataset
from jaxgpt.parallel.device import device_kind
from jaxgpt.parallel.flops import train_flops_per_token
from jaxgpt.parallel.peaks import peaks
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.metrics import MetricsFile
from jaxgpt.runs.progress import Display


class Log:
    """What the loop says: lines of metrics.jsonl, and the display. Only the first process says anything."""

    def __init__(
        self, experiment: Experiment, trainer: Trainer, directory: Path, start: int, kept: list[dict], *, show: bool
    ):
        self._experiment, self._trainer, self._directory, self._start = experiment, trainer, directory, start
        train = experiment.train
        self._n_params, self._in_adapters = trainer.parameters
        self._tokens_per_step = train.batch_size * experiment.model.block_size
        limits = peaks(device_kind())  # None: unknown, and so is the MFU
        devices = len(trainer.strategy.devices)
        per_token = train_flops_per_token(experiment.model, self._n_params, self._in_adapters)
        self._mfu_of_rate = None if limits is None else per_token / (limits.flops * devices)
        self.clock = Clock(max((line.get("seconds") or 0.0 for line in kept), default=0.0))
        self._logged_at = (start, self.clock.working())
        self._file = MetricsFile(directory / "metrics.jsonl" if multihost.is_leader() else None)
        self._display = Display(train.steps, start, show=show)  # last: a bar that is shown has to be closed

    def introduce(self, dataset: Dataset) -> None:
        experiment, strategy, split = self._experiment, self._trainer.strategy, self._trainer.split
        say, train = self._display.say, experiment.train
        hardware = f"{len(strategy.devices)} x {device_kind()}, {self._trainer.options.reason}"
        adapters = f" and {self._in_adapters:,} in adapters, which alone are trained" if self._in_adapters else ""
        say(f"{experiment.name}: {self._n_params:,} parameters{adapters}, {hardware}")
        if self._trainer.fallback is not None:
            say(self._trainer.fallback)
        if train.init_from is not None and not self._start:
            say(f"starting from {train.init_from}, with a context of {experiment.model.block_size:,} tokens")
        if split.data_parallel_size * split.grad_accum_steps > 1:
            say(
                f"{strategy.name}: {train.batch_size} sequences per step are {split.data_parallel_size} parts of "
                f"{split.grad_accum_steps} micro-batch{'es' * (split.grad_accum_steps > 1)} of {split.micro_batch_size}"
            )
        say(
            f"{len(dataset.train):,} training and {len(dataset.val):,} validation tokens, "
            f"vocabulary {experiment.model.vocab_size}; {self._tokens_per_step:,} tokens per step; run in {self._directory}"
        )
        for line in dataset.said:
            say(line)
        if self._start:
            say(f"continuing at step {self._start} of {train.steps}")

    def compiled(self, step: int, seconds: float) -> None:
        self._logged_at = (step, self.clock.working())
        self._display.say(
            f"first step after {seconds:.1f} s (tracing and compilation; a second start finds it compiled)"
        )

    def step(self, step: int, *, loss: float, grad_norm: float, learning_rate: float) -> None:
        train = self._experiment.train
        if step % train.log_every and step != train.steps:
            return
        then, at = self._logged_at
        self._logged_at = (step, self.clock.working())
        tokens = (step - then) * self._tokens_per_step
        # Unknown for the first step, which is compilation.
        rate = None if step == self._start + 1 else tokens / max(self._logged_at[1] - at, 1e-9)
        self._file.write(
            step=step,
            tokens=step * self._tokens_per_step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens_per_second=rate,
            mfu=None if rate is None or self._mfu_of_rate is None else rate * self._mfu_of_rate,
            seconds=self.clock.total(),
        )
        self._display.update(step, loss=loss, rate=rate)

    def skipped(self, step: int, why: str) -> None:
        self._file.write(step=step, skipped=why)

    def say(self, text: str) -> None:
        self._display.say(text)

    def validation(self, step: int, val_loss: float) -> None:
        self._file.write(step=step, val_loss=val_loss)
        self._display.update(step, val_loss=val_loss)

    def close(self) -> None:
        self._display.close()
        self._file.close()


class Clock:
    """Seconds of a run over all its sittings, and those of them spent on steps rather than on pauses."""

    def __init__(self, before: float):
        self._start = time.monotonic() - before
        self._pauses = 0.0

    def total(self) -> float:
        return time.monotonic() - self._start

    def working(self) -> float:
        return self.total() - self._pauses

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._pauses += time.monotonic() - began
