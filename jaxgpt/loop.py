"""The training loop: the one impure part, top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from jaxgpt.checkpoint import Checkpoints
from jaxgpt.config import Experiment
from jaxgpt.data.dataset import Dataset, prepare
from jaxgpt.data.pipeline import training_batches, validation_batches
from jaxgpt.errors import UserError
from jaxgpt.evaluate import mean_loss
from jaxgpt.flops import count_parameters, train_flops_per_token
from jaxgpt.interrupts import signals
from jaxgpt.metrics import MetricsFile, read_metrics, rewind_metrics
from jaxgpt.parallel import multihost
from jaxgpt.parallel.device import device_kind, keep_freed_memory
from jaxgpt.parallel.peaks import peaks
from jaxgpt.parallel.trainer import Trainer, make_trainer
from jaxgpt.paths import RUNS, is_run
from jaxgpt.progress import Display
from jaxgpt.record import claim, existing_run, refuse_other_configuration, refuse_other_data, write_record
from jaxgpt.run import Run, load, resolve_vocab
from jaxgpt.viz.curves import plot_losses

# Steps dispatched and not yet finished. Enough to hide the host's work; more would only queue memory, and several
# fake devices on few cores hang when hundreds are in flight.
IN_FLIGHT = 2


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run was saved first. `str()` says how to continue."""


class Diverged(RuntimeError):
    """The loss is no longer a finite number; the last checkpoint is from before."""


def fit(
    experiment: Experiment, run_dir: str | Path | None = None, *, fresh: bool = False, progress: bool = True
) -> Run:
    """Train an experiment in a run directory (None: `runs/NAME`), or go on with it from its last good checkpoint.

    fresh: start over, moving an old run aside. progress: show a live bar, or lines where there is no terminal.
    Returns the run with its best parameters. Raises `UserError` for whatever the user can repair, before
    anything is written; `Interrupted` after a save on Ctrl-C or SIGTERM; `Diverged` if the loss is not finite;
    `SaveFailed` if a checkpoint or the metrics cannot be written.
    """
    directory = Path(run_dir) if run_dir is not None else RUNS / experiment.name

    # Setup: nothing is written until all of it has worked.
    multihost.initialize(experiment.parallel)
    existing = existing_run(directory, fresh)
    if existing:
        refuse_other_configuration(directory, experiment)
    dataset = prepare(experiment.data, block_size=experiment.model.block_size, vocab_size=experiment.model.vocab_size)
    if existing:
        refuse_other_data(directory, dataset)
    resolved = dataclasses.replace(experiment, model=resolve_vocab(experiment.model, dataset.tokenizer))
    trainer = make_trainer(resolved)
    multihost.meet("everything is checked")

    with contextlib.ExitStack() as owned:
        checkpoints = Checkpoints(
            directory / "checkpoints",
            keep_last=experiment.train.keep_last,
            keep_every=experiment.train.keep_every,
        )

        def begin() -> int:
            """The directory is ours, a run, and as its newest good checkpoint left it: that step."""
            owned.enter_context(claim(directory, fresh))
            if not existing:
                if is_run(directory):
                    raise UserError(
                        f"another process has just begun a run in {directory}: start again to go on with it"
                    )
                write_record(directory, experiment, dataset, resolved.model.vocab_size)
            checkpoints.clean()
            step = checkpoints.good() or 0
            checkpoints.set_aside_after(step)
            rewind_metrics(directory / "metrics.jsonl", step)
            return step

        start = multihost.by_leader(begin)
        _train(resolved, directory, dataset, trainer, checkpoints, start, progress)
    return load(directory)


def _train(
    experiment: Experiment,
    directory: Path,
    dataset: Dataset,
    trainer: Trainer,
    checkpoints: Checkpoints,
    start: int,
    progress: bool,
) -> None:
    """From the checkpoint of step `start`, 0 for none, to the end."""
    train, strategy, shares = experiment.train, trainer.strategy, trainer.shares
    leader = multihost.is_leader()
    keep_freed_memory()
    init_key, dropout_key = jax.random.split(jax.random.key(train.seed))
    state = strategy.from_checkpoint(checkpoints.restore(start, strategy.state)) if start else strategy.init(init_key)
    kept = read_metrics(directory / "metrics.jsonl")
    best = min((line["val_loss"] for line in kept if line.get("val_loss") is not None), default=math.inf)

    log = _Log(experiment, trainer, directory, start, kept, show=progress and leader)
    log.introduce(dataset)
    batches = training_batches(
        dataset.train,
        block_size=experiment.model.block_size,
        batch_size=train.batch_size,
        seed=train.seed,
        start_step=start,
        rows=strategy.rows(train.batch_size),
    )
    pending: deque = deque()  # (step, its metrics, still on the device)

    def settle(limit: int) -> None:
        """Log finished steps until at most `limit` are in flight: the loop's only wait for the device."""
        while len(pending) > limit:
            step, on_device = pending.popleft()
            found = {name: float(value) for name, value in on_device.items()}
            if not math.isfinite(found["loss"]):
                raise Diverged(
                    f"the loss is {found['loss']} at step {step}: lower --optim.learning-rate, or raise "
                    f"--optim.warmup-steps. The last checkpoint is step {checkpoints.last() or 'none'}."
                )
            log.step(step, **found)

    def validate() -> float | None:
        """None: a signal came between, and saving goes first."""
        windows = validation_batches(
            dataset.val,
            block_size=experiment.model.block_size,
            batch_size=shares.rows,
            max_tokens=train.eval_tokens,
            rows=strategy.rows(shares.rows),
        )

        def until_asked() -> Iterable:
            for window in windows:
                yield strategy.place(window)
                if caught:
                    return

        with log.clock.paused():
            val_loss, _ = mean_loss(trainer.evaluate, state.params, until_asked())
        return None if caught else val_loss

    def due(step: int) -> bool:
        return step % train.eval_every == 0 or step == train.steps

    lost = False
    try:
        with signals() as caught:
            if start and due(start) and not any(x["step"] == start and "val_loss" in x for x in kept):
                # The signal that ended the last sitting came before this could be measured.
                val_loss = validate()
                if val_loss is not None:
                    if leader:
                        checkpoints.measured(start, val_loss)
                    log.validation(start, val_loss)
                    best = min(best, val_loss)
            for step in range(start + 1, train.steps + 1):
                began = time.monotonic()
                state, on_device = trainer.step(state, strategy.place(next(batches)), dropout_key)
                pending.append((step, on_device))
                if step == start + 1:  # waits once: the first step is compilation
                    settle(0)
                    log.compiled(step, time.monotonic() - began)
                settle(IN_FLIGHT)
                checkpoints.raise_if_failed()

                stop = bool(caught) or multihost.stop_requested(step)
                val_loss = None
                if due(step) and not stop:
                    settle(0)
                    val_loss = validate()
                    if val_loss is not None:
                        log.validation(step, val_loss)
                    stop = stop or bool(caught)
                is_best = val_loss is not None and val_loss < best
                if step % train.checkpoint_every == 0 or is_best or step == train.steps or stop:
                    settle(0)  # a step whose loss is not finite is never saved
                    with log.clock.paused():
                        checkpoints.save(strategy.to_checkpoint(state), step, val_loss)
                    best = val_loss if is_best else best
                if stop:
                    checkpoints.wait()
                    raise Interrupted(
                        f"{caught[0].name if caught else 'SIGTERM'}: saved step {step} of {train.steps}. "
                        f"To continue: jaxgpt train --run-dir {directory}"
                    )
            checkpoints.wait()
    except (jax.errors.JaxRuntimeError, ValueError) as e:  # what a broken exchange raises depends on who carried it
        if multihost.several() and not isinstance(e, UserError):
            lost = True
            raise multihost.ProcessLost(
                f"process {jax.process_index()} of {jax.process_count()} ends, since another one failed: {str(e).splitlines()[0]}. "
                f"The last checkpoint is step {checkpoints.last() or 'none'}."
            ) from None
        raise
    finally:
        batches.close()
        log.close()
        if not lost:  # else this would wait for the others
            checkpoints.close()
        if leader:
            with contextlib.suppress(OSError):  # a full disk has been told by now
                plot_losses(read_metrics(directory / "metrics.jsonl"), directory / "loss.png", experiment.name)


class _Log:
    """What the loop says: lines of metrics.jsonl, and the display. Only the first process says anything."""

    def __init__(
        self, experiment: Experiment, trainer: Trainer, directory: Path, start: int, kept: list[dict], *, show: bool
    ):
        self._experiment, self._trainer, self._directory, self._start = experiment, trainer, directory, start
        train = experiment.train
        self._n_params = count_parameters(trainer.strategy.state.params)
        self._tokens_per_step = train.batch_size * experiment.model.block_size
        limits = peaks(device_kind())  # None: unknown, and so is the MFU
        devices = len(trainer.strategy.devices)
        per_token = train_flops_per_token(experiment.model, self._n_params)
        self._mfu_of_rate = None if limits is None else per_token / (limits.flops * devices)
        self._display = Display(train.steps, start, show=show)
        self._file = MetricsFile(directory / "metrics.jsonl" if multihost.is_leader() else None)
        self.clock = _Clock(max((line.get("seconds") or 0.0 for line in kept), default=0.0))
        self._logged_at = (start, self.clock.working())

    def introduce(self, dataset: Dataset) -> None:
        experiment, strategy, shares = self._experiment, self._trainer.strategy, self._trainer.shares
        say, train = self._display.say, experiment.train
        hardware = f"{len(strategy.devices)} x {device_kind()}, {self._trainer.options.reason}"
        say(f"{experiment.name}: {self._n_params:,} parameters, {hardware}")
        if shares.shards * shares.accumulation > 1:
            say(
                f"{strategy.name}: {train.batch_size} sequences per step are {shares.shards} parts of "
                f"{shares.accumulation} micro-batch{'es' * (shares.accumulation > 1)} of {shares.micro}"
            )
        say(
            f"{len(dataset.train):,} training and {len(dataset.val):,} validation tokens, "
            f"vocabulary {experiment.model.vocab_size}; {self._tokens_per_step:,} tokens per step; run in {self._directory}"
        )
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

    def validation(self, step: int, val_loss: float) -> None:
        self._file.write(step=step, val_loss=val_loss)
        self._display.update(step, val_loss=val_loss)

    def close(self) -> None:
        self._display.close()
        self._file.close()


class _Clock:
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
